# SPDX-License-Identifier: Apache-2.0
"""A scheduler's shortcut to its own workers, for what they should know before the next step.

    scheduler's thread                       a thread of each worker
    Announcer.tell(message)   --- TCP --->   Listener: hear(message)

Steps reach a worker one after the other, each when the last one is computed. What is announced
reaches it while it computes. It may come late or not at all, and says nothing that a later step
does not say as well: a lost announcement costs latency only.

Workers learn from a step where the announcer is, and its public key, without which no client
connects: ZeroMQ's CURVE sends neither that key nor what is told in the clear. The announcer alone
has the secret one, so that a worker hears nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field

import zmq
from vllm.logger import init_logger
from vllm.utils.network_utils import is_valid_ipv6_address, make_zmq_path

from ..protocol.quoting import one_line, quote
from .cpu import running_on
from .sockets import listen

logger = init_logger(__name__)

_MAX_REQUEST_BYTES = 1 << 10
"""Subscriptions are all that an announcer is sent."""

_QUEUED_MESSAGES = 1000
"""What is kept for a worker that does not read; it loses what is said then."""


@dataclass(frozen=True, slots=True)
class AnnouncerAddress:
    """Where an engine's announcer listens.

    Attributes:
        host: Host name or address.
        port: TCP port.
        public_key: What it is known by; clients without it are rejected.
    """

    host: str
    port: int
    public_key: bytes = field(repr=False)


class Announcer:
    """Tells the workers of one engine. Belongs to the scheduler's thread.

    Args:
        host: Address of this machine to listen at, on a port that is free.

    Attributes:
        address: Where it listens.

    Raises:
        ZMQError: The address cannot be bound, or ZeroMQ was built without CURVE.
    """

    def __init__(self, host: str) -> None:
        public_key, secret_key = zmq.curve_keypair()
        self._context = zmq.Context()
        try:
            self._socket = self._context.socket(zmq.PUB)
            self._socket.sndhwm = _QUEUED_MESSAGES
            self._socket.curve_server = True
            self._socket.curve_secretkey = secret_key
            port = listen(self._socket, host, 0, _MAX_REQUEST_BYTES)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.address = AnnouncerAddress(host, port, public_key)

    def tell(self, message: bytes) -> None:
        """Tell all workers that listen; waits for none."""
        self._socket.send(message, zmq.NOBLOCK)

    def close(self) -> None:
        """Say nothing any more; may be called repeatedly."""
        self._context.destroy(linger=0)


class Listener:
    """Hears what one announcer tells, in a thread of its own.

    The socket belongs to that thread once it runs. `close` may be called by any other.

    Args:
        address: The announcer's.
        hear: Called by the thread with each message.
        cores: Where it and ZeroMQ's threads may run; None for where the calling thread may.

    Raises:
        ZMQError: There are no more sockets, or ZeroMQ was built without CURVE.
        OSError: The cores are not this process's any more.
        RuntimeError: There are no more threads.
    """

    def __init__(
        self,
        address: AnnouncerAddress,
        hear: Callable[[bytes], None],
        cores: Collection[int] | None = None,
    ) -> None:
        self._hear = hear
        self._context = zmq.Context()
        try:
            with running_on(cores):
                # ZeroMQ's threads begin with the first socket.
                socket = self._context.socket(zmq.SUB)
                self._thread = threading.Thread(
                    target=self._run, args=(socket,), name="reshard-listener", daemon=True
                )
                _connect(socket, address)
                self._thread.start()
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def close(self) -> None:
        """Hear nothing any more; may be called repeatedly."""
        # This ends the wait for a message, and returns once the thread has closed the socket.
        self._context.term()
        self._thread.join()

    def _run(self, socket: zmq.Socket[bytes]) -> None:
        with suppress(zmq.ContextTerminated), socket:
            while True:
                message = socket.recv()
                try:
                    self._hear(message)
                except Exception:
                    logger.exception("An announcement is lost: the next step says the same")


def _connect(socket: zmq.Socket[bytes], address: AnnouncerAddress) -> None:
    """Subscribe to all that an announcer tells."""
    socket.linger = 0
    socket.ipv6 = is_valid_ipv6_address(address.host)
    socket.curve_serverkey = address.public_key
    # A client that knows the other key is let in with any of its own.
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.subscribe(b"")
    socket.connect(make_zmq_path("tcp", address.host, address.port))


def open_announcer(host: str) -> Announcer | None:
    """An announcer, or a line in the log and None: an engine can do without."""
    try:
        return Announcer(host)
    except zmq.ZMQError as error:
        _do_without(host, error)
        return None


def listen_to(
    address: AnnouncerAddress, hear: Callable[[bytes], None], cores: Collection[int] | None
) -> Listener | None:
    """A listener, or a line in the log and None: a worker can do without."""
    try:
        return Listener(address, hear, cores)
    except (zmq.ZMQError, OSError, RuntimeError) as error:
        _do_without(address.host, error)
        return None


def _do_without(host: str, error: Exception) -> None:
    logger.warning(
        "Workers hear of what is offered with the next step only, as nothing can be announced to "
        "them at %s (%s): decode engines may wait for that step.",
        quote(host),
        one_line(error),
    )

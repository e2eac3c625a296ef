# SPDX-License-Identifier: Apache-2.0
"""A scheduler's shortcut to its own workers, for what they should receive before the next step.

    scheduler's thread                       a thread of each worker
    announcer.send(message)   --- TCP --->   hear(message)

Steps reach a worker one after the other, each once the last one is computed. Announcements reach it
while it computes. They may arrive late or not at all, and a later step always repeats them: a lost
announcement costs only latency.

A step tells workers the announcer's address and public key. Keys are made anew for each announcer:
ZeroMQ's CURVE sends neither the public key nor messages in the clear. Who lacks the public key is
rejected; the announcer alone has the secret key, so that workers believe nobody else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field

import zmq
from vllm.logger import init_logger
from vllm.utils.network_utils import is_valid_ipv6_address, make_zmq_path

from ..errors import one_line, quote
from .cpu import running_on

logger = init_logger(__name__)

_MAX_REQUEST_BYTES = 1 << 10
"""Maximum size of a frame to an announcer, which receives only subscriptions."""

_QUEUED_MESSAGES = 1000
"""Maximum number of messages queued for a worker that does not read; it loses further ones."""


@dataclass(frozen=True, slots=True)
class AnnouncerAddress:
    """Where a scheduler announces.

    Attributes:
        host: Host name or address.
        port: TCP port.
        public_key: The announcer's public key; workers without it are rejected.
    """

    host: str
    port: int
    public_key: bytes = field(repr=False)


class Announcer:
    """Sends messages to all workers of this engine that listen.

    Belongs to one thread; any may `close` it after the last message.

    Args:
        host: Address of this machine to listen at, on a free port.

    Attributes:
        address: Where it listens.

    Raises:
        ZMQError: The address cannot be bound, there are no more sockets, or ZeroMQ was built
            without CURVE.
    """

    def __init__(self, host: str) -> None:
        public_key, secret_key = zmq.curve_keypair()
        self._context = zmq.Context()
        try:
            self._socket = self._context.socket(zmq.PUB)
            self._socket.linger = 0
            self._socket.ipv6 = is_valid_ipv6_address(host)
            self._socket.sndhwm = _QUEUED_MESSAGES
            self._socket.maxmsgsize = _MAX_REQUEST_BYTES
            # Workers that vanish without closing do not stay connected for ever.
            self._socket.tcp_keepalive = 1
            self._socket.curve_server = True
            self._socket.curve_secretkey = secret_key
            port = self._socket.bind_to_random_port(make_zmq_path("tcp", host))
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.address = AnnouncerAddress(host, port, public_key)

    def send(self, message: bytes) -> None:
        """Send a message without blocking; it is lost if the queue is full."""
        with suppress(zmq.Again):
            self._socket.send(message, zmq.NOBLOCK)

    def close(self) -> None:
        """Close the socket; may be called repeatedly."""
        self._context.destroy(linger=0)


class Listener:
    """Receives an announcer's messages in a thread of its own, to which the socket belongs.

    Any other thread may call `close`.

    Args:
        address: The announcer's address.
        hear: Called by the thread with each message.

    Raises:
        ZMQError: There are no more sockets, or ZeroMQ was built without CURVE.
        RuntimeError: There are no more threads.
    """

    def __init__(self, address: AnnouncerAddress, hear: Callable[[bytes], None]) -> None:
        self._hear = hear
        self._context = zmq.Context()
        try:
            self._socket = self._context.socket(zmq.SUB)
            self._socket.linger = 0
            self._socket.ipv6 = is_valid_ipv6_address(address.host)
            self._socket.curve_serverkey = address.public_key
            # Whoever knows the announcer's key is accepted with any key of its own.
            self._socket.curve_publickey, self._socket.curve_secretkey = zmq.curve_keypair()
            self._socket.subscribe(b"")
            self._socket.connect(make_zmq_path("tcp", address.host, address.port))
            self._thread = threading.Thread(target=self._run, name="reshard-listener", daemon=True)
            self._thread.start()
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def close(self) -> None:
        """Stop receiving and end the thread; may be called repeatedly."""
        # This interrupts the wait for a message, and returns once the thread has closed the socket.
        self._context.term()
        self._thread.join()

    def _run(self) -> None:
        with suppress(zmq.ContextTerminated), self._socket as socket:
            while True:
                message = socket.recv()
                try:
                    self._hear(message)
                except Exception:
                    logger.exception("An announcement is lost: the next step says the same")


def open_announcer(host: str) -> Announcer | None:
    """Return an announcer; on failure, which is logged, None, as an engine can do without."""
    try:
        return Announcer(host)
    except zmq.ZMQError as error:
        _do_without(host, error)
        return None


def listen_to(
    address: AnnouncerAddress, hear: Callable[[bytes], None], cores: Collection[int] | None = None
) -> Listener | None:
    """Return a listener; on failure, which is logged, None, as a worker can do without.

    Args:
        address: The announcer's address.
        hear: Called by the listener's thread with each message.
        cores: Where it and ZeroMQ's threads may run; None for where the calling thread may.
    """
    try:
        # The first socket starts ZeroMQ's threads.
        with running_on(cores):
            return Listener(address, hear)
    except (zmq.ZMQError, OSError, RuntimeError) as error:
        _do_without(address.host, error)
        return None


def _do_without(host: str, error: Exception) -> None:
    logger.warning(
        "Workers hear of what is offered with the next step only, as nothing can be announced to "
        "them at %s (%s): decode engines may wait for that step. See that this address is this "
        "machine's, and raise the limit of open files (ulimit -n).",
        quote(host),
        one_line(error),
    )

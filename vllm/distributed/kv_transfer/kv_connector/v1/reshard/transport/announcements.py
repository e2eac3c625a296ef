# SPDX-License-Identifier: Apache-2.0
"""A scheduler's shortcut to its own workers, for what they should receive before the next step.

    scheduler's thread                       a thread of each worker
    Announcer.tell(message)   --- TCP --->   Listener: hear(message)

Steps reach a worker one after the other, each once the last one is computed. Announcements reach it
while it computes. They may arrive late or not at all, and a later step always repeats them: a lost
announcement costs only latency.

A step tells workers the announcer's address and public key: see `sockets`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import zmq
from vllm.logger import init_logger

from ..protocol.quoting import one_line, quote
from .cpu import running_on
from .sockets import InternalAddress, Receiver, connect_internally, listen_internally

logger = init_logger(__name__)

_MAX_REQUEST_BYTES = 1 << 10
"""Maximum size of a frame to an announcer, which receives only subscriptions."""

_QUEUED_MESSAGES = 1000
"""Maximum number of messages queued for a worker that does not read; it loses further ones."""


class Announcer:
    """Sends messages to the workers of one engine. Belongs to the scheduler's thread.

    Args:
        host: Address of this machine to listen at, on a free port.

    Attributes:
        address: Where it listens.

    Raises:
        ZMQError: The address cannot be bound, or ZeroMQ was built without CURVE.
    """

    def __init__(self, host: str) -> None:
        self._context = zmq.Context()
        try:
            self._socket = self._context.socket(zmq.PUB)
            self._socket.sndhwm = _QUEUED_MESSAGES
            self.address = listen_internally(self._socket, host, _MAX_REQUEST_BYTES)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def tell(self, message: bytes) -> None:
        """Send a message to all workers that listen; does not block."""
        self._socket.send(message, zmq.NOBLOCK)

    def close(self) -> None:
        """Close its socket; may be called repeatedly."""
        self._context.destroy(linger=0)


class Listener:
    """Receives one announcer's messages, in a thread of its own.

    Any other thread may call `close`.

    Args:
        address: The announcer's address.
        hear: Called by the thread with each message.
        cores: Where it and ZeroMQ's threads may run; None for where the calling thread may.

    Raises:
        ZMQError: There are no more sockets, or ZeroMQ was built without CURVE.
        OSError: The cores are not this process's any more.
        RuntimeError: There are no more threads.
    """

    def __init__(
        self,
        address: InternalAddress,
        hear: Callable[[bytes], None],
        cores: Collection[int] | None = None,
    ) -> None:
        self._hear = hear

        def open_socket(socket: zmq.Socket[bytes]) -> None:
            socket.subscribe(b"")
            connect_internally(socket, address)

        with running_on(cores):
            # The first socket starts ZeroMQ's threads.
            self._receiver = Receiver(zmq.SUB, "reshard-listener", self._hear_safely)
            self._receiver.begin(open_socket)

    def close(self) -> None:
        """Stop listening; may be called repeatedly."""
        self._receiver.close()

    def _hear_safely(self, message: bytes) -> None:
        try:
            self._hear(message)
        except Exception:
            logger.exception("An announcement is lost: the next step says the same")


def open_announcer(host: str) -> Announcer | None:
    """Open an announcer; on failure, log it and return None, as an engine can do without."""
    try:
        return Announcer(host)
    except zmq.ZMQError as error:
        _do_without(host, error)
        return None


def listen_to(
    address: InternalAddress, hear: Callable[[bytes], None], cores: Collection[int] | None
) -> Listener | None:
    """Open a listener; on failure, log it and return None, as a worker can do without."""
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

# SPDX-License-Identifier: Apache-2.0
"""A scheduler's shortcut to its own workers, for what they should receive before the next step.

    scheduler's thread                       a thread of each worker
    announcer.send(message)   --- TCP --->   hear(message)

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
from .sockets import (
    CHECK_ADDRESS,
    InternalAddress,
    Receiver,
    Sender,
    connect_internally,
    listen_internally,
)

logger = init_logger(__name__)

_MAX_REQUEST_BYTES = 1 << 10
"""Maximum size of a frame to an announcer, which receives only subscriptions."""

_QUEUED_MESSAGES = 1000
"""Maximum number of messages queued for a worker that does not read; it loses further ones."""


def open_announcer(host: str) -> Sender | None:
    """Open a socket that sends messages to all workers of this engine that listen.

    Args:
        host: Address of this machine to listen at, on a free port.

    Returns:
        The socket; on failure, which is logged, None, as an engine can do without.
    """

    def open_socket(socket: zmq.Socket[bytes]) -> InternalAddress:
        socket.sndhwm = _QUEUED_MESSAGES
        return listen_internally(socket, host, _MAX_REQUEST_BYTES)

    try:
        return Sender(zmq.PUB, open_socket)
    except zmq.ZMQError as error:
        _do_without(host, error)
        return None


def listen_to(
    address: InternalAddress, hear: Callable[[bytes], None], cores: Collection[int] | None = None
) -> Receiver | None:
    """Receive one announcer's messages, in a thread of their own.

    Args:
        address: The announcer's address.
        hear: Called by the thread with each message.
        cores: Where it and ZeroMQ's threads may run; None for where the calling thread may.

    Returns:
        The receiver; on failure, which is logged, None, as a worker can do without.
    """

    def open_socket(socket: zmq.Socket[bytes]) -> InternalAddress:
        socket.subscribe(b"")
        return connect_internally(socket, address)

    def hear_safely(message: bytes) -> None:
        try:
            hear(message)
        except Exception:
            logger.exception("An announcement is lost: the next step says the same")

    try:
        # The first socket starts ZeroMQ's threads.
        with running_on(cores):
            return Receiver(zmq.SUB, "reshard-listener", open_socket, hear_safely)
    except (zmq.ZMQError, OSError, RuntimeError) as error:
        _do_without(address.host, error)
        return None


def _do_without(host: str, error: Exception) -> None:
    logger.warning(
        "Workers hear of what is offered with the next step only, as nothing can be announced to "
        "them at %s (%s): decode engines may wait for that step. %s.",
        quote(host),
        one_line(error),
        CHECK_ADDRESS,
    )

# SPDX-License-Identifier: Apache-2.0
"""A scheduler's shortcut to its own workers, for what they should know before the next step.

    scheduler's thread                       a thread of each worker
    Announcer.tell(message)   --- TCP --->   Listener: hear(message)

Steps reach a worker one after the other, each when the last one is computed. What is announced
reaches it while it computes. It may come late or not at all, and says nothing that a later step
does not say as well: who misses it is where he would be without.

Workers learn from a step where the announcer is, and its public key, without which nobody connects:
ZeroMQ's CURVE sends neither that key nor anything else in the clear. Nobody but the announcer has
the secret one, so that a worker hears nobody else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq
from vllm.logger import init_logger
from vllm.utils.network_utils import is_valid_ipv6_address, make_zmq_path

from .sockets import listen

logger = init_logger(__name__)

_MAX_REQUEST_BYTES = 1 << 10
"""Subscriptions are all that an announcer is sent."""


@dataclass(frozen=True, slots=True)
class AnnouncerAddress:
    """Where an engine's announcer listens.

    Attributes:
        host: Host name or address.
        port: TCP port.
        public_key: What it is known by; who does not know it is not let in.
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
            self._socket.curve_server = True
            self._socket.curve_secretkey = secret_key
            port = listen(self._socket, host, 0, _MAX_REQUEST_BYTES)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.address = AnnouncerAddress(host, port, public_key)

    def tell(self, message: bytes) -> None:
        """Tell all workers that listen; one that does not read loses what is said."""
        self._socket.send(message, zmq.NOBLOCK)

    def close(self) -> None:
        """Say nothing any more; may be called repeatedly."""
        self._context.destroy(linger=0)


class Listener:
    """Hears what one announcer tells, in a thread of its own.

    The socket belongs to that thread. `close` may be called by any other.

    Args:
        address: The announcer's.
        hear: Called by the thread with each message.
        prepare: Called by the thread before everything else.
    """

    def __init__(
        self,
        address: AnnouncerAddress,
        hear: Callable[[bytes], None],
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self._address = address
        self._hear = hear
        self._prepare = prepare
        self._context = zmq.Context()
        self._thread = threading.Thread(target=self._run, name="reshard-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hear nothing any more; may be called repeatedly."""
        # This ends the wait for a message, and returns once the thread has closed the socket.
        self._context.term()
        self._thread.join()

    def _run(self) -> None:
        address = self._address
        try:
            with self._context.socket(zmq.SUB) as socket:
                self._prepare()
                socket.linger = 0
                socket.ipv6 = is_valid_ipv6_address(address.host)
                socket.curve_serverkey = address.public_key
                socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
                socket.subscribe(b"")
                socket.connect(make_zmq_path("tcp", address.host, address.port))
                while True:
                    self._hear(socket.recv())
        except zmq.ContextTerminated:
            pass


def open_announcer(host: str) -> Announcer | None:
    """An announcer, or a line in the log and None: an engine can do without."""
    try:
        return Announcer(host)
    except zmq.ZMQError as error:
        logger.warning(
            "Workers hear of what is offered with the next step only, as nothing can be announced "
            "to them at %s (%s): decode engines may wait for that step.",
            host,
            error,
        )
        return None

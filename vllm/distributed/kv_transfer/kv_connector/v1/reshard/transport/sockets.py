# SPDX-License-Identifier: Apache-2.0
"""Sockets that an engine listens on, and messages between its own processes.

Sockets for the engine's own processes have keys of their own, made anew for each: ZeroMQ's CURVE
sends neither the public key nor messages in the clear. Clients without the public key are rejected.
Only the listener has the secret key, so a client accepts messages from nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import zmq
from vllm.utils.network_utils import is_valid_ipv6_address, make_zmq_path

CHECK_ADDRESS = (
    "See that this address is this machine's, and raise the limit of open files (ulimit -n)"
)
"""Remedy where an internal socket cannot be opened or connected."""


@dataclass(frozen=True, slots=True)
class InternalAddress:
    """Where an engine listens for its own processes.

    Attributes:
        host: Host name or address.
        port: TCP port.
        public_key: The listener's public key; clients without it are rejected.
    """

    host: str
    port: int
    public_key: bytes = field(repr=False)


def listen(socket: zmq.Socket[bytes], host: str, port: int, max_bytes: int) -> int:
    """Have a socket listen over TCP.

    Args:
        socket: The socket; its other options are set.
        host: Address of this machine.
        port: TCP port; 0 for any free one.
        max_bytes: Size of the largest frame that it accepts.

    Returns:
        The port.

    Raises:
        ZMQError: The address cannot be bound.
    """
    socket.linger = 0
    socket.ipv6 = is_valid_ipv6_address(host)
    socket.maxmsgsize = max_bytes
    # Peers that vanish without closing do not stay connected for ever.
    socket.tcp_keepalive = 1
    socket.bind(make_zmq_path("tcp", host, port))
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return int(endpoint.rstrip(b"\0").rpartition(b":")[2])


def listen_internally(socket: zmq.Socket[bytes], host: str, max_bytes: int) -> InternalAddress:
    """Have a socket listen for this engine's own processes, on a free port.

    Args:
        socket: The socket; its other options are set.
        host: Address of this machine.
        max_bytes: Size of the largest frame that it accepts.

    Returns:
        Where it listens.

    Raises:
        ZMQError: The address cannot be bound, or ZeroMQ was built without CURVE.
    """
    public_key, secret_key = zmq.curve_keypair()
    socket.curve_server = True
    socket.curve_secretkey = secret_key
    return InternalAddress(host, listen(socket, host, 0, max_bytes), public_key)


def connect_internally(socket: zmq.Socket[bytes], address: InternalAddress) -> InternalAddress:
    """Connect a socket to one of this engine's own listeners; return the listener's address.

    Raises:
        ZMQError: ZeroMQ was built without CURVE.
    """
    socket.linger = 0
    socket.ipv6 = is_valid_ipv6_address(address.host)
    socket.curve_serverkey = address.public_key
    # A client that knows the listener's key is accepted with any key of its own.
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.connect(make_zmq_path("tcp", address.host, address.port))
    return address


class _Endpoint:
    """A socket for messages between an engine's own processes.

    Args:
        kind: ZeroMQ's type of the socket.
        open_socket: Has the socket listen or connect, and returns where.

    Attributes:
        address: Where it listens, or what it is connected to.

    Raises:
        ZMQError: There are no more sockets, or it cannot be opened.
    """

    def __init__(
        self, kind: int, open_socket: Callable[[zmq.Socket[bytes]], InternalAddress]
    ) -> None:
        self._context = zmq.Context()
        try:
            self._socket = self._context.socket(kind)
            self.address = open_socket(self._socket)
            self._start()
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def _start(self) -> None:
        """Start what the socket needs once it is open."""


class Sender(_Endpoint):
    """Sends messages. Belongs to one thread; any may `close` it after the last message."""

    def send(self, message: bytes) -> None:
        """Send a message without blocking; it is lost if the queue is full."""
        with suppress(zmq.Again):
            self._socket.send(message, zmq.NOBLOCK)

    def close(self) -> None:
        """Close the socket; may be called repeatedly."""
        self._context.destroy(linger=0)


class Receiver(_Endpoint):
    """Receives messages in a thread of its own, to which the socket belongs.

    Any other thread may call `close`.

    Args:
        kind: ZeroMQ's type of the socket.
        name: Name of the thread.
        open_socket: Has the socket listen or connect, and returns where.
        hear: Called by the thread with each message; must not raise.

    Raises:
        ZMQError: There are no more sockets, or it cannot be opened.
        RuntimeError: There are no more threads.
    """

    def __init__(
        self,
        kind: int,
        name: str,
        open_socket: Callable[[zmq.Socket[bytes]], InternalAddress],
        hear: Callable[[bytes], None],
    ) -> None:
        self._hear = hear
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        super().__init__(kind, open_socket)

    def close(self) -> None:
        """Stop receiving and end the thread; may be called repeatedly."""
        # This interrupts the wait for a message, and returns once the thread has closed the socket.
        self._context.term()
        self._thread.join()

    def _start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        with suppress(zmq.ContextTerminated), self._socket as socket:
            while True:
                self._hear(socket.recv())

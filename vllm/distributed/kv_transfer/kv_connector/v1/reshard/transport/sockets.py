# SPDX-License-Identifier: Apache-2.0
"""What all sockets have in common that this engine listens on.

Those that only its own processes connect to have keys, made anew for each: ZeroMQ's CURVE sends
neither the public one nor what is said in the clear. Clients without the public key are rejected,
and the listener alone has the secret one, so that a client hears nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import zmq
from vllm.utils.network_utils import is_valid_ipv6_address, make_zmq_path

_Opened = TypeVar("_Opened")


@dataclass(frozen=True, slots=True)
class InternalAddress:
    """Where an engine listens for its own processes.

    Attributes:
        host: Host name or address.
        port: TCP port.
        public_key: What the listener is known by; clients without it are rejected.
    """

    host: str
    port: int
    public_key: bytes = field(repr=False)


def listen(socket: zmq.Socket[bytes], host: str, port: int, max_bytes: int) -> int:
    """Have a socket listen over TCP.

    Args:
        socket: One whose other options are set.
        host: Address of this machine.
        port: TCP port; 0 for any that is free.
        max_bytes: Size of the largest frame that it accepts.

    Returns:
        The port.

    Raises:
        ZMQError: The address cannot be bound.
    """
    socket.linger = 0
    socket.ipv6 = is_valid_ipv6_address(host)
    socket.maxmsgsize = max_bytes
    # Peers that vanish without a word do not stay connected for ever.
    socket.tcp_keepalive = 1
    socket.bind(make_zmq_path("tcp", host, port))
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return int(endpoint.rstrip(b"\0").rpartition(b":")[2])


def listen_internally(socket: zmq.Socket[bytes], host: str, max_bytes: int) -> InternalAddress:
    """Have a socket listen for this engine's own processes, on a port that is free.

    Args:
        socket: One whose other options are set.
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


def connect_internally(socket: zmq.Socket[bytes], address: InternalAddress) -> None:
    """Have a socket connect to one of this engine's.

    Raises:
        ZMQError: ZeroMQ was built without CURVE.
    """
    socket.linger = 0
    socket.ipv6 = is_valid_ipv6_address(address.host)
    socket.curve_serverkey = address.public_key
    # A client that knows the other key is let in with any of its own.
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.connect(make_zmq_path("tcp", address.host, address.port))


class Receiver:
    """Hears what comes over a socket, in a thread of its own.

    The socket belongs to that thread once it runs. `close` may be called by any other.

    Args:
        kind: What kind of socket.
        name: What the thread is called.
        hear: Called by the thread with each message. It raises nothing.
    """

    def __init__(self, kind: int, name: str, hear: Callable[[bytes], None]) -> None:
        self._kind = kind
        self._hear = hear
        self._context = zmq.Context()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._socket: zmq.Socket[bytes] | None = None

    def begin(self, open_socket: Callable[[zmq.Socket[bytes]], _Opened]) -> _Opened:
        """Begin to hear.

        Args:
            open_socket: Has the socket listen, or connect.

        Returns:
            What that returns.

        Raises:
            ZMQError: There are no more sockets, or it cannot be opened.
            RuntimeError: There are no more threads.
        """
        try:
            self._socket = self._context.socket(self._kind)
            opened = open_socket(self._socket)
            self._thread.start()
        except BaseException:
            self._context.destroy(linger=0)
            raise
        return opened

    def close(self) -> None:
        """Hear nothing any more; may be called repeatedly."""
        # This ends the wait for a message, and returns once the thread has closed the socket.
        self._context.term()
        self._thread.join()

    def _run(self) -> None:
        assert self._socket is not None
        with suppress(zmq.ContextTerminated), self._socket as socket:
            while True:
                self._hear(socket.recv())

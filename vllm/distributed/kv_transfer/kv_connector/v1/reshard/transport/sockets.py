# SPDX-License-Identifier: Apache-2.0
"""What all sockets have in common that this engine listens on."""

from __future__ import annotations

import zmq
from vllm.utils.network_utils import is_valid_ipv6_address, make_zmq_path


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

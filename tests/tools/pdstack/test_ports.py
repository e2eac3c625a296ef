# SPDX-License-Identifier: Apache-2.0
"""Free ports: really free, neighbouring, never given twice."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tools.pdstack.errors import PDStackError
from tools.pdstack.ports import HOST, PortAllocator, can_bind


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A socket that listens on some port of the loopback."""
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        sock.listen()
        yield sock


def test_all_ports_of_a_range_can_be_bound() -> None:
    """Every port of a range that was handed out can be listened on."""
    base = PortAllocator().take(5)
    assert all(can_bind(port) for port in range(base, base + 5))


def test_a_port_that_is_listened_on_is_not_free(listener: socket.socket) -> None:
    """A listening socket makes its port unusable, alone and inside a range."""
    port = listener.getsockname()[1]
    assert not can_bind(port)
    free = PortAllocator().take(2)
    bases = iter([port, port - 1, free])
    assert PortAllocator(lambda *_: next(bases)).take(2) == free


def test_no_port_is_given_twice() -> None:
    """Overlapping choices are skipped although nobody listens yet."""
    base = PortAllocator().take(10)
    bases = iter([base, base, base + 1, base + 2])
    allocator = PortAllocator(lambda *_: next(bases))
    assert allocator.take(2) == base
    assert allocator.take(2) == base + 2


def test_a_busy_machine_is_reported(listener: socket.socket) -> None:
    """When nothing is free the error says where it looked."""
    port = listener.getsockname()[1]
    with pytest.raises(PDStackError, match=f"no 1 neighbouring free ports found on {HOST}"):
        PortAllocator(lambda *_: port).take()

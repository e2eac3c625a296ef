# SPDX-License-Identifier: Apache-2.0
"""Free TCP ports on the loopback interface."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from .errors import PDStackError

HOST = "127.0.0.1"
_LOWEST_PORT = 15000
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_ATTEMPTS = 200


def can_bind(port: int) -> bool:
    """Say whether a server could listen on the port now."""
    return _all_free(port, 1)


def _all_free(base: int, count: int) -> bool:
    with ExitStack() as sockets:
        for port in range(base, base + count):
            listener = sockets.enter_context(socket.socket())
            # Servers set it too; without it a port in TIME_WAIT would look taken.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((HOST, port))
            except OSError:
                return False
    return True


def _highest_port() -> int:
    """Return the end of the range that no outgoing connection uses (exclusive)."""
    try:
        lowest_ephemeral = int(_EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        lowest_ephemeral = 32768
    return lowest_ephemeral if lowest_ephemeral >= _LOWEST_PORT + 1000 else 65536


class PortAllocator:
    """Hands out ports that are free now, and none of them twice.

    They lie below the kernel's ephemeral range: a port between "was free" and "is listened on"
    cannot be lost to somebody's outgoing connection. Another server may still take it, so
    who uses a port has to be ready to ask for another one.

    Args:
        choose: picks a base port from ``[lowest, highest)``; random, so that two launchers that
            start together rarely meet.
    """

    def __init__(self, choose: Callable[[int, int], int] = random.randrange) -> None:
        self._choose = choose
        self._given: set[int] = set()

    def take(self, count: int = 1) -> int:
        """Return the first of ``count`` neighbouring free ports.

        Raises:
            PDStackError: no such range was found.
        """
        highest = _highest_port()
        for _ in range(_ATTEMPTS):
            base = self._choose(_LOWEST_PORT, highest - count + 1)
            wanted = range(base, base + count)
            if self._given.isdisjoint(wanted) and _all_free(base, count):
                self._given.update(wanted)
                return base
        raise PDStackError(
            f"no {count} neighbouring free ports found on {HOST} in {_LOWEST_PORT}..{highest - 1} "
            f"after {_ATTEMPTS} attempts; stop what holds them"
        )

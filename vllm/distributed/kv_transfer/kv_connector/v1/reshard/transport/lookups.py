# SPDX-License-Identifier: Apache-2.0
"""Addresses of hosts by their names, without anybody waiting for a resolver.

ZeroMQ itself looks names up in the one thread that serves all of a context's connections, and a
resolver may take half a minute to say that it knows nothing. Here every name has a thread of its
own for as long as that takes; a resolver cannot be asked in any other way, nor be interrupted.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

MAX_LOOKUPS = 512
"""Names that are looked up at once; the others wait."""

MAX_ADDRESSES = 4
"""As many of a name's addresses are used."""

Found = tuple[str, ...] | str
"""Addresses of a name, at least one, or why there are none."""


class Lookups:
    """Belongs to one thread, which others tell that something was found.

    Args:
        announce: Called by another thread, when there is something to `take`.
    """

    def __init__(self, announce: Callable[[], None]) -> None:
        self._announce = announce
        self._found: SimpleQueue[tuple[str, Found]] = SimpleQueue()
        self._running: set[str] = set()
        # In the order in which they came.
        self._queued: dict[str, None] = {}

    def want(self, name: str) -> None:
        """Look a name up, once for all who ask meanwhile."""
        if name not in self._running:
            self._queued[name] = None
            self._begin()

    def forget(self, name: str) -> None:
        """Do not begin with a name that nobody wants any more."""
        self._queued.pop(name, None)

    def take(self) -> list[tuple[str, Found]]:
        """What was found since the last call."""
        taken = []
        while True:
            try:
                name, found = self._found.get_nowait()
            except Empty:
                break
            self._running.discard(name)
            taken.append((name, found))
        self._begin()
        return taken

    def _begin(self) -> None:
        while self._queued and len(self._running) < MAX_LOOKUPS:
            name = next(iter(self._queued))
            thread = threading.Thread(
                target=self._look_up, args=(name,), name="reshard-lookup", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:
                # This process may have no more threads: it may once others have ended.
                return
            del self._queued[name]
            self._running.add(name)

    def _look_up(self, name: str) -> None:
        """The thread of one name."""
        found: Found = "nothing was found"
        try:
            found = addresses_of(name) or found
        except (OSError, ValueError) as error:
            found = str(error)
        finally:
            self._found.put((name, found))
            self._announce()


def addresses_of(name: str) -> tuple[str, ...]:
    """Ask the resolver for a name's addresses, however long it takes.

    Raises:
        OSError: It knows none.
        ValueError: This cannot be a name.
    """
    if not name:
        raise ValueError("no host is named")
    families = (socket.AF_INET, socket.AF_INET6)
    infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    addresses = [str(address[0]) for family, *_, address in infos if family in families]
    return tuple(dict.fromkeys(addresses))[:MAX_ADDRESSES]

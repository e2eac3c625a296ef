# SPDX-License-Identifier: Apache-2.0
"""Resolves host names to addresses, and drops the addresses that are not trusted.

The machine's resolver cannot be interrupted, so each name is looked up in its own thread: in a
pool, slow names would delay others, and Python would wait for the pool's threads at exit.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterable
from concurrent.futures import Future

from ..errors import RemoteUnreachableError, RemoteUntrustedError, quote
from ..protocol.bounds import TrustedPeers, numeric
from ..protocol.messages import RemoteEngineAddress

MAX_LOOKUPS = 512
"""Maximum concurrent lookups, one thread each; further names are refused immediately."""

MAX_ADDRESSES = 4
"""Maximum number of addresses used per name."""


class Resolver:
    """Resolves hosts. Belongs to the thread of one event loop.

    Args:
        trusted: Networks that hosts may be in; None for any.
    """

    def __init__(self, trusted: TrustedPeers | None) -> None:
        self._trusted = trusted
        self._lookups: dict[str, asyncio.Future[tuple[str, ...]]] = {}

    @property
    def lookups(self) -> Iterable[asyncio.Future[tuple[str, ...]]]:
        """The lookups under way."""
        return self._lookups.values()

    async def resolve(self, address: RemoteEngineAddress) -> list[str]:
        """Return the trusted addresses of a host.

        Raises:
            RemoteUnreachableError: The host has no address, or the port is invalid.
            RemoteUntrustedError: None of its addresses is trusted.
        """
        own = numeric(address.host)
        found: tuple[str, ...] = (str(own),)
        try:
            if not 0 < address.port < 1 << 16:
                raise ValueError("a port is a number from 1 to 65535")
            if own is None:
                # Concurrent callers share the lookup; one that is cancelled must not cancel it.
                found = await asyncio.shield(self._look_up(address.host))
        except (OSError, ValueError, RuntimeError) as error:
            raise RemoteUnreachableError(
                f"no address to connect to ({quote(str(error))}): check what the router passes on "
                "as remote_host and remote_port"
            ) from None
        trusted = self._trusted
        faults = {each: trusted and trusted.fault(each) for each in found}
        allowed = [each for each, fault in faults.items() if fault is None]
        if not allowed:
            raise RemoteUntrustedError(faults[found[0]])
        return allowed

    def _look_up(self, name: str) -> asyncio.Future[tuple[str, ...]]:
        """Return the lookup of a name, starting it unless it is under way.

        Raises:
            RuntimeError: Too many names are being looked up, or no thread could be started.
        """
        if (lookup := self._lookups.get(name)) is None:
            if len(self._lookups) >= MAX_LOOKUPS:
                raise RuntimeError(f"{MAX_LOOKUPS} other names are being looked up")
            lookup = asyncio.wrap_future(_in_thread(name))
            self._lookups[name] = lookup
            lookup.add_done_callback(lambda _: self._lookups.pop(name))
        return lookup


def _in_thread(name: str) -> Future[tuple[str, ...]]:
    """Look a name up in a daemon thread, which is never joined."""
    found: Future[tuple[str, ...]] = Future()
    found.set_running_or_notify_cancel()

    def resolve() -> None:
        try:
            found.set_result(addresses_of(name))
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=resolve, name="reshard-resolver", daemon=True).start()
    return found


def addresses_of(name: str) -> tuple[str, ...]:
    """Return a name's addresses from the machine's resolver; blocks however long that takes.

    Raises:
        OSError: It has no addresses.
        ValueError: It is not a valid name.
    """
    if not name:
        raise ValueError("no host is named")
    families = (socket.AF_INET, socket.AF_INET6)
    infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    addresses = [str(address[0]) for family, *_, address in infos if family in families]
    if not addresses:
        raise OSError("nothing was found")
    return tuple(dict.fromkeys(addresses))[:MAX_ADDRESSES]

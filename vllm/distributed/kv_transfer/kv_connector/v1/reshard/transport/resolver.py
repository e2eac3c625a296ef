# SPDX-License-Identifier: Apache-2.0
"""The addresses that a host stands for, of those where it may be asked.

The machine's resolver cannot be interrupted, so that each name is looked up in a thread of its own:
in a pool, slow names would keep known ones waiting, and Python would wait for its threads at the
end.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterable
from concurrent.futures import Future

from ..errors import RemoteUnreachableError, RemoteUntrustedError
from ..protocol.messages import RemoteEngineAddress
from ..protocol.quoting import quote
from ..protocol.trust import TrustedPeers, numeric

MAX_LOOKUPS = 512
"""Names that are looked up at once, each in a thread; more are refused at once."""

MAX_ADDRESSES = 4
"""As many of a name's addresses are used."""


class Resolver:
    """Resolves hosts; it belongs to the thread of one event loop.

    Args:
        trusted: Where hosts may be; None for anywhere.
    """

    def __init__(self, trusted: TrustedPeers | None) -> None:
        self._trusted = trusted
        self._lookups: dict[str, asyncio.Future[tuple[str, ...]]] = {}

    @property
    def lookups(self) -> Iterable[asyncio.Future[tuple[str, ...]]]:
        """Those under way."""
        return self._lookups.values()

    async def resolve(self, address: RemoteEngineAddress) -> list[str]:
        """Where a host is, of that where it may be asked.

        Raises:
            RemoteUnreachableError: It is nowhere.
            RemoteUntrustedError: It may be asked nowhere.
        """
        found: tuple[str, ...] = (address.host,)
        try:
            if not 0 < address.port < 1 << 16:
                raise ValueError("a port is a number from 1 to 65535")
            if numeric(address.host) is None:
                # One answer is for all that ask meanwhile; what gives up leaves it to the others.
                found = await asyncio.shield(self._look_up(address.host))
        except (OSError, ValueError, RuntimeError) as error:
            raise RemoteUnreachableError(
                f"no address to connect to ({quote(str(error))}): check what the router passes on "
                "as remote_host and remote_port"
            ) from None
        trusted = self._trusted
        faults = {each: trusted and trusted.fault(each) for each in found}
        admitted = [each for each, fault in faults.items() if fault is None]
        if not admitted:
            raise RemoteUntrustedError(faults[found[0]])
        return admitted

    def _look_up(self, name: str) -> asyncio.Future[tuple[str, ...]]:
        """Begin to look a name up, unless that is under way.

        Raises:
            RuntimeError: Too many names are being looked up, or there are no more threads.
        """
        if (lookup := self._lookups.get(name)) is None:
            if len(self._lookups) >= MAX_LOOKUPS:
                raise RuntimeError(f"{MAX_LOOKUPS} other names are being looked up")
            lookup = asyncio.wrap_future(_in_thread(name))
            self._lookups[name] = lookup
            lookup.add_done_callback(lambda _: self._lookups.pop(name))
        return lookup


def _in_thread(name: str) -> Future[tuple[str, ...]]:
    """Look a name up in a thread that nothing waits for."""
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
    if not addresses:
        raise OSError("nothing was found")
    return tuple(dict.fromkeys(addresses))[:MAX_ADDRESSES]

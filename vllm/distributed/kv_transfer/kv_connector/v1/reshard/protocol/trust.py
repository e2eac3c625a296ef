# SPDX-License-Identifier: Apache-2.0
"""Which hosts this engine may contact when a client names them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from .quoting import one_line, quote

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

_ZONE = re.compile(r"[A-Za-z0-9_.-]+")
"""Names of network interfaces. `ipaddress` accepts any text as a zone."""


@dataclass(frozen=True, slots=True)
class TrustedPeers:
    """The networks in which this engine contacts side channels.

    Attributes:
        networks: Networks that a host must be in to be contacted.
    """

    networks: tuple[Network, ...]

    @classmethod
    def parse(cls, networks: Iterable[str]) -> TrustedPeers:
        """Parse networks such as `10.0.0.0/8`, or single addresses.

        Raises:
            ValueError: One is neither, or has bits set beyond its prefix.
        """
        return cls(tuple(map(ipaddress.ip_network, networks)))

    def allows(self, address: Address) -> bool:
        """True if a host may be contacted; an IPv4-mapped IPv6 address counts as IPv4."""
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self.networks)

    def fault(self, host: str) -> str | None:
        """Return why a host may not be contacted; None if it may, or if it is a name.

        Names are resolved when they are contacted, and the addresses are checked against the same
        networks.
        """
        address = numeric(host)
        if address is None or self.allows(address):
            return None
        allowed = ", ".join(map(str, self.networks)) or "none at all"
        return (
            f"host {quote(str(address))} is not among trusted_peers ({one_line(allowed)}): check "
            "what the router passes on as remote_host, or add the engine's network"
        )


def numeric(host: str) -> Address | None:
    """Return a host's numeric address, also in brackets; None if it is a name or not a host."""
    host = without_brackets(host)
    _, percent, zone = host.partition("%")
    if percent and not _ZONE.fullmatch(zone):
        return None
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def without_brackets(host: str) -> str:
    """Return an IPv6 address without the brackets that it has in URLs; other hosts as they are."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def is_own(host: str) -> bool:
    """Return whether every machine takes this host for itself: loopback, unspecified or empty."""
    address = numeric("127.0.0.1" if host.lower() in ("", "localhost") else host)
    return address is not None and (address.is_loopback or address.is_unspecified)

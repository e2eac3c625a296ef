# SPDX-License-Identifier: Apache-2.0
"""Which hosts a client may have this engine ask."""

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
"""Names of network interfaces. `ipaddress` takes anything for a zone."""


@dataclass(frozen=True, slots=True)
class TrustedPeers:
    """The networks that side channels are asked at.

    Attributes:
        networks: A host in none of them is not asked.
    """

    networks: tuple[Network, ...]

    @classmethod
    def parse(cls, networks: Iterable[str]) -> TrustedPeers:
        """Read networks such as `10.0.0.0/8`, or single addresses.

        Raises:
            ValueError: One is neither, or has bits set beyond its prefix.
        """
        return cls(tuple(map(ipaddress.ip_network, networks)))

    def admit(self, address: Address) -> bool:
        """Whether a host may be asked; one of IPv4 is the same when written as one of IPv6."""
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self.networks)

    def fault(self, host: str) -> str | None:
        """Why a host may not be asked; None where it may, or has a name, which hides its address.

        Names are looked up where they are asked, and what is found is held to the same networks.
        """
        address = numeric(host)
        if address is None or self.admit(address):
            return None
        allowed = ", ".join(map(str, self.networks)) or "none at all"
        return (
            f"host {quote(str(address))} is not among trusted_peers ({one_line(allowed)}): check "
            "what the router passes on as remote_host, or add the engine's network"
        )


def numeric(host: str) -> Address | None:
    """The address that a host is written as; None where it is a name, or nothing at all."""
    _, percent, zone = host.partition("%")
    if percent and not _ZONE.fullmatch(zone):
        return None
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None

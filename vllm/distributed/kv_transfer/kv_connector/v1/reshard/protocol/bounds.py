# SPDX-License-Identifier: Apache-2.0
"""Which hosts this engine may contact, and limits of what an engine's reply may cost it.

A client names the host that the request goes to, so a reply is untrusted. Its limits follow from
*our* engine: one that we could read from serves our model, so it has about our layers, each with no
more units than ours, divided among its ranks.

    before a frame is received    the number of frames, the size of each, their total size
    before it is decoded          the greeting's size, each rank's size, the number of ranks
    rank by rank                  its place in the mesh, its layers, their units

A reply within the limits costs no more to decode than an honest one from the largest engine: ranks
of one stage hold a layer's units once, or one unit each, and all ranks together hold every layer at
most once for each of a stage's ranks. That also bounds planning, which takes time for each pair of
a producer and a reader of a layer.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ..errors import RemoteHandshakeError, one_line, quote
from ..plan.shards import Layer, MeshRank, Shard

MAX_REPLY_BYTES = 16 << 20
"""Maximum size of a reply, in bytes. A hundred workers take one or two MiB."""

MAX_AGENT_METADATA_BYTES = 1 << 20
"""Maximum size of NIXL's metadata of one worker; 100 registered tensors take 10 KiB over TCP."""

MAX_RANKS = 1024
"""Maximum number of workers of one engine, in all stages."""

MAX_STAGE_RANKS = 64
"""Maximum number of workers of one stage."""

MAX_GREETING_BYTES = 64 << 10
"""Maximum size of a reply's first frame. An engine's takes 1 KiB. Decoding skips unknown parts
value by value: 0.2 ms for 64 KiB, on one core."""

_OTHERS_UNITS = 256
"""Maximum number of KV heads of a layer that we do not have, such as a draft model's."""

_LAYER_BYTES = 512
"""Maximum size of a layer's description: it takes 50 to 150 bytes, and its name."""

_RANK_BYTES = 16 << 10
"""Maximum size of a rank's other fields: names of at most a few KiB."""

_REMEDY = "run the same model and the same build of the connector on both engines"


@dataclass(frozen=True, slots=True)
class ReplyBounds:
    """Limits of a reply, from our own engine.

    Attributes:
        units_by_layer: Number of KV heads of each of our layers, over all of our ranks, or more if
            each rank has one; 1 for MLA.
    """

    units_by_layer: Mapping[Layer, int]

    @classmethod
    def of(cls, shards: Iterable[Shard]) -> ReplyBounds:
        """Return the limits for an engine that holds `shards` on all of its ranks together."""
        units: dict[Layer, int] = {}
        for shard in shards:
            for layer, holding in shard.holdings.items():
                units[layer] = max(units.get(layer, 0), holding.num_units)
        return cls(units)

    @property
    def max_layers(self) -> int:
        """Maximum number of layers per rank: ours, and as many of a draft model only it runs."""
        return 2 * len(self.units_by_layer)

    @property
    def max_rank_bytes(self) -> int:
        """Maximum size of one rank's description."""
        return MAX_AGENT_METADATA_BYTES + _RANK_BYTES + _LAYER_BYTES * self.max_layers

    @property
    def max_reply_bytes(self) -> int:
        """Maximum size of a reply."""
        return min(MAX_REPLY_BYTES, self.max_rank_bytes * MAX_RANKS)

    @property
    def max_frame_bytes(self) -> int:
        """Maximum size of a frame."""
        return max(MAX_GREETING_BYTES, self.max_rank_bytes)

    def check_sizes(self, ranks_bytes: Iterable[int]) -> None:
        """Check the size of each rank's description.

        Raises:
            RemoteHandshakeError: One is too large.
        """
        if (largest := max(ranks_bytes, default=0)) > self.max_rank_bytes:
            raise RemoteHandshakeError(
                f"the answer describes a rank in {largest} bytes, but {self.max_rank_bytes} are "
                f"enough for this engine's {len(self.units_by_layer)} layers: {_REMEDY}"
            )

    def begin(self, last_rank: MeshRank, num_ranks: int) -> RankBounds:
        """Return a check for the ranks one by one, given the last rank in order.

        Raises:
            RemoteHandshakeError: `num_ranks` ranks do not fill a mesh that ends with `last_rank`,
                or its stages are too large.
        """
        tp_size, pp_size = last_rank.tp_rank + 1, last_rank.pp_rank + 1
        if tp_size * pp_size != num_ranks or tp_size > MAX_STAGE_RANKS:
            raise RemoteHandshakeError(
                f"the answer describes {num_ranks} ranks, the last of them {last_rank}, but an "
                f"engine has one in each place of its mesh, and at most {MAX_STAGE_RANKS} in "
                f"a stage: {_REMEDY}"
            )
        return RankBounds(self, tp_size)


class RankBounds:
    """Checks the ranks of one reply in their order.

    Args:
        bounds: Limits of the reply as a whole.
        tp_size: Number of ranks in each stage.
    """

    def __init__(self, bounds: ReplyBounds, tp_size: int) -> None:
        self._bounds = bounds
        self._tp_size = tp_size
        self._others_units = max(*bounds.units_by_layer.values(), _OTHERS_UNITS)
        self._num_seen = 0
        self._num_layers = 0

    def check(self, shard: Shard) -> None:
        """Check the next rank, and count its layers.

        Raises:
            RemoteHandshakeError: It is out of order, or holds more than its share.
        """
        bounds, tp_size = self._bounds, self._tp_size
        expected = MeshRank(*divmod(self._num_seen, tp_size))
        if shard.rank != expected:
            raise RemoteHandshakeError(
                f"the answer describes rank {shard.rank} in the place of rank {expected}: {_REMEDY}"
            )
        self._num_seen += 1
        self._num_layers += len(shard.holdings)
        if self._num_layers > bounds.max_layers * tp_size:
            raise RemoteHandshakeError(
                f"the answer describes {self._num_layers} layers on ranks up to {shard.rank}, of "
                f"{tp_size:d} in a stage, but this engine has {len(bounds.units_by_layer)} layers: "
                f"{_REMEDY}"
            )
        for layer, holding in shard.holdings.items():
            units = bounds.units_by_layer.get(layer, self._others_units)
            if holding.tokens.num_shares > tp_size:
                raise RemoteHandshakeError(
                    f"rank {shard.rank} holds one of {holding.tokens.num_shares} shares of a "
                    f"layer's tokens, but there are {tp_size:d} ranks to share them out to: "
                    f"{_REMEDY}"
                )
            share = max(1, -(-units // tp_size))
            # There may be a unit per rank: if blocks are opaque, or if each rank has one head.
            if holding.num_units > max(units, tp_size) or len(holding.units) > share:
                raise RemoteHandshakeError(
                    f"rank {shard.rank} holds heads {holding.units} of {holding.num_units} of a "
                    f"layer with {units:d} here, but one of {tp_size:d} ranks holds at most "
                    f"{share} of them: {_REMEDY}"
                )


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

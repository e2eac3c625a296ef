# SPDX-License-Identifier: Apache-2.0
"""What an engine's reply may cost the engine that asked.

A client names the host that is asked, so that a reply may come from anybody. What it may hold is
bounded by what *we* are: an engine that we could read from serves our model, so that it has about
our layers, each with no more units than ours has, and shares them out among its ranks.

    before a frame is received    how many there are, their size, that of all together
    before it is decoded          the greeting's size, each rank's size, the number of ranks
    rank by rank                  its place in the mesh, its layers, their units

What remains costs as much to decode as an honest reply of the largest engine: ranks of one stage
hold a layer's units once, or one unit each, and all ranks together hold every layer at most once
for each of a stage's ranks. Planning is bounded with it, by the pairs of producers and readers of a
layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..errors import RemoteHandshakeError
from ..plan.mesh import MeshRank
from ..plan.shards import Layer, Shard

MAX_REPLY_BYTES = 16 << 20
"""Size of the largest reply, in bytes. That of a hundred workers takes one or two MiB."""

MAX_AGENT_METADATA_BYTES = 1 << 20
"""What NIXL has to say of one worker. Of a hundred registered tensors it says 10 KiB over TCP."""

MAX_RANKS = 1024
"""Workers of one engine, in all stages."""

MAX_STAGE_RANKS = 64
"""Workers of one stage."""

MAX_GREETING_BYTES = 64 << 10
"""Size of a reply's first frame. An engine's takes 1 KiB. What is unknown in it is passed over
value by value: 0.2 ms for 64 KiB, on one core."""

_OTHERS_UNITS = 256
"""KV heads of a layer that is none of ours, such as a draft model's."""

_LAYER_BYTES = 512
"""A layer's description takes 50 to 150 bytes, and its name."""

_RANK_BYTES = 16 << 10
"""What a rank says beside its layers and NIXL's metadata: names of at most a few KiB."""

_REMEDY = "run the same model and the same build of the connector on both engines"


@dataclass(frozen=True, slots=True)
class ReplyBounds:
    """What a reply may hold, by what we are.

    Attributes:
        units_by_layer: KV heads of each layer of our engine over all of its ranks, or more where
            each rank has one; 1 for MLA.
    """

    units_by_layer: Mapping[Layer, int]

    @classmethod
    def of(cls, shards: Iterable[Shard]) -> ReplyBounds:
        """The bounds for engines that one with these shards, all of its ranks', could read from."""
        units: dict[Layer, int] = {}
        for shard in shards:
            for layer, holding in shard.holdings.items():
                units[layer] = max(units.get(layer, 0), holding.num_units)
        return cls(units)

    @property
    def max_layers(self) -> int:
        """Layers that a rank may describe: ours, and no more of a draft model that only it runs."""
        return 2 * len(self.units_by_layer)

    @property
    def max_rank_bytes(self) -> int:
        """Size of one rank's description."""
        return MAX_AGENT_METADATA_BYTES + _RANK_BYTES + _LAYER_BYTES * self.max_layers

    @property
    def max_reply_bytes(self) -> int:
        """Size of a reply."""
        return min(MAX_REPLY_BYTES, self.max_rank_bytes * MAX_RANKS)

    @property
    def max_frame_bytes(self) -> int:
        """Size of a frame."""
        return max(MAX_GREETING_BYTES, self.max_rank_bytes)

    def check_sizes(self, ranks_bytes: Iterable[int]) -> None:
        """See that no rank says too much.

        Raises:
            RemoteHandshakeError: One does.
        """
        if (largest := max(ranks_bytes, default=0)) > self.max_rank_bytes:
            raise RemoteHandshakeError(
                f"the answer describes a rank in {largest} bytes, but {self.max_rank_bytes} are "
                f"enough for this engine's {len(self.units_by_layer)} layers: {_REMEDY}"
            )

    def begin(self, last_rank: MeshRank, num_ranks: int) -> RankBounds:
        """Begin to look at ranks one by one, given the last of them in their order.

        Raises:
            RemoteHandshakeError: So many ranks do not fill a mesh that ends there, or its stages
                are too large.
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
    """What is left for the ranks of one reply, taken in their order.

    Args:
        bounds: What all of the reply may hold.
        tp_size: How many ranks each stage has.
    """

    def __init__(self, bounds: ReplyBounds, tp_size: int) -> None:
        self._bounds = bounds
        self._tp_size = tp_size
        self._others_units = max(*bounds.units_by_layer.values(), _OTHERS_UNITS)
        self._num_seen = 0
        self._num_layers = 0

    def check(self, shard: Shard) -> None:
        """Take the next rank into account.

        Raises:
            RemoteHandshakeError: It is not the one whose turn it is, or holds more than its share.
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
            # Units may be ranks, where a block is not looked into or each has a single head.
            if holding.num_units > max(units, tp_size) or len(holding.units) > share:
                raise RemoteHandshakeError(
                    f"rank {shard.rank} holds heads {holding.units} of {holding.num_units} of a "
                    f"layer with {units:d} here, but one of {tp_size:d} ranks holds at most "
                    f"{share} of them: {_REMEDY}"
                )

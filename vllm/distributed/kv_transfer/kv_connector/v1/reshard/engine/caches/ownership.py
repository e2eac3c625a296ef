# SPDX-License-Identifier: Apache-2.0
"""Which part of the model's cache a worker holds, layer by layer.

Each layer is described by its own data. Its cache gives the number of units on this rank. Its
specification tells whether these are KV heads, different on each rank, or a latent, the same on all
ranks; and whether ranks with the same units divide their tokens. No number of the model as a whole
is used, so models with different layers, drafts under a model of another kind and indexers beside
attention need no special rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from types import MappingProxyType

from ...errors import ASK_FOR_UPSTREAMS, LocalLayoutError
from ...memory.cache import LayerCache, RankCache
from ...plan.mesh import MeshRank
from ...plan.shards import (
    ALL_TOKENS,
    Holding,
    Layer,
    Shard,
    TokenShare,
    UnitInterval,
    holding_of_rank,
)

_NONE_SHARED: Mapping[Layer, TokenShare] = MappingProxyType({})
"""Every rank holds all tokens of its units."""


def shard_of_worker(
    rank: MeshRank,
    tp_size: int,
    cache: RankCache,
    latent: Set[Layer],
    uncut: Set[Layer] = frozenset(),
    shares: Mapping[Layer, TokenShare] = _NONE_SHARED,
) -> Shard:
    """Return the shard of one worker.

    Args:
        rank: The worker's rank.
        tp_size: Number of workers that each layer is split over.
        cache: The worker's cache.
        latent: Layers that keep one latent, which is not split.
        uncut: Layers with opaque blocks that differ from rank to rank. Their units are ranks:
            nothing else is known about them.
        shares: The worker's token share for each layer whose tokens are divided between ranks.

    Raises:
        LocalLayoutError: The planes of a layer have different numbers of heads.
    """
    return Shard(
        rank,
        {
            layer: _holding(
                rank.tp_rank,
                tp_size,
                layer,
                layer_cache,
                shares.get(layer, ALL_TOKENS),
                is_latent=layer in latent,
                is_uncut=layer in uncut,
            )
            for layer, layer_cache in cache.layers.items()
        },
    )


def refuse_shared_names(shards: Iterable[Shard]) -> None:
    """Refuse a layer name that occurs on several stages: there, it means different layers.

    Args:
        shards: Shards of all workers of this engine.

    Raises:
        LocalLayoutError: A name occurs on several stages.
    """
    stages: dict[Layer, int] = {}
    for shard in shards:
        for layer in shard.holdings:
            stage = stages.setdefault(layer, shard.rank.pp_rank)
            if stage != shard.rank.pp_rank:
                raise LocalLayoutError(
                    f"layer {layer} is on stages {stage} and {shard.rank.pp_rank}, so that two "
                    "layers have one name and readers cannot tell them apart: use "
                    "--pipeline-parallel-size 1"
                )


def _holding(
    tp_rank: int,
    tp_size: int,
    layer: Layer,
    cache: LayerCache,
    tokens: TokenShare,
    *,
    is_latent: bool,
    is_uncut: bool,
) -> Holding:
    if is_uncut:
        return Holding(UnitInterval(tp_rank, tp_rank + 1), tp_size, tokens=tokens)
    counts = sorted({plane.num_heads // plane.heads_per_unit for plane in cache.planes})
    if len(counts) > 1 or (is_latent and counts != [1]):
        raise LocalLayoutError(
            f"layer {layer} keeps {' and '.join(map(str, counts))} heads in its planes, which are "
            f"not split alike{', of one latent' if is_latent else ''}: {ASK_FOR_UPSTREAMS}"
        )
    if is_latent:
        return Holding(UnitInterval(0, 1), 1, tokens=tokens)
    return holding_of_rank(tp_rank, tp_size, counts[0], tokens)

# SPDX-License-Identifier: Apache-2.0
"""Which part of the model's cache a worker holds, layer by layer.

Each layer is described by its own data. Its cache gives the number of units on this rank. Its
specification tells whether these are KV heads, different on each rank, or a latent, the same on all
ranks; and whether ranks with the same units divide their tokens. No number of the model as a whole
is used, so models with different layers, drafts under a model of another kind and indexers beside
attention need no special rule.

A worker's rank, by which vLLM keys handshake metadata, is its stage and TP rank. Where decode
context parallelism (DCP) spans ranks of prefill context parallelism (PCP), these hold different
tokens: they are further ranks of the stage. Otherwise PCP ranks are replicas, and only one of them
serves other engines: see `pcp_replica`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group

from ...errors import ASK_FOR_UPSTREAMS, LocalLayoutError
from ...memory.cache import LayerCache
from ...plan.shards import (
    ALL_TOKENS,
    Holding,
    Layer,
    MeshRank,
    Shard,
    TokenShare,
    UnitInterval,
    holding_of_rank,
    share_of_rank,
)

if TYPE_CHECKING:
    from vllm.config import ParallelConfig
    from vllm.distributed.parallel_state import GroupCoordinator


def shares_over_pcp(parallel_config: ParallelConfig) -> bool:
    """Return whether ranks of prefill context parallelism hold different tokens."""
    pcp_size: int = parallel_config.prefill_context_parallel_size
    dcp_size: int = parallel_config.decode_context_parallel_size
    return pcp_size > 1 and dcp_size > 1


def rank_of_worker(parallel_config: ParallelConfig) -> MeshRank:
    """Return the calling worker's rank as other engines know it."""
    tp_rank = get_tp_group().rank_in_group
    if shares_over_pcp(parallel_config):
        tp_rank += get_pcp_group().rank_in_group * parallel_config.tensor_parallel_size
    return MeshRank(get_pp_group().rank_in_group, tp_rank)


def num_ranks_of_stage(parallel_config: ParallelConfig) -> int:
    """Return how many ranks of a stage other engines know."""
    tp_size: int = parallel_config.tensor_parallel_size
    pcp_size: int = parallel_config.prefill_context_parallel_size
    return tp_size * pcp_size if shares_over_pcp(parallel_config) else tp_size


def tokens_of_worker(parallel_config: ParallelConfig) -> TokenShare:
    """Return the calling worker's share of layers whose tokens are split among ranks.

    Ranks of a DCP group are numbered along PCP first, then along TP.
    """
    number = get_tp_group().rank_in_group
    if shares_over_pcp(parallel_config):
        number = number * parallel_config.prefill_context_parallel_size
        number += get_pcp_group().rank_in_group
    return share_of_rank(
        number,
        parallel_config.decode_context_parallel_size,
        parallel_config.cp_kv_cache_interleave_size,
    )


def gather_shards(shard: Shard, parallel_config: ParallelConfig) -> tuple[Shard, ...]:
    """Return what every rank of this engine holds for other engines; a collective call."""
    stage = _gathered([(shard.rank, dict(shard.holdings))], get_tp_group())
    if shares_over_pcp(parallel_config):
        stage = _gathered(stage, get_pcp_group())
    return tuple(Shard(rank, layers) for rank, layers in _gathered(stage, get_pp_group()))


def _gathered(own: list[Any], group: GroupCoordinator) -> list[Any]:
    """Return the items of all ranks of a group, in rank order."""
    parts: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(parts, own, group=group.cpu_group)
    return [each for part in parts for each in part]


class Split(Enum):
    """How the ranks of a stage divide a layer."""

    UNITS = "units"
    """Each rank has units of its own, or copies where there are fewer units than ranks."""

    LATENT = "one latent"
    """Every rank has all of it: MLA's latents, and replicated state."""

    RANKS = "ranks"
    """Blocks are opaque and differ from rank to rank; nothing else is known about them."""


@dataclass(frozen=True, slots=True)
class WorkerLayer:
    """One layer of a worker.

    Attributes:
        cache: Its cache.
        split: How the ranks of the worker's stage divide it.
        shares_tokens: True if ranks with the same units divide their tokens.
    """

    cache: LayerCache
    split: Split = Split.UNITS
    shares_tokens: bool = False


def shard_of_worker(
    rank: MeshRank,
    tp_size: int,
    layers: Mapping[Layer, WorkerLayer],
    share: TokenShare = ALL_TOKENS,
) -> Shard:
    """Return the shard of one worker.

    Args:
        rank: The worker's rank.
        tp_size: Number of workers that each layer is split over.
        layers: The worker's layers.
        share: Its share of the tokens of layers whose tokens are divided between ranks.

    Raises:
        LocalLayoutError: The planes of a layer have different numbers of heads.
    """
    return Shard(
        rank,
        {
            name: _holding(
                rank.tp_rank, tp_size, name, layer, share if layer.shares_tokens else ALL_TOKENS
            )
            for name, layer in layers.items()
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
    tp_rank: int, tp_size: int, name: Layer, layer: WorkerLayer, tokens: TokenShare
) -> Holding:
    if layer.split is Split.RANKS:
        return Holding(UnitInterval(tp_rank, tp_rank + 1), tp_size, tokens=tokens)
    counts = sorted({plane.num_heads // plane.heads_per_unit for plane in layer.cache.planes})
    is_latent = layer.split is Split.LATENT
    if len(counts) > 1 or (is_latent and counts != [1]):
        raise LocalLayoutError(
            f"layer {name} keeps {' and '.join(map(str, counts))} heads in its planes, which are "
            f"not split alike{', of one latent' if is_latent else ''}: {ASK_FOR_UPSTREAMS}"
        )
    if is_latent:
        return Holding(UnitInterval(0, 1), 1, tokens=tokens)
    return holding_of_rank(tp_rank, tp_size, counts[0], tokens)

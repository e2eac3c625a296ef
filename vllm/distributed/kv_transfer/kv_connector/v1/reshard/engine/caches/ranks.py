# SPDX-License-Identifier: Apache-2.0
"""A worker's rank as other engines know it, and what all ranks of its engine hold.

The rank is the worker's stage and TP rank, by which vLLM keys handshake metadata. Where decode
context parallelism (DCP) spans ranks of prefill context parallelism (PCP), these hold different
tokens: they are further ranks of the stage. Otherwise PCP ranks are replicas, and only one of them
serves other engines: see `pcp_replica`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group

from ...plan.mesh import MeshRank
from ...plan.shards import Shard, TokenShare, share_of_rank

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

# SPDX-License-Identifier: Apache-2.0
"""Which rank a worker is for other engines, and what all ranks of its engine hold.

That is its stage and its TP rank, as vLLM keys what workers say at the handshake. Where decode
context parallelism (DCP) spans ranks of prefill context parallelism (PCP), these hold other tokens
each: they are ranks of the stage, too, behind one another. Without, they are replicas, of which one
speaks: see `pcp_replica`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group

from ..plan.mesh import MeshRank
from ..plan.shards import Shard, TokenShare, share_of_rank

if TYPE_CHECKING:
    from vllm.config import ParallelConfig
    from vllm.distributed.parallel_state import GroupCoordinator


def shares_over_pcp(parallel_config: ParallelConfig) -> bool:
    """Whether ranks of prefill context parallelism hold other tokens each."""
    pcp_size: int = parallel_config.prefill_context_parallel_size
    dcp_size: int = parallel_config.decode_context_parallel_size
    return pcp_size > 1 and dcp_size > 1


def rank_of_worker(parallel_config: ParallelConfig) -> MeshRank:
    """The calling worker, as other engines know it."""
    tp_rank = get_tp_group().rank_in_group
    if shares_over_pcp(parallel_config):
        tp_rank += get_pcp_group().rank_in_group * parallel_config.tensor_parallel_size
    return MeshRank(get_pp_group().rank_in_group, tp_rank)


def num_ranks_of_stage(parallel_config: ParallelConfig) -> int:
    """How many ranks of a stage other engines know."""
    tp_size: int = parallel_config.tensor_parallel_size
    pcp_size: int = parallel_config.prefill_context_parallel_size
    return tp_size * pcp_size if shares_over_pcp(parallel_config) else tp_size


def tokens_of_worker(parallel_config: ParallelConfig) -> TokenShare:
    """The tokens that the calling worker is dealt of layers whose tokens are shared out.

    A group of DCP goes along PCP first, and along TP then.
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
    """What every worker of this engine holds that others know; all of them call it together."""
    stage = _gathered([(shard.rank, dict(shard.holdings))], get_tp_group())
    if shares_over_pcp(parallel_config):
        stage = _gathered(stage, get_pcp_group())
    return tuple(Shard(rank, layers) for rank, layers in _gathered(stage, get_pp_group()))


def _gathered(own: list[Any], group: GroupCoordinator) -> list[Any]:
    """What all ranks of a group have, one after another."""
    parts: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(parts, own, group=group.cpu_group)
    return [each for part in parts for each in part]

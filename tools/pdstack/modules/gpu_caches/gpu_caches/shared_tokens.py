# SPDX-License-Identifier: Apache-2.0
"""Decode context parallelism: ranks share the tokens of a head out, and join what they find.

vLLM deals tokens out in runs of `--cp-kv-cache-interleave-size`, has each rank attend to its own,
and weighs what ranks find by the log-sums of their scores. On CPU it has no kernel for either.
Those here are in torch, of the kernels' signatures, and the second one is for MLA alone: what
attention of heads finds is joined by `join`, as a backend does that for itself.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from vllm.distributed import get_dcp_group


def places(length: int, rank: int, num_ranks: int, run: int) -> torch.Tensor:
    """Where in a sequence of some length the tokens are that a rank is dealt, in their order."""
    tokens = torch.arange(length)
    return tokens[tokens // run % num_ranks == rank]


def join(found: torch.Tensor, log_sums: torch.Tensor) -> torch.Tensor:
    """Join what all ranks have found for all of their heads, and return it for one's own.

    Args:
        found: [tokens, heads of all ranks, size].
        log_sums: [tokens, heads of all ranks].
    """
    group = get_dcp_group()
    total = torch.logsumexp(group.all_gather(log_sums[None].contiguous(), dim=0), dim=0)
    weights = torch.exp(log_sums - total).nan_to_num(0.0)
    joined = group.all_reduce(found * weights[..., None])
    return joined.chunk(group.world_size, dim=1)[group.rank_in_group]


def map_slots(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_table_stride: int,
    slot_mapping: torch.Tensor,
    KV_CACHE_BLOCK_SIZE: int,
    TOTAL_CP_WORLD_SIZE: int = 1,
    TOTAL_CP_RANK: int = 0,
    CP_KV_CACHE_INTERLEAVE_SIZE: int = 1,
    PAD_ID: int = -1,
    BLOCK_SIZE: int = 1024,
) -> None:
    """`ComputeSlotMappingKernel`: slots of a rank's own tokens, and none of all others."""
    run, period = CP_KV_CACHE_INTERLEAVE_SIZE, CP_KV_CACHE_INTERLEAVE_SIZE * TOTAL_CP_WORLD_SIZE
    slot_mapping[num_tokens:max_num_tokens] = PAD_ID
    for request, (start, end) in enumerate(pairwise(query_start_loc.tolist())):
        tokens = positions[start:end].long()
        # How many tokens of its own a rank has before each of them.
        before = tokens // period * run + tokens % run
        ids = block_table[request][before // KV_CACHE_BLOCK_SIZE].long()
        slots = ids * KV_CACHE_BLOCK_SIZE + before % KV_CACHE_BLOCK_SIZE
        is_own = tokens // run % TOTAL_CP_WORLD_SIZE == TOTAL_CP_RANK
        slot_mapping[start:end] = slots.where(is_own, PAD_ID)


def weigh(
    out: torch.Tensor,
    lses: torch.Tensor,
    cp_rank: int,
    ctx: Any = None,
    is_lse_base_on_e: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`CorrectAttnCPOutKernel`: what a rank has found, by its part of all weights.

    Args:
        out: [requests, heads, size].
        lses: [ranks, requests, heads], in natural logarithms.
        cp_rank: The rank.
        ctx: The kernel's own.
        is_lse_base_on_e: That they are.
    """
    assert is_lse_base_on_e, "attention here gives natural logarithms"
    total = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses[cp_rank] - total).nan_to_num(0.0)
    return out.mul_(weights[..., None]), total


def install() -> None:
    """Take the places of the kernels that vLLM lacks on CPU."""
    # Not before: releases that do not share tokens out so have neither.
    from vllm.utils import cpu_triton_utils
    from vllm.v1.attention.ops import dcp

    cpu_triton_utils._compute_slot_mapping_kernel_impl = map_slots
    dcp.correct_attn_out = weigh

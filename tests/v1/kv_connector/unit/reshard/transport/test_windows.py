# SPDX-License-Identifier: Apache-2.0
"""Blocks that hold a sliding window: what the handshake says is what requests then meet.

A scheduler gives a block back when the window has left all of it. Its block is several of the
kernel's where that one wants smaller ones.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.v1.kv_connector.unit.reshard.transport.remotes import OFFER
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import RemoteLayoutError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.cache import (
    LayerCache,
    Plane,
    RankCache,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.reshard import plan_reshard
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import (
    ParallelMesh,
    shard_model,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.description import (
    WorkerDescription,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.leases import LeaseTable
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    Receive,
    RemoteEngineAddress,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.request_blocks import (
    RequestBlocks,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.remote import (
    LocalCache,
    LoweredEngine,
    lower_engine,
)

WINDOW_TOKENS = 50
NUM_HEADS = 2
NUM_BLOCK_IDS = 1 << 10
ENGINE = RemoteEngineAddress("engine", "127.0.0.1", 1)
SHARDS = shard_model(ParallelMesh(1, 1), 1, NUM_HEADS)


def cache(kernel: tuple[int, int]) -> RankCache:
    """One layer of a rank, in memory that nobody touches."""
    tokens, blocks_per_id = kernel
    head_bytes = tokens * 8
    plane = Plane(1 << 30, NUM_HEADS * head_bytes, head_bytes, 8, 8, NUM_HEADS, tokens)
    return RankCache(NUM_BLOCK_IDS, 0, {0: LayerCache((plane,), 0, blocks_per_id)})


def connect(src: tuple[int, int], dst: tuple[int, int]) -> LoweredEngine:
    """What the handshake makes of two engines.

    Raises:
        RemoteLayoutError: It refuses them.
    """
    (shard,) = SHARDS
    local = LocalCache(shard.rank, cache(dst), frozenset({0}))
    description = WorkerDescription("engine", shard, cache(src), LeaseTable(16).address, b"")
    return lower_engine({shard.rank: description}, plan_reshard(SHARDS, SHARDS), local)


def kept(num_tokens: int, tokens_per_id: int) -> tuple[int, int]:
    """How many block ids a prompt has, and how many of them the window has left."""
    gone = max(num_tokens - WINDOW_TOKENS + 1, 0) // tokens_per_id
    return -(-num_tokens // tokens_per_id), gone


def request(num_tokens: int, src_tokens: int, dst_tokens: int) -> Receive:
    """A prompt whose window is all that either scheduler keeps."""
    (of_src, src_gone), (of_dst, dst_gone) = (
        kept(num_tokens, tokens) for tokens in (src_tokens, dst_tokens)
    )
    remote = [0] * src_gone + list(range(1, 1 + of_src - src_gone))
    local = list(range(1, 1 + of_dst - dst_gone))
    return Receive(ENGINE, "r", [local], [remote], num_tokens, num_tokens, OFFER)


kernels = st.tuples(st.sampled_from((8, 16, 24, 32)), st.sampled_from((1, 2, 4)))
"""Tokens in a block of the kernel's, and how many of these a block id stands for."""


@settings(max_examples=60)
@given(src=kernels, dst=kernels)
def test_handshake_accepts_what_requests_can_read(src, dst):
    """Engines are a pair where every length of prompt is read, and are refused where one is not."""
    src_tokens, dst_tokens = src[0] * src[1], dst[0] * dst[1]
    left = {0, *(edge + more for edge in (src_tokens, dst_tokens) for more in (-1, 0, 1))}
    left |= {2 * src_tokens, 2 * dst_tokens, src_tokens + dst_tokens}
    try:
        lowered = connect(src, dst)
    except RemoteLayoutError as error:
        assert f"blocks of {src_tokens} tokens at the source that hold a sliding" in str(error)
        assert f"may not fill blocks of {dst_tokens} tokens here" in str(error)
        assert any(
            src_start > dst_start
            for src_start, dst_start in (
                (each // src_tokens * src_tokens, each // dst_tokens * dst_tokens) for each in left
            )
        )
        return
    (worker,) = lowered.workers
    (leg,) = (each.leg for each in worker.legs)
    for num_tokens in (WINDOW_TOKENS - 1 + each for each in sorted(left)):
        of_prompt = request(num_tokens, src_tokens, dst_tokens)
        (selection,) = RequestBlocks(of_prompt).select(leg)
        # All tokens of our blocks are read, as far as the prompt goes.
        starts = selection.overlap.chunk_starts
        first = kept(num_tokens, dst_tokens)[1] * dst_tokens
        assert starts.min() == first
        np.testing.assert_array_equal(
            np.sort(starts), np.arange(first, starts.max() + 1, leg.chunk_tokens)
        )
        assert starts.max() + leg.chunk_tokens >= num_tokens

# SPDX-License-Identifier: Apache-2.0
"""What blocks at two ends have in common, judged token by token."""

from __future__ import annotations

from math import gcd
from unittest.mock import Mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory import overlap as overlap_module
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.overlap import (
    BlockRun,
    Overlap,
    overlap,
)


@st.composite
def spans(draw) -> tuple[BlockRun, int]:
    """Blocks of a request at one end, in any order in memory, and the size of each."""
    block_tokens = draw(st.sampled_from([1, 2, 3, 4, 6]))
    block_ids = draw(st.lists(st.integers(0, 40), max_size=8, unique=True))
    start_token = block_tokens * draw(st.integers(0, 4))
    return BlockRun(np.asarray(block_ids, dtype=np.int64), start_token), block_tokens


def tokens_of(span: BlockRun, block_tokens: int) -> dict[int, int]:
    """The block of each token."""
    return {
        span.start_token + position * block_tokens + token: int(block)
        for position, block in enumerate(span.block_ids)
        for token in range(block_tokens)
    }


def tokens_in(common: Overlap, chunk_tokens: int) -> dict[int, int]:
    """The source's block of each token of an overlap."""
    return {
        int(start) + token: int(block)
        for start, block in zip(common.chunk_starts, common.src_block_ids, strict=True)
        for token in range(chunk_tokens)
    }


@given(spans(), spans())
def test_overlap_has_every_token_of_both_ends_once(src, dst):
    """In the order of the source's memory."""
    common = overlap(src[0], dst[0], src[1], dst[1])
    at_source, here = tokens_of(*src), tokens_of(*dst)
    both = {token: block for token, block in at_source.items() if token in here}
    if common is None:
        assert not both
        return
    chunk_tokens = gcd(src[1], dst[1])
    assert tokens_in(common, chunk_tokens) == both
    assert len(common.chunk_starts) * chunk_tokens == len(both)
    assert (np.diff(common.src_block_ids) >= 0).all()
    assert common.src_blocks.tolist() == sorted(set(both.values()))
    firsts = common.src_block_ids[common.first_chunks]
    assert firsts.tolist() == common.src_blocks.tolist()
    blocks = set(both.values())
    assert common.num_src_runs == sum(block - 1 not in blocks for block in blocks)


@given(spans(), spans(), st.integers(1, 4))
def test_parts_of_an_overlap_are_all_of_it(src, dst, blocks_at_once):
    """Cut by the source's blocks, each part is one of its own."""
    common = overlap(src[0], dst[0], src[1], dst[1])
    if common is None:
        return
    chunk_tokens, found = gcd(src[1], dst[1]), {}
    common.merged["a shape"] = common.num_src_runs
    for first in range(0, len(common.src_blocks), blocks_at_once):
        part = common.part(first, first + blocks_at_once)
        assert len(part.src_blocks) <= blocks_at_once
        firsts = part.src_block_ids[part.first_chunks]
        assert firsts.tolist() == part.src_blocks.tolist()
        blocks = set(part.src_blocks.tolist())
        assert part.num_src_runs == sum(block - 1 not in blocks for block in blocks)
        assert not part.merged
        found |= tokens_in(part, chunk_tokens)
    assert found == tokens_in(common, chunk_tokens)


def test_runs_are_counted_once(monkeypatch):
    """However many ranks have the same blocks."""
    span = BlockRun(np.arange(4), 0)
    common = overlap(span, span, 4, 4)
    monkeypatch.setattr(overlap_module, "_steps", steps := Mock(wraps=overlap_module._steps))
    assert [common.num_src_runs for _ in range(3)] == [1, 1, 1]
    assert steps.call_count == 1

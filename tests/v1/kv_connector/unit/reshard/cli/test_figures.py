# SPDX-License-Identifier: Apache-2.0
"""The figures of a plan, judged by counting cells, and its words."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.cli.figures import (
    DESCRIPTOR_TOKENS,
    CacheSizes,
    measure_plan,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.strategy import Strategy
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.mesh import ParallelMesh
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.reshard import plan_reshard
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import shard_model

SIZES = CacheSizes(slot_bytes=256, num_planes=2, src_block_tokens=16, dst_block_tokens=16)


def engine(*, pp: int = 1, tp: int = 1, heads: int = 1, layers: int = 4):
    """The shards of an engine."""
    return shard_model(ParallelMesh(pp, tp), layers, heads)


def measured(src, dst, cache_sizes=SIZES, prompt_tokens=1024):
    """The figures of the plan between two engines."""
    return measure_plan(plan_reshard(src, dst), src, dst, cache_sizes, prompt_tokens)


@settings(max_examples=60)
@given(
    data=st.data(),
    num_planes=st.sampled_from([1, 2]),
    slot_bytes=st.sampled_from([4, 256]),
    blocks=st.integers(1, 5),
)
def test_reads_of_a_rank_are_its_share_of_the_bytes(
    engine_pairs, data, num_planes, slot_bytes, blocks
):
    """Over its reads a rank gets layers x heads x planes x slot bytes for each token, no more."""
    src, dst = data.draw(engine_pairs)
    cache_sizes = CacheSizes(slot_bytes, num_planes, 16, 16)
    figures = measured(src, dst, cache_sizes, prompt_tokens=16 * blocks)
    for reader, shard in zip(figures.readers, sorted(dst, key=lambda s: s.rank), strict=True):
        cells = sum(len(each.units) for each in shard.holdings.values())
        assert reader.rank == shard.rank
        assert reader.token_bytes == cells * num_planes * slot_bytes
        assert reader.request_bytes == reader.token_bytes * 16 * blocks
    served = sum(source.token_bytes for source in figures.sources)
    assert served == sum(reader.token_bytes for reader in figures.readers)


@settings(max_examples=60)
@given(
    data=st.data(), src_tokens=st.sampled_from([8, 16, 48]), dst_tokens=st.sampled_from([8, 16, 48])
)
def test_descriptors_move_the_bytes_that_they_are_counted_for(
    engine_pairs, data, src_tokens, dst_tokens
):
    """Descriptors times their size are the bytes of as many tokens, whatever the blocks."""
    src, dst = data.draw(engine_pairs)
    tokens = 2 * DESCRIPTOR_TOKENS
    # A multiple of every size of block, and of the prompt that descriptors are counted for.
    cache_sizes = CacheSizes(64, 2, src_tokens, dst_tokens)
    figures = measured(src, dst, cache_sizes, prompt_tokens=3 * tokens)
    for reader in figures.readers:
        for read in reader.reads:
            assert read.request_bytes == read.token_bytes * 3 * tokens
            counted_tokens = Fraction(read.descriptors * read.descriptor_bytes, read.token_bytes)
            assert DESCRIPTOR_TOKENS <= counted_tokens < DESCRIPTOR_TOKENS + 48


@settings(max_examples=60)
@given(data=st.data())
def test_ranks_that_are_not_read_are_only_notified(engine_pairs, data):
    """A source rank has readers, or exactly one decode rank that only notifies it."""
    src, dst = data.draw(engine_pairs)
    figures = measured(src, dst)
    told = Counter(rank for reader in figures.readers for rank in reader.only_notifies)
    for source in figures.sources:
        assert told[source.rank] == (source.fan_out == 0)
        assert (source.token_bytes > 0) == (source.fan_out > 0)
        assert len(source.notifiers) == max(source.fan_out, 1)
    with_layers = {shard.rank for shard in dst if shard.holdings}
    assert {reader.rank for reader in figures.readers if reader.fan_in > 0} == with_layers


def test_equal_blocks_move_all_heads_of_a_read_in_one_descriptor():
    """6 heads, TP3 to TP2: two heads of a block are one descriptor, one head another."""
    figures = measured(engine(tp=3, heads=6), engine(tp=2, heads=6))
    assert [
        (str(read.read.src_rank), read.descriptors, read.descriptor_bytes)
        for read in figures.readers[0].reads
    ] == [("pp0tp0", 4 * 2 * 64, 2 * 16 * 256), ("pp0tp1", 4 * 2 * 64, 16 * 256)]


@pytest.mark.parametrize(
    ("prefill", "decode", "merged", "staged", "strategy"),
    [
        # Whole pages at both ends: each plane is one run.
        ({"pp": 2}, {}, 1, 1, Strategy.DIRECT),
        # A page of the source is half a page of the destination, and the other way round.
        ({"tp": 2}, {}, 64, 1, Strategy.STAGED),
        ({}, {"tp": 2}, 64, 64, Strategy.DIRECT),
    ],
)
def test_what_adjoins_is_merged(prefill, decode, merged, staged, strategy):
    """Direct reads merge blocks that adjoin at both ends, staged ones those of the source."""
    sizes = {"heads": 2, "layers": 64}
    figures = measured(engine(**prefill, **sizes), engine(**decode, **sizes), prompt_tokens=4096)
    for reader in figures.readers:
        for read in reader.reads:
            planes = 2 * len(read.read.layers)
            assert read.descriptors == planes * 64
            assert read.merged_descriptors == planes * merged
            assert read.staged_descriptors == planes * staged
            assert read.strategy is strategy


def test_a_short_prompt_is_read_direct():
    """What way is better is told for the prompt, not for the tokens that are counted."""
    sizes = {"heads": 2, "layers": 2}
    src, dst = engine(tp=2, **sizes), engine(**sizes)
    for tokens, strategy in ((16, Strategy.DIRECT), (65536, Strategy.STAGED)):
        (reader,) = measured(src, dst, SIZES, tokens).readers
        assert {read.strategy for read in reader.reads} == {strategy}


@settings(max_examples=60)
@given(
    data=st.data(), src_tokens=st.sampled_from([8, 16, 48]), dst_tokens=st.sampled_from([8, 16, 48])
)
def test_merging_leaves_no_more_and_staging_no_more_than_that(
    engine_pairs, data, src_tokens, dst_tokens
):
    """What adjoins at both ends adjoins at the source, and every run is at least one descriptor."""
    src, dst = data.draw(engine_pairs)
    figures = measured(src, dst, CacheSizes(64, 2, src_tokens, dst_tokens))
    for reader in figures.readers:
        for read in reader.reads:
            assert 1 <= read.merged_descriptors <= read.descriptors
            assert 1 <= read.staged_descriptors <= read.merged_descriptors


def test_unequal_blocks_move_one_head_of_the_common_tokens():
    """Blocks of 16 and 24 tokens share runs of 8 tokens of one head."""
    cache_sizes = CacheSizes(256, 2, 16, 24)
    (reader,) = measured(engine(heads=2), engine(heads=2), cache_sizes).readers
    assert reader.reads[0].descriptor_bytes == 8 * 256


@pytest.mark.parametrize(
    ("prompt_tokens", "window_tokens", "read_blocks"),
    [(15, 0, 1), (17, 0, 2), (64, 1, 1), (64, 16, 1), (64, 17, 2), (64, 500, 4), (65, 17, 2)],
)
def test_windows_are_read_in_whole_blocks(prompt_tokens, window_tokens, read_blocks):
    """What the last token attends to, and the rest of the first block that it lies in."""
    cache_sizes = CacheSizes(256, 2, 16, 16, {0: window_tokens} if window_tokens else {})
    (reader,) = measured(
        engine(layers=1), engine(layers=1), cache_sizes, prompt_tokens=prompt_tokens
    ).readers
    assert reader.request_bytes == read_blocks * 16 * 2 * 256


def test_windows_are_counted_by_layer():
    """One layer of two keeps its window only: the other is read in full."""
    cache_sizes = CacheSizes(256, 2, 16, 16, {1: 16})
    (reader,) = measured(engine(layers=2), engine(layers=2), cache_sizes, prompt_tokens=256).readers
    assert reader.request_bytes == (16 + 1) * 16 * 2 * 256

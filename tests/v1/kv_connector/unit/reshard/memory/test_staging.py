# SPDX-License-Identifier: Apache-2.0
"""Staged legs, judged by moving bytes as they say: from a source, by way of an arena."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.v1.kv_connector.unit.reshard.memory.cases import (
    SLOT,
    Memory,
    counts,
    descriptor,
    policies,
    read,
    select,
    span,
    transfer,
    transfers,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.leg import Run, count_merged
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.lowering import lower_read
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.staging import (
    ArenaAllocator,
    Span,
    StagedLeg,
    StagingPolicy,
    Strategy,
    stage_leg,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.arena import (
    device_memory,
    host_memory,
    scatter,
)

ARENA = 1 << 16


def rebased(copy, address: int):
    """A copy into a simulated memory, whose addresses count from its beginning."""
    return replace(copy, addresses=copy.addresses + address)


def stage(staged: StagedLeg, src: Memory, dst: Memory, blocks, limit: int, memory_of) -> list[int]:
    """Move what a request's blocks have in common; returns the sizes of the windows."""
    arena, sizes = torch.zeros(ARENA, dtype=torch.uint8), []
    own = torch.from_numpy(dst.bytes)
    memories = memory_of([own])
    for window in staged.windows(select(staged.leg, *blocks), limit):
        # Anywhere, as long as it is aligned.
        start = 3 * staged.descriptor_bytes
        where = Span(start, start + window.size_bytes)
        src_indices, arena_indices = staged.indices(window, where)
        assert src_indices.dtype == arena_indices.dtype == np.int32
        assert len(src_indices) * staged.descriptor_bytes == window.size_bytes
        assert arena_indices[0] * staged.descriptor_bytes == start
        for from_index, to_index in zip(src_indices, arena_indices, strict=True):
            to = int(to_index) * staged.descriptor_bytes
            source = src.bytes[descriptor(staged.src, from_index)]
            arena.numpy()[to : to + staged.descriptor_bytes] = source
        scatter(rebased(staged.scatter(window, where), own.data_ptr()), arena, memories)
        sizes.append(window.size_bytes)
    return sizes


@pytest.mark.parametrize("memory_of", [host_memory, device_memory])
@settings(deadline=None, max_examples=60)
@given(case=transfers(), limit=st.sampled_from([1, 100, 500, ARENA]), seed=st.integers(0, 99))
def test_staged_reads_move_what_direct_ones_do(memory_of, case, limit, seed):
    """Between any two layouts, in windows of any size, both leave the same bytes."""
    (src, dst), planned, blocks = case
    src.bytes[:] = np.random.default_rng(seed).integers(1, 256, src.bytes.size)
    legs = lower_read(planned, src.cache(), dst.cache())
    before = dst.bytes.copy()
    transfer(legs, src, dst, *blocks)
    expected, dst.bytes[:] = dst.bytes.copy(), before
    for leg in legs:
        staged = stage_leg(leg, src.cache())
        sizes = stage(staged, src, dst, blocks, limit, memory_of)
        assert all(size <= max(limit, staged.slice_bytes) for size in sizes)
        assert sum(sizes) == staged.slice_bytes * sum(
            len(each.overlap.src_blocks) * len(each.planes) for each in select(leg, *blocks)
        )
    np.testing.assert_array_equal(dst.bytes, expected)


@pytest.mark.parametrize(
    ("src", "num_heads", "run", "rows"),
    [
        (("HND", 4, 4), 4, Run(4, 4), 1),
        (("HND", 4, 4), 2, Run(2, 4), 1),
        (("NHD", 4, 4), 4, Run(4, 4), 1),
        (("NHD", 4, 4), 2, Run(2, 1), 4),
        (("blocks first HND", 3, 6), 2, Run(2, 6), 1),
    ],
)
def test_descriptors_are_as_long_as_the_source_allows(src, num_heads, run, rows):
    """Half of a page here does not cut the whole page there."""
    memory = Memory(*src)
    (leg,) = lower_read(read(num_heads), memory.cache(), Memory("NHD", 5, 2).cache())
    staged = stage_leg(leg, memory.cache())
    assert staged.descriptor_bytes == run.num_heads * run.num_tokens * SLOT
    assert staged.rows_per_block == rows


@settings(deadline=None)
@given(case=transfers(), policy=policies)
def test_counting_is_left_out_only_where_it_would_not_matter(case, policy):
    """What is chosen is what is better by all counts, also of reads for which they are not made."""
    (src, dst), planned, blocks = case
    for leg in lower_read(planned, src.cache(), dst.cache()):
        staged = stage_leg(leg, src.cache())
        if not (selections := select(leg, *blocks)):
            continue
        num_chunks = sum(len(each.planes) * len(each.overlap.chunk_starts) for each in selections)
        plane = leg.pairs[0].dst
        num_slots = num_chunks * leg.num_heads * leg.chunk_tokens // plane.slot_tokens
        num_bytes = num_slots * plane.slot_bytes
        counts = leg.num_merged(selections), staged.num_merged(selections)
        assert staged.choose(selections, policy) is policy.choose(num_bytes, *counts)


@settings(deadline=None)
@given(case=transfers())
def test_descriptors_are_counted_as_they_merge(case):
    """In each run of heads of each plane, those that follow and adjoin one another are one."""
    (src, dst), planned, blocks = case
    for leg in lower_read(planned, src.cache(), dst.cache()):
        selections = select(leg, *blocks)
        num_merged = num_descriptors = 0
        for selection in selections:
            ends = leg.indices([selection])
            num_runs = len(selection.planes) * (leg.num_heads // leg.run.num_heads)
            for run in zip(*(np.split(end, num_runs) for end in ends), strict=True):
                places = leg.src.addresses(run[0]), leg.dst.addresses(run[1])
                num_merged += count_merged(places, int(leg.src.rows[0, 1]))
                num_descriptors += len(run[0])
        assert leg.num_merged(selections) == num_merged
        assert leg.num_descriptors(selections) == num_descriptors


def legs_of(src_heads: int, dst_heads: int):
    """A leg of two layers with two planes, and how it is staged."""
    src = Memory("HND", src_heads, 4).cache()
    (leg,) = lower_read(read(src_heads), src, Memory("HND", dst_heads, 4).cache())
    return leg, stage_leg(leg, src)


@pytest.mark.parametrize(
    ("src_ids", "dst_ids", "direct", "staged"),
    [
        ([2, 3, 4, 5], [7, 8, 9, 10], 16, 4),
        ([5, 4, 3, 2], [7, 8, 9, 10], 16, 4),
        ([4, 2, 5, 3], [10, 1, 8, 6], 16, 4),
        ([1, 3, 5, 7], [1, 3, 5, 7], 16, 16),
        ([1, 2, 5, 6], [9, 3, 2, 8], 16, 8),
    ],
)
def test_pages_that_adjoin_at_the_source_are_merged_in_the_arena_only(
    src_ids, dst_ids, direct, staged
):
    """Of 4 blocks in 4 planes, whole pages there are halves of pages here."""
    leg, stage = legs_of(2, 4)
    selections = select(leg, [span(src_ids)], [span(dst_ids)])
    assert leg.num_merged(selections) == direct
    assert stage.num_merged(selections) == staged


@pytest.mark.parametrize(
    ("src_ids", "dst_ids", "merged"),
    [
        ([2, 3, 4, 5], [7, 8, 9, 10], 4),
        ([5, 4, 3, 2], [10, 9, 8, 7], 4),
        ([5, 4, 3, 2], [7, 8, 9, 10], 16),
        ([2, 3, 8, 9], [4, 5, 6, 7], 8),
    ],
)
def test_direct_reads_merge_what_adjoins_at_both_ends(src_ids, dst_ids, merged):
    """Also where both tables descend: descriptors are in the order of the source's memory."""
    leg, _ = legs_of(4, 4)
    selections = select(leg, [span(src_ids)], [span(dst_ids)])
    assert leg.num_merged(selections) == merged
    src_indices, dst_indices = leg.indices(selections)
    breaks = (np.diff(src_indices) != 1) | (np.diff(dst_indices) != 1)
    assert np.count_nonzero(breaks) + 1 == merged


MIB = 1 << 20


@given(policies, counts, counts, counts)
def test_only_reads_of_many_small_descriptors_that_merge_are_staged(
    policy, num_bytes, num_direct, num_staged
):
    """Each threshold alone is enough for a direct read."""
    if policy.choose(num_bytes, num_direct, num_staged) is Strategy.STAGED:
        assert num_direct >= policy.min_descriptors
        assert num_bytes / num_direct <= policy.max_descriptor_bytes
        assert num_direct / num_staged >= policy.min_merge_factor
    else:
        assert (
            num_direct < policy.min_descriptors
            or num_bytes / num_direct > policy.max_descriptor_bytes
            or num_direct / num_staged < policy.min_merge_factor
        )


@given(policies, counts, counts, counts, counts, counts)
def test_more_to_merge_speaks_for_staging(policy, num_bytes, num_direct, num_staged, more, fewer):
    """What is staged is staged as well with more direct descriptors, and fewer staged ones."""
    if policy.choose(num_bytes, num_direct, num_staged) is Strategy.STAGED:
        fewest = max(num_staged - fewer, 1)
        assert policy.choose(num_bytes, num_direct + more, fewest) is Strategy.STAGED


def test_defaults_stage_small_pages_of_large_reads_only():
    """64 MiB in pages of 2 KiB that do not adjoin here, in pages of 8 KiB, and a few pages."""
    choose = StagingPolicy().choose
    assert choose(64 * MIB, 64 * MIB // 2048, 64) is Strategy.STAGED
    assert choose(64 * MIB, 64 * MIB // 8192, 64) is Strategy.DIRECT
    assert choose(64 * 2048, 64, 2) is Strategy.DIRECT


def test_a_flood_of_tiny_descriptors_is_staged_however_few_bytes_it_has():
    """The state of 36 convolutions of 8,192 channels and 3 rows, transposed on its way."""
    num_direct = 36 * 8192 * 3
    assert StagingPolicy().choose(2 * num_direct, num_direct, 36 * 3) is Strategy.STAGED


SIZE = 64
# Either take a span of so many bytes, aligned like this, or give back one of those in use.
actions = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 40), st.integers(1, 12)),
        st.tuples(st.just("give back"), st.integers(0, 63), st.just(0)),
    ),
    max_size=60,
)


@given(actions)
def test_spans_never_overlap_and_nothing_is_lost(actions):
    """Whatever is done, every byte is free or in one span, and in the end all are free again."""
    allocator, spans, owners = ArenaAllocator(SIZE), [], [False] * SIZE
    for action, number, alignment in actions:
        if action == "take":
            span = allocator.allocate(number, alignment)
            fits = any(
                start + number <= SIZE and not any(owners[start : start + number])
                for start in range(0, SIZE, alignment)
            )
            assert (span is not None) == fits
            if span is None:
                continue
            assert span.size_bytes == number and span.start_bytes % alignment == 0
            assert span.start_bytes >= 0 and span.stop_bytes <= SIZE
            assert not any(owners[span.start_bytes : span.stop_bytes])
            owners[span.start_bytes : span.stop_bytes] = [True] * number
            spans.append(span)
        elif spans:
            span = spans.pop(number % len(spans))
            allocator.free(span)
            owners[span.start_bytes : span.stop_bytes] = [False] * span.size_bytes
        assert allocator.free_bytes == owners.count(False)
    for span in spans:
        allocator.free(span)
    assert allocator.allocate(SIZE) == Span(0, SIZE)


def test_empty_arena_has_no_spans():
    """Where there is no memory, nothing is handed out."""
    assert ArenaAllocator(0).allocate(1) is None


def test_span_is_given_back_once():
    """A second time is a mistake of the caller's, which must not free somebody else's bytes."""
    allocator = ArenaAllocator(8)
    span = allocator.allocate(8)
    allocator.free(span)
    with pytest.raises(KeyError):
        allocator.free(span)

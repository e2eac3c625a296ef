# SPDX-License-Identifier: Apache-2.0
"""Which way a read goes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.strategy import (
    DEFAULT_COSTS,
    CostModel,
    Strategy,
    Work,
    fit_line,
)

costs = st.builds(CostModel, *[st.floats(1e-12, 1e-3)] * 5)
counts = st.integers(1, 10**6)
MIB = 1 << 20
ARENA_BYTES = 256 * MIB


@given(costs, counts, counts, counts, counts)
def test_staging_is_chosen_only_where_it_promises_to_be_faster(
    model, num_bytes, num_direct, num_staged, num_chunks
):
    """By its own figures no choice of staging is slower than a direct read."""
    direct, staged = Work(num_direct, num_bytes), Work(num_staged, num_bytes)
    if model.choose(direct, staged, num_chunks, ARENA_BYTES) is Strategy.STAGED:
        assert model.staged_s(staged, num_chunks, ARENA_BYTES) < model.direct_s(direct)


@given(costs, counts, counts, counts)
def test_nothing_to_merge_goes_direct(model, num_descriptors, num_bytes, num_chunks):
    """Where the arena saves no descriptors, it only costs."""
    work = Work(num_descriptors, num_bytes)
    assert model.choose(work, work, num_chunks, ARENA_BYTES) is Strategy.DIRECT


def test_small_pages_are_staged_and_large_ones_are_not():
    """64 MiB in pages of 2 KiB that do not adjoin here, and in pages of 1 MiB."""
    merged = Work(64, 64 * MIB)
    small, large = Work(64 * MIB // 2048, 64 * MIB), Work(64, 64 * MIB)
    assert DEFAULT_COSTS.choose(small, merged, 64 * MIB // 2048, ARENA_BYTES) is Strategy.STAGED
    assert DEFAULT_COSTS.choose(large, merged, 64, ARENA_BYTES) is Strategy.DIRECT


def test_a_few_pages_go_direct():
    """What is read in no time is not worth another stop."""
    direct, staged = Work(64, 64 * 2048), Work(2, 64 * 2048)
    assert DEFAULT_COSTS.choose(direct, staged, 64, ARENA_BYTES) is Strategy.DIRECT


@given(st.floats(1e-6, 1), st.floats(1e-9, 1), st.integers(1, 100), st.integers(1, 100))
def test_lines_are_found_again(intercept, slope, small, more):
    """Two points of a line give its two numbers, as far as floating point goes."""
    points = [(count, intercept + slope * count) for count in (small, small + more)]
    found_intercept, found_slope = fit_line(*points, least=1e-12)
    assert abs(found_slope - slope) <= 1e-6 * (slope + intercept)
    assert abs(found_intercept - intercept) <= 1e-4 * (slope + intercept)


def test_noise_makes_no_cost_negative():
    """More work that took less time means that its cost is not to be seen."""
    assert fit_line((1, 2.0), (10, 1.0), least=1e-12)[1] == 1e-12
    assert fit_line((10, 1.0), (20, 3.0), least=1e-12)[0] == 1e-12


def test_small_arena_speaks_against_staging():
    """A read that would stop over again and again goes direct instead."""
    pages = 64 * MIB // 2048
    direct, staged = Work(pages, 64 * MIB), Work(64, 64 * MIB)
    for arena_bytes, chosen in ((256 * MIB, Strategy.STAGED), (MIB >> 3, Strategy.DIRECT)):
        assert DEFAULT_COSTS.choose(direct, staged, pages, arena_bytes) is chosen

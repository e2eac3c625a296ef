# SPDX-License-Identifier: Apache-2.0
"""Spans of an arena under any order of taking and giving back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.arena import ArenaAllocator, Span

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

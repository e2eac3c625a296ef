# SPDX-License-Identifier: Apache-2.0
"""Block tables."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.tables import NULL_BLOCK, TableOrder, block_table, pool_blocks, stretches


@given(st.sampled_from(TableOrder), st.integers(1, 200), st.integers(0, 2**32))
def test_tables_have_blocks_of_the_pool_once(order, num_blocks, seed):
    """A request has as many blocks as it needs, each once, and never the null block."""
    pool = pool_blocks(num_blocks)
    ids = block_table(order, num_blocks, pool, random.Random(seed))
    assert len(set(ids)) == len(ids) == num_blocks
    assert NULL_BLOCK not in ids and all(0 <= block < pool for block in ids)


@pytest.mark.parametrize(("order", "step"), [(TableOrder.CONTIGUOUS, 1), (TableOrder.REVERSED, -1)])
def test_ordered_tables_go_one_by_one(order, step):
    """Contiguous tables ascend, reversed ones descend."""
    ids = block_table(order, 20, pool_blocks(20), random.Random(0))
    assert {after - before for before, after in pairwise(ids)} == {step}


def test_places_change():
    """A request lies elsewhere each time, so that no repetition finds its bytes in a cache."""
    rng = random.Random(0)
    starts = {block_table(TableOrder.CONTIGUOUS, 100, 126, rng)[0] for _ in range(20)}
    assert len(starts) > 5


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=30))
def test_stretches_are_all_pieces_and_as_few_as_can_be(pairs):
    """They follow one another, are contiguous in both memories, and could not be longer."""
    size = 16
    offsets = [np.array(places) * size for places in zip(*pairs, strict=True)]
    starts, lengths = stretches(offsets, size)
    for places, begins in zip(offsets, starts, strict=True):
        pieces = [np.arange(b, b + n, size) for b, n in zip(begins, lengths, strict=True)]
        assert np.concatenate(pieces).tolist() == places.tolist()
    ends = [begins[:-1] + lengths[:-1] == begins[1:] for begins in starts]
    assert not np.logical_and(*ends).any()

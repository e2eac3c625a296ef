# SPDX-License-Identifier: Apache-2.0
"""Medians, ranges and ratios."""

from __future__ import annotations

import statistics

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.samples import paired_ratio, summarize

VALUES = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20)


@given(VALUES)
def test_median_lies_in_its_range(values):
    """A summary is what the standard library says of the same values."""
    summary = summarize(values)
    assert summary.min == min(values) and summary.max == max(values)
    assert summary.median == statistics.median(values)
    assert summary.count == len(values)


@given(VALUES, st.floats(1e-3, 1e3))
def test_ratio_of_pairs_does_not_see_what_pairs_have_in_common(values, quotient):
    """Values that always differ by the same quotient have that ratio, whatever they are."""
    ratio = paired_ratio([value * quotient for value in values], values)
    assert ratio is not None
    for found in (ratio.median, ratio.min, ratio.max):
        assert abs(found / quotient - 1) < 1e-9


def test_nothing_is_divided_by_nothing():
    """There is no ratio without repetitions, nor over 0."""
    assert paired_ratio([], []) is None
    assert paired_ratio([1.0, 2.0], [1.0, 0.0]) is None


def test_scaling_keeps_the_count():
    """A summary in another unit is of as many values."""
    assert summarize([1.0, 3.0, 2.0]).scaled(10.0) == summarize([10.0, 30.0, 20.0])

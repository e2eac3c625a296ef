# SPDX-License-Identifier: Apache-2.0
"""Medians with their range, of values and of paired ratios."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Summary:
    """Repeated measurements of one thing."""

    median: float
    min: float
    max: float
    count: int

    def scaled(self, factor: float) -> Summary:
        """The same in another unit; `factor` is positive."""
        return Summary(self.median * factor, self.min * factor, self.max * factor, self.count)


def summarize(values: Iterable[float]) -> Summary:
    """Summarize at least one value."""
    found = list(values)
    return Summary(statistics.median(found), min(found), max(found), len(found))


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Summary | None:
    """Ratios of values that were measured one right after the other.

    Args:
        numerators: One value for each repetition.
        denominators: The same repetitions, as many.

    Returns:
        None where there is nothing to divide by: no repetitions, or a denominator of 0.
    """
    if not numerators or not all(denominators):
        return None
    pairs = zip(numerators, denominators, strict=True)
    return summarize(numerator / denominator for numerator, denominator in pairs)

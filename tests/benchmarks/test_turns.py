# SPDX-License-Identifier: Apache-2.0
"""Turns, with pairs that only remember."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

from benchmarks.errors import BenchmarkError
from benchmarks.results import Metric, Part, Result
from benchmarks.turns import take_turns


class Pair:
    """A pair without processes."""

    def __init__(self, name: str) -> None:
        self.variant, self.running, self.ended = SimpleNamespace(name=name), False, False

    @contextmanager
    def turn(self):
        """Note that it runs."""
        self.running = True
        yield
        self.running = False

    def end(self) -> None:
        """Note that it has ended."""
        self.ended = True


def test_pairs_take_turns_in_both_orders():
    """One pair runs at a time, and none is always the first."""
    pairs = [Pair("one"), Pair("other")]
    result, order = Result(Part.TRANSFER, "case"), []

    def measure(pair, repetition):
        assert [each for each in pairs if each.running] == [pair]
        order.append((repetition, pair.variant.name))
        return {Metric.SECONDS: float(repetition)}

    take_turns(pairs, 3, result, measure)
    names = ["one", "other", "other", "one", "one", "other"]
    assert order == list(zip([0, 0, 1, 1, 2, 2], names, strict=True))
    assert result.samples["one"][Metric.SECONDS] == [0.0, 1.0, 2.0]


def test_pair_that_fails_is_taken_out():
    """Others are measured on, and the result says why one is not in it."""
    broken, sound = Pair("broken"), Pair("sound")
    pairs, result = [broken, sound], Result(Part.TRANSFER, "case")

    def measure(pair, repetition):
        if pair is broken and repetition == 1:
            raise BenchmarkError("wrong bytes")
        return {Metric.SECONDS: 1.0}

    take_turns(pairs, 3, result, measure)
    assert result.missing == {"broken": "wrong bytes"} and "broken" not in result.samples
    assert len(result.samples["sound"][Metric.SECONDS]) == 3
    assert broken.ended and pairs == [sound]

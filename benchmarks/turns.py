# SPDX-License-Identifier: Apache-2.0
"""Repetitions of a case in all variants, in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import BenchmarkError
from .results import Metric, Result
from .specs import Variant
from .variants import Pair


@dataclass(frozen=True)
class Plan:
    """How to measure.

    Attributes:
        variants: What takes turns, where a part has a use for it.
        repetitions: Of every case.
        directory: For logs.
        say: Tells people what is being done.
    """

    variants: Sequence[Variant]
    repetitions: int
    directory: Path
    say: Callable[[str], None]

    def connectors(self) -> list[Variant]:
        """The variants that have a connector."""
        return [variant for variant in self.variants if variant.connector in ("ours", "upstream")]


def take_turns(
    pairs: list[Pair],
    repetitions: int,
    result: Result,
    measure: Callable[[Pair, int], Mapping[Metric, float]],
) -> None:
    """Measure all pairs once in every repetition, in turn; the next time, in the other order.

    A pair that fails is ended and taken out, and the result says why.

    Args:
        pairs: Stopped; who fails is removed.
        measure: Given a pair that has the machine, and the number of the repetition.
    """
    for repetition in range(repetitions):
        for pair in list(pairs) if repetition % 2 == 0 else list(reversed(pairs)):
            try:
                with pair.turn():
                    result.add(pair.variant.name, measure(pair, repetition))
            except BenchmarkError as error:
                result.give_up(pair.variant.name, str(error))
                pair.end()
                pairs.remove(pair)

# SPDX-License-Identifier: Apache-2.0
"""What a worker costs that is connected to another and has nothing to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from .cases import IdleCase
from .children import call_all
from .results import Metric, Part, Result
from .tables import pool_blocks
from .turns import Plan, take_turns
from .variants import Pair, Tables, started_pairs

_IDLE_S = 2.0


def measure_idle(cases: Sequence[IdleCase], plan: Plan) -> Iterator[Result]:
    """Measure decode workers that have read a block before."""
    for case in cases:
        plan.say(f"idle: {case.name}")
        yield _measure(case, plan)


def _measure(case: IdleCase, plan: Plan) -> Result:
    tables = Tables([1], [1], case.shape.block_tokens)
    result = Result(Part.IDLE, case.name)

    def measure(pair: Pair, repetition: int) -> Mapping[Metric, float]:
        if repetition == 0:
            pair.check(tables)
        (cpu_s,) = call_all(pair.decode, "idle", _IDLE_S)
        return {Metric.IDLE_CPU: cpu_s / _IDLE_S}

    variants, pool = plan.connectors(), pool_blocks(len(tables.source))
    with started_pairs(variants, case.shape, pool, plan.directory) as pairs:
        take_turns(pairs, plan.repetitions, result, measure)
    return result

# SPDX-License-Identifier: Apache-2.0
"""How long the engine's thread is kept from its own work by reads and handshakes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from .cases import PauseCase
from .lanes import ConnectorPair, Pair, side_by_side
from .results import Metric, Part, Result
from .specs import Watch
from .tables import pool_blocks
from .turns import Plan, take_turns

_WATCH = Watch(step_s=2e-3, computes=True, in_python=True)
"""Between two steps the engine's thread works in Python, which shows who takes the interpreter."""


def measure_pauses(cases: Sequence[PauseCase], plan: Plan) -> Iterator[Result]:
    """Measure the longest pause of each case, with a decode engine that was started for it."""
    for case in cases:
        plan.say(f"pauses: {case.name}")
        yield _measure(case, plan)


def _measure(case: PauseCase, plan: Plan) -> Result:
    shape = case.shape
    sizes = {"requests": case.num_requests, "tokens": case.tokens}
    result = Result(Part.PAUSES, case.name, sizes)
    blocks = shape.num_blocks(case.tokens)
    tables = side_by_side(case.num_requests, blocks, case.tokens)
    pool = pool_blocks(case.num_requests * blocks)

    def measure(pair: Pair, repetition: int) -> Mapping[Metric, float]:
        assert isinstance(pair, ConnectorPair)
        pair.start_decode()
        if case.connected:
            pair.read(tables[:1])
        readings = pair.read(tables, _WATCH)
        pair.end_decode()
        return {Metric.LONGEST_PAUSE_S: max(each.longest_pause_s for each in readings)}

    pairs: list[Pair] = []
    try:
        for lane in plan.connectors():
            pair = ConnectorPair(lane, shape, pool, plan.directory)
            pairs.append(pair)
            pair.start_prefill()
            with pair.turn():
                pass
        take_turns(pairs, plan.repetitions, result, measure)
    finally:
        for each in pairs:
            each.end()
    return result

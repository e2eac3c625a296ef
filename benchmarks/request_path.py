# SPDX-License-Identifier: Apache-2.0
"""What a worker spends on requests, with many of them in flight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from .cases import RequestPathCase
from .results import Metric, Part, Result
from .tables import pool_blocks
from .turns import Plan, take_turns
from .variants import Pair, side_by_side, started_pairs


def measure_request_paths(cases: Sequence[RequestPathCase], plan: Plan) -> Iterator[Result]:
    """Measure the CPU time of a worker; all cases have one shape and share processes."""
    shape = cases[0].shape
    most = max(case.num_requests * shape.num_blocks(case.tokens) for case in cases)
    plan.say("request path: starting engines")
    with started_pairs(plan.connectors(), shape, pool_blocks(most), plan.directory) as pairs:
        for case in cases:
            plan.say(f"request path: {case.name}")
            yield _measure(case, pairs, plan.repetitions)


def _measure(case: RequestPathCase, pairs: list[Pair], repetitions: int) -> Result:
    blocks = case.shape.num_blocks(case.tokens)
    result = Result(
        Part.REQUEST_PATH,
        case.name,
        {
            "requests": case.num_requests,
            "tokens": case.tokens,
            "chunks": case.num_requests * case.shape.num_chunks(case.tokens),
        },
    )
    tables = side_by_side(case.num_requests, blocks, case.tokens)

    def measure(pair: Pair, repetition: int) -> Mapping[Metric, float]:
        if repetition == 0:
            pair.check(tables[0])
        (reading,) = pair.read(tables)
        cpu_s = reading.start_cpu_s + reading.finished_cpu_s
        return {
            Metric.REQUEST_CPU_S: cpu_s / case.num_requests,
            Metric.STEP_CPU_S: cpu_s / reading.steps,
            Metric.OWN_CPU_S: (cpu_s - reading.nixl_cpu_s) / case.num_requests,
            Metric.WORKER_CPU_S: reading.worker_cpu_s / case.num_requests,
        }

    take_turns(pairs, repetitions, result, measure)
    return result

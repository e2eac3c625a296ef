# SPDX-License-Identifier: Apache-2.0
"""How long the engine's thread is kept from its own work by reads, handshakes and held requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from .cases import AnswersCase, HoldingCase, PauseCase
from .children import Child, call_all, end_all
from .errors import BenchmarkError
from .handshake import NO_STAGES, TAKES_MINUTES
from .results import Metric, Part, Result
from .specs import UPSTREAM, UPSTREAM_AT_REST, PauseSummary, Watch
from .tables import pool_blocks
from .turns import Plan
from .variants import ConnectorPair, Tables, side_by_side

_WATCH = Watch(step_s=2e-3, computes=True, in_python=True)
"""Between two steps the engine's thread works in Python, which shows who takes the interpreter."""

_REPETITIONS = 2
"""Engines are started anew for each, which takes longer than all that is measured."""

_SPINS = "the threads of many engines spin on the core that all bind themselves to"
_ANSWERS_HOST = "benchmarks.answers:AnswersHost"


def measure_pauses(
    cases: Sequence[PauseCase | HoldingCase | AnswersCase], plan: Plan, *, thorough: bool = True
) -> Iterator[Result]:
    """Measure the longest pauses of each case, with an engine that was started for it.

    Args:
        thorough: Measure upstream's at rest also where that takes minutes: it shakes hands in a
            thread that gets the interpreter from one that computes every 5 ms.
    """
    for case in cases:
        plan.say(f"pauses: {case.name}")
        if isinstance(case, PauseCase):
            yield _reading(case, plan, thorough)
        elif isinstance(case, HoldingCase):
            yield _holding(case, plan)
        else:
            yield _answers(case, plan)


def _reading(case: PauseCase, plan: Plan, thorough: bool) -> Result:
    """Pauses of a decode engine."""
    sizes = {"requests": case.num_requests, "tokens": case.tokens, "peers": case.num_peers}
    result = Result(Part.PAUSES, case.name, sizes)
    blocks = case.shape.num_blocks(case.tokens)
    tables = side_by_side(case.num_requests, blocks, case.tokens)
    variants = plan.connectors()
    if case.num_peers > 1 and UPSTREAM in variants:
        variants.remove(UPSTREAM)
        result.give_up(UPSTREAM.name, _SPINS)
    if UPSTREAM_AT_REST in variants and not (case.connected or thorough):
        variants.remove(UPSTREAM_AT_REST)
        result.give_up(UPSTREAM_AT_REST.name, TAKES_MINUTES)

    def measure(pair: ConnectorPair) -> Iterable[PauseSummary | None]:
        if not pair.prefill:
            pair.start_prefill(case.num_peers)
        pair.start_decode()
        # What is written for the first time is backed by memory then, which may take milliseconds.
        pair.call_decode("clear")
        if case.connected:
            pair.read(tables[: case.num_peers])
        readings = pair.read(tables, _WATCH)
        pair.end_decode()
        return [each.pauses for each in readings]

    pool = pool_blocks(case.num_requests * blocks)
    for variant in variants:
        pair = ConnectorPair(variant, case.shape, pool, plan.directory)
        _measure(pair, plan, result, measure)
    return result


def _holding(case: HoldingCase, plan: Plan) -> Result:
    """Pauses of a prefill engine."""
    result = Result(Part.PAUSES, case.name, {"requests": case.num_requests})
    tables = [Tables([1], [1], case.shape.block_tokens)] * case.num_requests

    def measure(pair: ConnectorPair) -> Iterable[PauseSummary | None]:
        pair.start_prefill()
        summaries = pair.watch_holding(tables, _WATCH)
        pair.end()
        return summaries

    for variant in plan.connectors():
        pair = ConnectorPair(variant, case.shape, pool_blocks(1), plan.directory)
        _measure(pair, plan, result, measure)
    return result


def _answers(case: AnswersCase, plan: Plan) -> Result:
    """Pauses of a decode engine that plans."""
    result = Result(Part.PAUSES, case.name, {"engines": case.num_engines})
    for variant in plan.connectors():
        if variant.connector == "upstream":
            result.give_up(variant.name, NO_STAGES)
            continue
        _repeat(variant.name, plan, result, lambda: _pauses_of_planning(case, plan))
    return result


def _pauses_of_planning(case: AnswersCase, plan: Plan) -> Iterable[PauseSummary]:
    """Start a decode engine's worker, and have all engines answer it."""
    child = Child("answers", plan.directory, _ANSWERS_HOST, case.shape)
    try:
        child.result()
        return call_all([child], "read_answers", case.num_engines, _WATCH)
    finally:
        end_all([child])


def _measure(
    pair: ConnectorPair,
    plan: Plan,
    result: Result,
    measure: Callable[[ConnectorPair], Iterable[PauseSummary | None]],
) -> None:
    """Measure a variant; no other one is there meanwhile, as 64 engines take much memory."""
    try:
        _repeat(pair.variant.name, plan, result, lambda: measure(pair))
    finally:
        pair.end()


def _repeat(
    variant: str, plan: Plan, result: Result, measure: Callable[[], Iterable[PauseSummary | None]]
) -> None:
    """Measure a variant some times, and give it up where that fails."""
    try:
        for _ in range(min(plan.repetitions, _REPETITIONS)):
            result.add(variant, _figures(each for each in measure() if each is not None))
    except BenchmarkError as error:
        result.give_up(variant, str(error))


def _figures(summaries: Iterable[PauseSummary]) -> dict[Metric, float]:
    """The worst of all ranks."""
    found = list(summaries)
    return {
        Metric.LONGEST_PAUSE_S: max(each.longest_s for each in found),
        Metric.PAUSE_P99_S: max(each.p99_s for each in found),
    }

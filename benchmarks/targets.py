# SPDX-License-Identifier: Apache-2.0
"""What the figures ought to be, and whether they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from .results import Metric, Part, Result
from .samples import Summary
from .specs import EARLY, EARLY_SEEDED, OURS, RAW, UPSTREAM, UPSTREAM_AT_REST

_FLAT = 1.5
"""How much more something may take for many blocks, or engines, than for few, to be flat."""

_FEW_PEERS, _MANY_PEERS = 8, 200
_FURTHER_S = 10e-3

_FASTER = {4 << 10: 4.0, 8 << 10: 2.0}
"""How many times upstream's speed is asked for, by bytes of a chunk."""

_LARGE_BYTES = 4 << 20
"""From when on a read is asked to come near to what can be."""


class Unit(Enum):
    """What a target is a number of."""

    TIMES = "x"
    SECONDS = "s"
    STEPS = "steps"
    SHARE = "%"


@dataclass(frozen=True)
class Verdict:
    """A target, held against what was measured in one case.

    Attributes:
        part: Whose target it is.
        target: What ought to be.
        case: Where it was measured.
        measured: A ratio or a value, with its range; None where it was not measured.
        wanted: What the median is compared with.
        at_most: The median may not be above that; else, not below.
        unit: Of `measured` and `wanted`.
        reason: Why it was not measured.
    """

    part: Part
    target: str
    case: str
    measured: Summary | None
    wanted: float
    at_most: bool
    unit: Unit = Unit.TIMES
    reason: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None where it was not measured."""
        if self.measured is None:
            return None
        median = self.measured.median
        return median <= self.wanted if self.at_most else median >= self.wanted


@dataclass(frozen=True)
class Goal:
    """A target with the verdicts of all its cases.

    Attributes:
        verdicts: At least one.
    """

    verdicts: tuple[Verdict, ...]

    @property
    def judged(self) -> list[Verdict]:
        """Those of cases that were measured."""
        return [each for each in self.verdicts if each.measured is not None]

    @property
    def num_met(self) -> int:
        """In how many cases it is met."""
        return sum(each.met is True for each in self.verdicts)

    @property
    def worst(self) -> Verdict:
        """The case that is farthest from the target; without any that was measured, the first."""
        found = [(each.measured.median, each) for each in self.verdicts if each.measured]
        if not found:
            return self.verdicts[0]
        choose = max if self.verdicts[0].at_most else min
        return choose(found, key=lambda pair: pair[0])[1]


def goals(verdicts: Iterable[Verdict]) -> list[Goal]:
    """Verdicts by target, in the order in which targets come."""
    alike: dict[tuple[Part, str, float], list[Verdict]] = {}
    for each in verdicts:
        alike.setdefault((each.part, each.target, each.wanted), []).append(each)
    return [Goal(tuple(group)) for group in alike.values()]


def judge(results: Sequence[Result], ours: str = OURS.name) -> list[Verdict]:
    """Hold results against all targets that speak of them.

    Args:
        ours: The variant of our connector that is judged.
    """
    rules: dict[Part, Callable[[Result, str], Iterable[Verdict]]] = {
        Part.TRANSFER: _transfer,
        Part.REQUEST_PATH: _request_path,
        Part.IDLE: _idle,
        Part.PEERS: _peers,
        Part.PAUSES: _pauses,
        Part.NETWORK: _network,
        Part.END_TO_END: _end_to_end,
        Part.CLIENTS: _clients,
    }
    ruled = (each for each in results if each.part in rules)
    verdicts = [verdict for result in ruled for verdict in rules[result.part](result, ours)]
    return [*verdicts, *_flatness(results, ours), *_crowds(results, ours)]


def _transfer(result: Result, ours: str) -> Iterable[Verdict]:
    at_rest = UPSTREAM_AT_REST.name
    speed = result.ratio(at_rest, ours, Metric.SECONDS)
    yield _verdict(f"our GB/s / that of {at_rest}", result, speed, 1.0, at_rest)
    if result.sizes["bytes"] < _LARGE_BYTES:
        return
    layouts = result.case.partition(",")[0]
    order = result.case.rpartition(", ")[2]
    if layouts in ("TP2->TP1", "TP4->TP1") and "MLA" not in result.case and order != "shuffled":
        chunk_bytes = int(result.sizes["chunk_bytes"])
        if wanted := _FASTER.get(chunk_bytes):
            speed = result.ratio(UPSTREAM.name, ours, Metric.SECONDS)
            target = f"our GB/s / upstream's, mergeable chunks of {chunk_bytes >> 10} KiB"
            yield _verdict(target, result, speed, wanted, UPSTREAM.name)
    if layouts == "TP1->TP1" and order == "contiguous":
        ratio = result.ratio(RAW.name, ours, Metric.SECONDS)
        yield _verdict(f"our GB/s / {RAW.name}'s, contiguous", result, ratio, 0.9, RAW.name)


def _request_path(result: Result, ours: str) -> Iterable[Verdict]:
    if result.sizes["requests"] < 256:
        return
    for whose, metric, variant, wanted in (
        ("engine's thread", Metric.REQUEST_CPU_S, UPSTREAM.name, 0.1),
        ("engine's thread", Metric.REQUEST_CPU_S, UPSTREAM_AT_REST.name, 0.7),
        ("whole worker", Metric.WORKER_CPU_S, UPSTREAM_AT_REST.name, 1.0),
    ):
        ratio = result.ratio(ours, variant, metric)
        target = f"our CPU time a request / that of {variant}, {whose}"
        yield _verdict(target, result, ratio, wanted, variant, at_most=True)


def _idle(result: Result, ours: str) -> Iterable[Verdict]:
    share = result.summary(ours, Metric.IDLE_CPU)
    yield _limit("share of a core of an idle worker", result, share, 0.01, ours, Unit.SHARE)


def _peers(result: Result, ours: str) -> Iterable[Verdict]:
    # Both settings of UCX's threads are variants of their own there.
    for variant in (*result.samples, *result.missing):
        if variant.startswith(OURS.name):
            took = result.summary(variant, Metric.SECONDS)
            target = f"handshake with a further engine, {variant}"
            yield _limit(target, result, took, _FURTHER_S, variant, Unit.SECONDS)


def _pauses(result: Result, ours: str) -> Iterable[Verdict]:
    pause = result.summary(ours, Metric.LONGEST_PAUSE_S)
    yield _limit("longest pause of the engine's thread", result, pause, 1e-3, ours, Unit.SECONDS)


def _network(result: Result, _: str) -> Iterable[Verdict]:
    # Both ways of reading are variants of their own there.
    for variant in (*result.samples, *result.missing):
        if variant.startswith(OURS.name):
            steps = result.summary(variant, Metric.STEPS_AFTER_ARRIVAL)
            target = "engine steps from the last byte to the report"
            yield _limit(target, result, steps, 1.0, variant, Unit.STEPS)


def _end_to_end(result: Result, ours: str) -> Iterable[Verdict]:
    at_rest = UPSTREAM_AT_REST.name
    for metric, what, wanted in (
        (Metric.TTFT_S, "time to first token", 0.9),
        (Metric.ITL_P99_S, "99th percentile of the time between tokens", 1.0),
    ):
        ratio = result.ratio(ours, at_rest, metric)
        target = f"our {what} / that of {at_rest}"
        yield _verdict(target, result, ratio, wanted, at_rest, at_most=True)
    for variant in (EARLY.name, EARLY_SEEDED.name):
        if variant not in (*result.samples, *result.missing):
            continue
        first = result.ratio(variant, ours, Metric.TTFT_S)
        target = f"time to first token, {variant} / {ours}"
        yield _verdict(target, result, first, 0.95, variant, at_most=True)
        speed = result.ratio(variant, ours, Metric.TOKENS_PER_S)
        yield _verdict(f"tokens a second, {variant} / {ours}", result, speed, 0.97, variant)


def _clients(result: Result, ours: str) -> Iterable[Verdict]:
    at_rest = UPSTREAM_AT_REST.name
    faster = result.ratio(ours, at_rest, Metric.REQUESTS_PER_S)
    yield _verdict(f"our requests a second / those of {at_rest}", result, faster, 1.0, at_rest)
    cpu = result.ratio(ours, at_rest, Metric.ENGINES_CPU_S)
    target = f"our CPU time of both engines a request / that of {at_rest}"
    yield _verdict(target, result, cpu, 1.0, at_rest, at_most=True)


def _flatness(results: Sequence[Result], ours: str) -> Iterable[Verdict]:
    """Compare our handshakes for many blocks with those for few, in the same layout."""
    alike: dict[str, list[Result]] = {}
    for result in results:
        if result.part is Part.HANDSHAKE:
            alike.setdefault(result.case.rpartition(" x ")[0], []).append(result)
    for group in alike.values():
        few, many = (choose(group, key=lambda each: each.sizes["blocks"]) for choose in (min, max))
        if few is many:
            continue
        for metric, what in ((Metric.SECONDS, "time"), (Metric.PEAK_BYTES, "memory")):
            summaries = few.summary(ours, metric), many.summary(ours, metric)
            ratio = None
            if summaries[0] is not None and summaries[1] is not None:
                ratio = _quotient(summaries[1], summaries[0])
            target = f"our {what} / that for the fewest blocks"
            yield _verdict(target, many, ratio, _FLAT, ours, at_most=True)


def _crowds(results: Sequence[Result], ours: str) -> Iterable[Verdict]:
    """Compare a worker that knows the most engines with one that knows a few."""
    by_count = {each.sizes.get("peers"): each for each in results if each.part is Part.PEERS}
    few, many = by_count.get(_FEW_PEERS), by_count.get(_MANY_PEERS)
    if few is None or many is None:
        return
    for variant in (*many.samples, *many.missing):
        for metric, what in (
            (Metric.RESIDENT_BYTES, "memory"),
            (Metric.DESCRIPTORS, "descriptors at rest"),
            (Metric.PEAK_DESCRIPTORS, "descriptors after the last read"),
            (Metric.THREADS, "threads"),
        ):
            summaries = few.summary(variant, metric), many.summary(variant, metric)
            ratio = None
            if summaries[0] is not None and summaries[1] is not None:
                ratio = _quotient(summaries[1], summaries[0])
            target = f"{what} / that for {_FEW_PEERS} engines, {variant}"
            yield _verdict(target, many, ratio, _FLAT, variant, at_most=True)


def _quotient(many: Summary, few: Summary) -> Summary | None:
    """Of medians; the range is that of the one above, over the median of the one below."""
    if not few.median:
        return None
    return many.scaled(1.0 / few.median)


def _verdict(
    target: str,
    result: Result,
    ratio: Summary | None,
    wanted: float,
    variant: str,
    *,
    at_most: bool = False,
    unit: Unit = Unit.TIMES,
) -> Verdict:
    reason = result.missing.get(variant, "").partition("\n")[0]
    return Verdict(result.part, target, result.case, ratio, wanted, at_most, unit, reason)


def _limit(
    target: str, result: Result, value: Summary | None, wanted: float, variant: str, unit: Unit
) -> Verdict:
    """A value, which is of no other variant, and may not be above what is wanted."""
    return _verdict(target, result, value, wanted, variant, at_most=True, unit=unit)

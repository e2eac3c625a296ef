# SPDX-License-Identifier: Apache-2.0
"""What the figures ought to be, and whether they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .results import Metric, Part, Result
from .samples import Summary
from .specs import MEMCPY, OURS, RAW, UPSTREAM

_FLAT = 1.5
"""How much more a handshake may take for many blocks than for few, and still be flat."""

_FASTER = {4 << 10: 4.0, 8 << 10: 2.0}
"""How many times upstream's speed is asked for, by bytes of a chunk."""


@dataclass(frozen=True)
class Verdict:
    """A target, held against what was measured.

    Attributes:
        target: What ought to be.
        case: Where it was measured.
        measured: A ratio, with its range; None where it was not measured.
        wanted: What the median is compared with.
        at_most: The median may not be above that; else, not below.
        reason: Why it was not measured.
    """

    target: str
    case: str
    measured: Summary | None
    wanted: float
    at_most: bool
    reason: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None where it was not measured."""
        if self.measured is None:
            return None
        median = self.measured.median
        return median <= self.wanted if self.at_most else median >= self.wanted


def judge(
    results: Sequence[Result], ours: str = OURS.name, upstream: str = UPSTREAM.name
) -> list[Verdict]:
    """Hold results against all targets that speak of them.

    Args:
        ours: The lane of our connector that is judged.
        upstream: The lane of upstream's that it is compared with.
    """
    rules: dict[Part, Callable[[Result, str, str], Iterable[Verdict]]] = {
        Part.HANDSHAKE: _handshake,
        Part.TRANSFER: _transfer,
        Part.REQUEST_PATH: _request_path,
        Part.END_TO_END: _end_to_end,
    }
    verdicts = [
        verdict for result in results for verdict in rules[result.part](result, ours, upstream)
    ]
    return [*verdicts, *_flatness(results, ours)]


def _handshake(result: Result, ours: str, upstream: str) -> Iterable[Verdict]:
    if result.sizes["blocks"] < 100_000 or result.sizes["layers"] < 80:
        return
    if "PP" in result.case:
        # There is nothing to compare with.
        return
    for metric, what in ((Metric.SECONDS, "time"), (Metric.PEAK_BYTES, "memory")):
        ratio = result.ratio(upstream, ours, metric)
        yield _verdict(f"handshake: upstream's {what} / ours", result, ratio, 100.0, upstream)


def _transfer(result: Result, ours: str, upstream: str) -> Iterable[Verdict]:
    layouts = result.case.partition(",")[0]
    order = result.case.rpartition(", ")[2]
    if layouts in ("TP2->TP1", "TP4->TP1") and "MLA" not in result.case:
        speed = result.ratio(upstream, ours, Metric.SECONDS)
        wanted = _FASTER.get(int(result.sizes["chunk_bytes"]))
        if order == "shuffled":
            yield _verdict("shuffled: our GB/s / upstream's", result, speed, 1.0, upstream)
        elif wanted is not None:
            yield _verdict("our GB/s / upstream's", result, speed, wanted, upstream)
    if layouts == "TP1->TP1" and order == "contiguous":
        for limit, wanted in ((RAW.name, 0.9), (MEMCPY.name, 0.6)):
            ratio = result.ratio(limit, ours, Metric.SECONDS)
            yield _verdict(f"our GB/s / {limit}'s", result, ratio, wanted, limit)


def _request_path(result: Result, ours: str, upstream: str) -> Iterable[Verdict]:
    if result.sizes["requests"] >= 256:
        ratio = result.ratio(ours, upstream, Metric.REQUEST_CPU_S)
        target = "our CPU time a request / upstream's"
        yield _verdict(target, result, ratio, 0.5, upstream, at_most=True)


def _end_to_end(result: Result, ours: str, upstream: str) -> Iterable[Verdict]:
    ratio = result.ratio(ours, UPSTREAM.name, Metric.TTFT_S)
    yield _verdict("our time to first token / upstream's", result, ratio, 1.0, "", at_most=True)


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
            target = f"flat: our {what} / that for {few.sizes['blocks']:.0f} blocks"
            yield _verdict(target, many, ratio, _FLAT, ours, at_most=True)


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
    lane: str,
    *,
    at_most: bool = False,
) -> Verdict:
    reason = result.missing.get(lane, "").partition("\n")[0]
    return Verdict(target, result.case, ratio, wanted, at_most, reason)

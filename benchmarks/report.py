# SPDX-License-Identifier: Apache-2.0
"""Figures as tables and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from .errors import ReportError
from .results import Metric, Part, Result
from .samples import Summary
from .specs import OURS, UPSTREAM, UPSTREAM_AT_REST
from .targets import Goal, Unit, Verdict

FORMAT = 2
"""Of the JSON; raised whenever readers would have to change."""

NOTES = (
    "Values are medians of the repetitions, with the least and the greatest in brackets. Ratios "
    "are of the two values of one repetition; with engines, of one round, whose prompts are the "
    "same. End to end, one stack is measured after another. Pauses are measured twice at most.",
    "upstream: the connector as it ships. On CPU it binds its process to the last core, and NIXL's "
    "threads spin. upstream at rest: the same with NIXL's threads resting as long as ours do, and "
    "bound to no core.",
    "raw NIXL reads the same bytes with as few descriptors as there can be; memcpy copies them "
    "within one process.",
    "Host memory is of huge pages where the system has them, in all variants; that of engines, end "
    "to end, is what PyTorch gives them.",
)

_TITLES = {
    Part.HANDSHAKE: "Handshake: from the first request to the first read",
    Part.TRANSFER: "Transfer",
    Part.REQUEST_PATH: "Request path: CPU time of a decode worker",
    Part.PEERS: "Peers: what a decode worker takes that knows so many engines, and one more",
    Part.IDLE: "Idle: CPU time of the connector in a decode worker that has nothing to do",
    Part.PAUSES: "Pauses: how long the engine's thread is kept from its own work",
    Part.NETWORK: "Network: from the last byte to the report",
    Part.END_TO_END: "End to end: vllm bench serve",
    Part.CLIENTS: "Clients that wait for their answers: vllm bench serve",
}


def figures(summary: Summary | None, show: Callable[[float], str]) -> str:
    """A median with its range."""
    if summary is None:
        return "-"
    return f"{show(summary.median)} [{show(summary.min)}, {show(summary.max)}]"


def seconds(value: float) -> str:
    """A duration with a fitting unit."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value * 1e6:.3g} us"


def size(value: float) -> str:
    """Bytes in MB, or GB."""
    return f"{value / 1e9:.3g} GB" if value >= 1e9 else f"{value / 1e6:.3g} MB"


def times(value: float) -> str:
    """A ratio."""
    return f"{value:.3g}x"


def share(value: float) -> str:
    """A part of one, in per cent."""
    return f"{value:.2%}"


def count(value: float) -> str:
    """How many."""
    return f"{value:g}"


def held(verdict: Verdict, value: float) -> str:
    """A number of what a verdict is about."""
    shown = {Unit.TIMES: times, Unit.SECONDS: seconds, Unit.STEPS: count, Unit.SHARE: share}
    return shown[verdict.unit](value)


def speed(result: Result, variant: str) -> Summary | None:
    """Bytes a second of a transfer, in GB/s."""
    taken = result.summary(variant, Metric.SECONDS)
    if taken is None:
        return None
    total = result.sizes["bytes"] / 1e9
    return Summary(total / taken.median, total / taken.max, total / taken.min, taken.count)


def per_chunk(result: Result, variant: str) -> Summary | None:
    """Microseconds a descriptor of one chunk."""
    taken = result.summary(variant, Metric.SECONDS)
    if taken is None:
        return None
    chunks = result.sizes["chunks"] / 1e6
    return taken.scaled(1.0 / chunks)


PEERS_COLUMNS = (
    "memory",
    "descriptors",
    "after the last read",
    "threads",
    "one more",
    "of that in NIXL",
)


def result_tables(results: Sequence[Result]) -> list[Table]:
    """A table for each part that was measured."""
    rows = {
        Part.HANDSHAKE: _handshake_rows,
        Part.TRANSFER: _transfer_rows,
        Part.REQUEST_PATH: _request_path_rows,
        Part.IDLE: _idle_rows,
        Part.PEERS: _peers_rows,
        Part.PAUSES: _pause_rows,
        Part.NETWORK: _network_rows,
        Part.END_TO_END: _end_to_end_rows,
        Part.CLIENTS: _client_rows,
    }
    columns = {
        Part.HANDSHAKE: ("time", "upstream / this", "peak memory", "upstream / this"),
        Part.TRANSFER: ("GB/s", "of upstream's", "at rest", "us a chunk"),
        Part.REQUEST_PATH: (
            "engine's thread, a request",
            "of upstream's",
            "a step",
            "outside NIXL's transfer",
            "whole worker, a request",
        ),
        Part.IDLE: ("share of a core",),
        Part.PEERS: PEERS_COLUMNS,
        Part.PAUSES: ("longest pause", "99th percentile of steps"),
        Part.NETWORK: ("asked to reported", "steps after the last byte"),
        Part.END_TO_END: (
            "time to first token",
            "of upstream's",
            "between tokens",
            "99th percentile",
            "tokens/s",
        ),
        Part.CLIENTS: (
            "requests/s",
            "CPU of both engines, a request",
            "time to first token",
            "between tokens",
        ),
    }
    tables = []
    for part in Part:
        measured = [result for result in results if result.part is part]
        if not measured:
            continue
        table = Table(title=_TITLES[part], title_justify="left", box=box.SIMPLE_HEAD)
        table.add_column("case", overflow="fold")
        table.add_column("variant", no_wrap=True)
        for column in columns[part]:
            table.add_column(column, justify="right")
        for result in measured:
            lines = [(variant, *rows[part](result, variant)) for variant in result.samples]
            lines += [(variant, "not measured") for variant in result.missing]
            for number, line in enumerate(lines):
                table.add_row(result.case if number == 0 else "", *map(escape, line))
            table.add_section()
        tables.append(table)
    return tables


def missing_lines(results: Iterable[Result]) -> list[str]:
    """Why variants were not measured, in a line for each variant and reason.

    A reason may go on with a traceback or the end of a log, which the JSON file keeps.
    """
    reasons: dict[str, list[str]] = {}
    for result in results:
        for variant, reason in result.missing.items():
            line, _, more = reason.partition("\n")
            where = " (the JSON file has the rest)" if more else ""
            reasons.setdefault(f"{variant}: {line}{where}", []).append(result.case)
    return [f"Not measured ({'; '.join(cases)}): {reason}" for reason, cases in reasons.items()]


def _handshake_rows(result: Result, variant: str) -> list[str]:
    cells = []
    for metric, show in ((Metric.SECONDS, seconds), (Metric.PEAK_BYTES, size)):
        cells.append(figures(result.summary(variant, metric), show))
        ratio = None if variant == UPSTREAM.name else result.ratio(UPSTREAM.name, variant, metric)
        cells.append(figures(ratio, times))
    return cells


def _transfer_rows(result: Result, variant: str) -> list[str]:
    ratios = [
        None if variant == other.name else result.ratio(other.name, variant, Metric.SECONDS)
        for other in (UPSTREAM, UPSTREAM_AT_REST)
    ]
    return [
        figures(speed(result, variant), lambda value: f"{value:.3g}"),
        *(figures(ratio, times) for ratio in ratios),
        figures(per_chunk(result, variant), lambda value: f"{value:.3g}"),
    ]


def _against_upstream(result: Result, variant: str, metric: Metric) -> list[str]:
    """A variant's seconds, and how many times upstream's they are."""
    ratio = None if variant == UPSTREAM.name else result.ratio(variant, UPSTREAM.name, metric)
    return [figures(result.summary(variant, metric), seconds), figures(ratio, times)]


def _request_path_rows(result: Result, variant: str) -> list[str]:
    return [
        *_against_upstream(result, variant, Metric.REQUEST_CPU_S),
        figures(result.summary(variant, Metric.STEP_CPU_S), seconds),
        figures(result.summary(variant, Metric.OWN_CPU_S), seconds),
        figures(result.summary(variant, Metric.WORKER_CPU_S), seconds),
    ]


def _idle_rows(result: Result, variant: str) -> list[str]:
    return [figures(result.summary(variant, Metric.IDLE_CPU), share)]


def _peers_rows(result: Result, variant: str) -> list[str]:
    shown = {
        Metric.RESIDENT_BYTES: size,
        Metric.DESCRIPTORS: count,
        Metric.PEAK_DESCRIPTORS: count,
        Metric.THREADS: count,
        Metric.SECONDS: seconds,
        Metric.NIXL_S: seconds,
    }
    return [figures(result.summary(variant, metric), show) for metric, show in shown.items()]


def _pause_rows(result: Result, variant: str) -> list[str]:
    pauses = Metric.LONGEST_PAUSE_S, Metric.PAUSE_P99_S
    return [figures(result.summary(variant, each), seconds) for each in pauses]


def _network_rows(result: Result, variant: str) -> list[str]:
    return [
        figures(result.summary(variant, Metric.SECONDS), seconds),
        figures(result.summary(variant, Metric.STEPS_AFTER_ARRIVAL), count),
    ]


def _end_to_end_rows(result: Result, variant: str) -> list[str]:
    return [
        *_against_upstream(result, variant, Metric.TTFT_S),
        figures(result.summary(variant, Metric.ITL_S), seconds),
        figures(result.summary(variant, Metric.ITL_P99_S), seconds),
        figures(result.summary(variant, Metric.TOKENS_PER_S), lambda value: f"{value:.3g}"),
    ]


def _client_rows(result: Result, variant: str) -> list[str]:
    return [
        figures(result.summary(variant, Metric.REQUESTS_PER_S), lambda value: f"{value:.3g}"),
        figures(result.summary(variant, Metric.ENGINES_CPU_S), seconds),
        figures(result.summary(variant, Metric.TTFT_S), seconds),
        figures(result.summary(variant, Metric.ITL_S), seconds),
    ]


def goal_table(goals: Sequence[Goal]) -> Table:
    """The targets, in how many cases they are met, and the case that is farthest from them."""
    table = Table(title="Targets", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("part", "target"):
        table.add_column(column, overflow="fold")
    for column in ("wanted", "met", "worst"):
        table.add_column(column, justify="right")
    table.add_column("where", overflow="fold")
    for each in goals:
        worst = each.worst
        sign = "<=" if worst.at_most else ">="
        measured = figures(worst.measured, partial(held, worst))
        table.add_row(
            worst.part.value,
            escape(worst.target),
            f"{sign} {held(worst, worst.wanted)}",
            _met(each),
            escape(measured if worst.measured else worst.reason or "not measured"),
            escape(worst.case),
        )
    return table


def _met(goal: Goal) -> Text:
    if not goal.judged:
        return Text("-")
    text = f"{goal.num_met} of {len(goal.judged)}"
    met = goal.num_met == len(goal.judged)
    return Text(text, style="green" if met else "bold red")


def to_json(
    facts: Mapping[str, str],
    settings: Mapping[str, Any],
    results: Sequence[Result],
    verdicts: Sequence[Verdict],
    not_run: Sequence[str],
) -> dict[str, Any]:
    """Everything, with every sample."""
    return {
        "format": FORMAT,
        "variants": {
            "ours": OURS.name,
            "upstream": UPSTREAM.name,
            "at_rest": UPSTREAM_AT_REST.name,
        },
        "machine": dict(facts),
        "settings": dict(settings),
        "not_run": list(not_run),
        "results": [
            {
                "part": result.part.value,
                "case": result.case,
                "sizes": dict(result.sizes),
                "samples": {
                    variant: {metric.value: values for metric, values in metrics.items()}
                    for variant, metrics in result.samples.items()
                },
                "missing": dict(result.missing),
            }
            for result in results
        ],
        "targets": [
            {
                "part": each.part.value,
                "target": each.target,
                "unit": each.unit.value,
                "case": each.case,
                "wanted": each.wanted,
                "at_most": each.at_most,
                "median": None if each.measured is None else each.measured.median,
                "min": None if each.measured is None else each.measured.min,
                "max": None if each.measured is None else each.measured.max,
                "met": each.met,
            }
            for each in verdicts
        ],
        "notes": list(NOTES),
    }


def from_json(written: Any) -> list[Result]:
    """The results that `to_json` has written.

    Raises:
        ReportError: It has another format.
    """
    if not isinstance(written, Mapping) or "format" not in written:
        raise ReportError("is not what `make bench` writes: there is no format number")
    if written["format"] != FORMAT:
        raise ReportError(f"has format {written['format']}, not {FORMAT}: measure again")
    try:
        return [_result(each) for each in written["results"]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ReportError(f"has a result that cannot be read: {error!r}: measure again") from error


def _result(written: Mapping[str, Any]) -> Result:
    return Result(
        Part(written["part"]),
        written["case"],
        {name: float(value) for name, value in written["sizes"].items()},
        {
            variant: {
                Metric(name): [float(value) for value in values] for name, values in metrics.items()
            }
            for variant, metrics in written["samples"].items()
        },
        dict(written["missing"]),
    )

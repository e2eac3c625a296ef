# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/performance.md, from what `make bench` has measured.

    python -m benchmarks.docs_performance build/bench/bench.json [MORE.json ...]

A table stands between `<!-- bench: NAME -->` and `<!-- /bench -->`; nothing else of the page is
touched. Where two files have the same case, the later one wins. The table of a part that no file
has stays as it is; of the targets, so do the rows of such a part.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .asynchronous import network_variants
from .end_to_end import SINGLE
from .errors import ReportError
from .report import PEERS_COLUMNS, count, figures, from_json, held, seconds, share, size, speed
from .results import Metric, Part, Result
from .samples import Summary
from .specs import EARLY, EARLY_SEEDED, MEMCPY, OURS, RAW, UPSTREAM, UPSTREAM_AT_REST
from .targets import goals, judge

PAGE = Path(__file__).parents[1] / "docs/performance.md"

_END = "<!-- /bench -->"
_BEGIN = re.compile(r"<!-- bench: (\S+) -->")
_BLOCK = re.compile(rf"^{_BEGIN.pattern}\n(.*?)^{_END}$", re.MULTILINE | re.DOTALL)
_LIKE_A_MARKER = re.compile(r"<!--\s*/?\s*bench\b")

_TARGETS = "targets"
_TARGET_COLUMNS = ("<part", "<what", "<wanted", "<met", "<worst", "<where")

_CONNECTORS = (OURS.name, UPSTREAM.name, UPSTREAM_AT_REST.name)
_SHORT = (OURS.name, UPSTREAM.name, "at rest")
_NETWORK_VARIANTS = tuple(variant.name for variant in network_variants([UPSTREAM_AT_REST]))
_STACKS = (
    *(SINGLE, UPSTREAM.name, UPSTREAM_AT_REST.name),
    *(OURS.name, EARLY.name, EARLY_SEEDED.name),
)
_ABSENT = "not measured"


class MarkerError(Exception):
    """A page has markers between which no table can be written."""


@dataclass(frozen=True)
class _Table:
    """A table of a part.

    Attributes:
        columns: Their names, by which side they are aligned to: `<` for left, `>` for right.
        rows: Makes the cells of all rows.
    """

    columns: Sequence[str]
    rows: Callable[[Sequence[Result]], list[list[str]]]

    def lines(self, results: Sequence[Result]) -> list[str]:
        """The table of results."""
        return [*_head(self.columns), *map(_line, self.rows(results))]


def read(path: Path) -> list[Result]:
    """The results of a file that `make bench` has written.

    Raises:
        ReportError: There are none that tables can be made of.
    """
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror}: run `make bench`") from error
    except ValueError as error:
        raise ReportError(f"{path} is not JSON: {error}") from error
    try:
        results = from_json(written)
    except ReportError as error:
        raise ReportError(f"{path} {error}") from error
    settings = written.get("settings")
    if not isinstance(settings, dict) or settings.get("complete") is not True:
        raise ReportError(f"{path} is of a run that did not come to its end: measure again")
    if settings.get("strategies"):
        chosen = ", ".join(map(str, settings["strategies"]))
        raise ReportError(
            f"{path} is of a run with transfer_strategy {chosen}, and the tables show what the "
            "connector chooses: measure without --strategy"
        )
    return results


def merge(files: Iterable[Sequence[Result]]) -> list[Result]:
    """All results; of the same case, the one that comes last."""
    merged: dict[tuple[Part, str], Result] = {}
    for results in files:
        merged.update({(result.part, result.case): result for result in results})
    return list(merged.values())


def check_markers(page: str) -> None:
    """See that every table has a name that is known, and its end.

    Raises:
        MarkerError: One has not.
    """
    opened = None
    for line in filter(_LIKE_A_MARKER.search, page.splitlines()):
        begin = _BEGIN.fullmatch(line)
        if begin is None and line != _END:
            raise MarkerError(f"{line} is neither <!-- bench: NAME --> nor {_END}")
        if (begin is None) != (opened is not None):
            raise MarkerError(
                f"{line} comes {f'before the end of {opened}' if opened else 'alone'}"
            )
        if begin is not None and begin[1] not in _NAMES:
            raise MarkerError(f"{line} is unknown: names are {', '.join(_NAMES)}")
        opened = line if begin is not None else None
    if opened is not None:
        raise MarkerError(f"{opened} has no {_END}")


def rewrite(page: str, results: Sequence[Result]) -> str:
    """The same page with the tables of what was measured.

    Raises:
        MarkerError: It is not clear where they begin or end.
    """
    check_markers(page)
    measured = {part: [each for each in results if each.part is part] for part in Part}

    def table(block: re.Match[str]) -> str:
        name, before = block.groups()
        if name == _TARGETS:
            lines = _target_lines(before, measured)
        elif found := measured[Part(name)]:
            lines = _TABLES[Part(name)].lines(found)
        else:
            return block[0]
        return "\n".join([f"<!-- bench: {name} -->", "", *lines, "", _END])

    return _BLOCK.sub(table, page)


def _head(columns: Iterable[str]) -> list[str]:
    rules = ["---:" if column[0] == ">" else "---" for column in columns]
    return [_line(column[1:] for column in columns), _line(rules)]


def _line(cells: Iterable[str]) -> str:
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"


def _median(summary: Summary | None, show: Callable[[float], str], absent: str = _ABSENT) -> str:
    return absent if summary is None else show(summary.median)


def _absent(result: Result, variant: str) -> str:
    """What is said of a variant without figures."""
    refused = "does not support" in result.missing.get(variant, "")
    return "not supported" if refused else _ABSENT


def _medians(result: Result, variant: str, shown: Mapping[Metric, Callable[[float], str]]) -> str:
    """All in one cell."""
    if variant not in result.samples:
        return _absent(result, variant)
    return ", ".join(
        _median(result.summary(variant, metric), show) for metric, show in shown.items()
    )


def _milliseconds(value: float) -> str:
    return f"{value * 1e3:.2f} ms"


def _decimals(value: float) -> str:
    return f"{value:.2f}"


def _digits(value: float) -> str:
    """A number with as many digits as say something."""
    return _decimals(value) if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _handshake_rows(results: Sequence[Result]) -> list[list[str]]:
    """Pipeline stages come last: there is nothing to compare with."""

    def place(result: Result) -> tuple[bool, str, float, float]:
        layouts = result.case.partition(",")[0]
        return "PP" in layouts, layouts, result.sizes["layers"], result.sizes["blocks"]

    shown = {Metric.SECONDS: seconds, Metric.PEAK_BYTES: size}
    return [
        [result.case, *(_medians(result, variant, shown) for variant in _CONNECTORS)]
        for result in sorted(results, key=place)
    ]


def _transfer_rows(results: Sequence[Result]) -> list[list[str]]:
    rows = []
    for result in results:
        cells = [result.case]
        for variant in (*_CONNECTORS, RAW.name, MEMCPY.name):
            cells.append(_median(speed(result, variant), _decimals, _absent(result, variant)))
        for other in (UPSTREAM, UPSTREAM_AT_REST):
            faster = result.ratio(other.name, OURS.name, Metric.SECONDS)
            cells.append(figures(faster, _digits))
        rows.append(cells)
    return rows


def _request_path_rows(results: Sequence[Result]) -> list[list[str]]:
    shown = dict.fromkeys(
        (Metric.REQUEST_CPU_S, Metric.OWN_CPU_S, Metric.WORKER_CPU_S), _milliseconds
    )
    return [
        [
            f"{result.sizes['requests']:.0f}",
            *(_medians(result, variant, shown) for variant in _CONNECTORS),
        ]
        for result in sorted(results, key=lambda result: result.sizes["requests"])
    ]


def _end_to_end_rows(results: Sequence[Result]) -> list[list[str]]:
    shown = {
        Metric.TTFT_S: seconds,
        Metric.ITL_S: seconds,
        Metric.ITL_P99_S: seconds,
        Metric.TOKENS_PER_S: _digits,
    }
    return [
        [
            _link(result) or "shared memory",
            f"{result.sizes['rate']:g}",
            variant,
            *(
                _median(result.summary(variant, metric), show, _absent(result, variant))
                for metric, show in shown.items()
            ),
        ]
        for result in sorted(results, key=lambda each: (_link(each), each.sizes["rate"]))
        for variant in _STACKS
        if not _link(result) or variant in (*result.samples, *result.missing)
    ]


def _link(result: Result) -> str:
    """What lay between two engines; empty for the memory of one machine."""
    return result.case.partition(" requests/s, ")[2]


def _idle_rows(results: Sequence[Result]) -> list[list[str]]:
    return [
        [result.case, *_each(result, _CONNECTORS, Metric.IDLE_CPU, share)] for result in results
    ]


def _peers_rows(results: Sequence[Result]) -> list[list[str]]:
    shown = {
        Metric.RESIDENT_BYTES: size,
        Metric.DESCRIPTORS: count,
        Metric.PEAK_DESCRIPTORS: count,
        Metric.THREADS: count,
        Metric.SECONDS: seconds,
        Metric.NIXL_S: seconds,
    }
    return [
        [
            f"{result.sizes['peers']:.0f}",
            variant,
            *(
                _median(result.summary(variant, metric), show, _absent(result, variant))
                for metric, show in shown.items()
            ),
        ]
        for result in sorted(results, key=lambda result: result.sizes["peers"])
        for variant in (*result.samples, *result.missing)
    ]


def _pause_rows(results: Sequence[Result]) -> list[list[str]]:
    shown = dict.fromkeys((Metric.LONGEST_PAUSE_S, Metric.PAUSE_P99_S), seconds)
    return [
        [result.case, *(_medians(result, variant, shown) for variant in _CONNECTORS)]
        for result in results
    ]


def _network_rows(results: Sequence[Result]) -> list[list[str]]:
    shown = {Metric.SECONDS: seconds, Metric.STEPS_AFTER_ARRIVAL: count}
    return [
        [result.case, *(_medians(result, variant, shown) for variant in _NETWORK_VARIANTS)]
        for result in results
    ]


def _each(
    result: Result, variants: Sequence[str], metric: Metric, show: Callable[[float], str]
) -> list[str]:
    """A cell for each variant, with its range."""
    return [
        figures(summary, show)
        if (summary := result.summary(variant, metric))
        else _absent(result, variant)
        for variant in variants
    ]


def _target_lines(before: str, measured: Mapping[Part, Sequence[Result]]) -> list[str]:
    """The targets of all parts; of a part that was not measured, the rows that there were."""
    kept: dict[Part, list[str]] = {part: [] for part in Part}
    for line in before.strip().splitlines()[2:]:
        name = line.split("|")[1].strip() if line.count("|") > 1 else line
        try:
            kept[Part(name)].append(line)
        except ValueError as error:
            raise MarkerError(f"the targets have a row of no known part: {line}") from error
    lines = _head(_TARGET_COLUMNS)
    for part, results in measured.items():
        lines += map(_line, _target_rows(results)) if results else kept[part]
    return lines


def _target_rows(results: Sequence[Result]) -> list[list[str]]:
    """A row for each target, with the case that is farthest from it."""
    rows = []
    for goal in goals(judge(results)):
        worst, judged = goal.worst, len(goal.judged)
        show = partial(held, worst)
        rows.append(
            [
                worst.part.value,
                worst.target,
                f"at {'most' if worst.at_most else 'least'} {show(worst.wanted)}",
                f"{goal.num_met} of {judged}" if judged else "-",
                figures(worst.measured, show) if worst.measured else _ABSENT,
                worst.case,
            ]
        )
    return rows


_TABLES = {
    Part.HANDSHAKE: _Table(("<case", *(f"<{variant}" for variant in _SHORT)), _handshake_rows),
    Part.TRANSFER: _Table(
        (
            "<case",
            *(f">{variant}" for variant in (*_SHORT, RAW.name, MEMCPY.name)),
            *("<ours / upstream", "<ours / at rest"),
        ),
        _transfer_rows,
    ),
    Part.REQUEST_PATH: _Table(
        (">in flight", *(f"<{variant}" for variant in _SHORT)), _request_path_rows
    ),
    Part.IDLE: _Table(("<case", *(f"<{variant}" for variant in _SHORT)), _idle_rows),
    Part.PEERS: _Table(
        ("<engines", "<variant", *(f">{what}" for what in PEERS_COLUMNS)), _peers_rows
    ),
    Part.PAUSES: _Table(("<case", *(f"<{variant}" for variant in _SHORT)), _pause_rows),
    Part.NETWORK: _Table(
        ("<case", *(f"<{variant}" for variant in _NETWORK_VARIANTS)), _network_rows
    ),
    Part.END_TO_END: _Table(
        (
            "<between",
            ">requests/s",
            "<stack",
            ">TTFT",
            ">ITL",
            ">ITL, 99th percentile",
            ">tokens/s",
        ),
        _end_to_end_rows,
    ),
}
_NAMES = (_TARGETS, *(part.value for part in _TABLES))


def main(argv: Sequence[str] | None = None, page: Path = PAGE) -> int:
    """Write the tables anew; the exit status is 2 where that cannot be done."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.docs_performance",
        description="Write the tables of docs/performance.md from what `make bench` measured.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="BENCH_JSON", help="later ones win")
    try:
        results = merge(map(read, parser.parse_args(argv).files))
        written = rewrite(page.read_text(encoding="utf-8"), results)
    except (ReportError, MarkerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    page.write_text(written, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

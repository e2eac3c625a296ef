# SPDX-License-Identifier: Apache-2.0
"""What `make bench` has measured: data in docs/results/, and tables of docs/performance.md.

    python -m benchmarks.docs_performance build/bench/bench.json [MORE.json ...]

A part is a file `bench-PART.csv`, with a row for each case and variant that was measured;
`bench-targets.csv` has the targets of all parts. Of some files the page shows cases, variants and
figures, between `<!-- bench: PART -->` and `<!-- /bench -->`; nothing else of it is touched. Where
two measurements have the same case, the later one wins. The file of a part that none has stays as
it is, and so do its targets.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tools.docs.blocks import MarkerError, Tables, fill, table

from .errors import ReportError
from .report import count, figures, from_json, held, seconds, share, size, speed
from .results import Metric, Part, Result
from .specs import OURS, UPSTREAM, UPSTREAM_AT_REST
from .targets import goals, judge

PAGE = Path(__file__).parents[1] / "docs/performance.md"
RESULTS = PAGE.parent / "results"

_TARGETS = "targets"

Row = dict[str, str]


@dataclass(frozen=True)
class _View:
    """What the page shows of a file: a row for each case.

    Attributes:
        figures: Names of columns of the file.
        variants: Each has a column for all of its figures; of a single one, each figure has.
        alike: What all cases that are shown have in their names, and the page leaves out.
    """

    figures: Sequence[str]
    variants: Sequence[str] = (OURS.name,)
    alike: str = ""

    def lines(self, rows: Iterable[Row]) -> list[str]:
        """The table."""
        cases: dict[str, dict[str, Row]] = {}
        for row in rows:
            if self.alike in row["case"]:
                cases.setdefault(row["case"].replace(self.alike, ""), {})[row["variant"]] = row
        head = ["case", *self.figures]
        cells = [(self.variants[0], [name]) for name in self.figures]
        if len(self.variants) > 1:
            head = [f"case ({', '.join(self.figures)})", *self.variants]
            cells = [(variant, list(self.figures)) for variant in self.variants]
        body = (
            [case, *(_cell(measured.get(variant, {}), names) for variant, names in cells)]
            for case, measured in cases.items()
        )
        return table(head, body, numbers=1)


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


def store(results: Sequence[Result], folder: Path = RESULTS) -> None:
    """Write the files of the parts that were measured, and their targets."""
    targets = _read(folder / f"bench-{_TARGETS}.csv")
    for part in Part:
        if measured := [each for each in results if each.part is part]:
            _write(folder / f"bench-{part.value}.csv", _rows(part, measured))
            targets = [row for row in targets if row["part"] != part.value]
            targets += _target_rows(measured)
    order = [part.value for part in Part]
    targets.sort(key=lambda row: order.index(row["part"]))
    _write(folder / f"bench-{_TARGETS}.csv", targets)


def rewrite(page: str, folder: Path = RESULTS) -> str:
    """The same page with the tables of what is stored.

    Raises:
        MarkerError: It is not clear where they begin or end, or what they show.
    """
    tables: Tables = {
        name: partial(view.lines, _read(folder / f"bench-{name}.csv"))
        for name, view in _SHOWN.items()
    }
    return fill(page, "bench", tables)


def _read(path: Path) -> list[Row]:
    """The rows of a file; none where there is no such file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _write(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0] if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _cell(row: Row, names: Iterable[str]) -> str:
    """All figures that there are in one cell."""
    return ", ".join(filter(None, (row.get(name) for name in names))) or "-"


def _rows(part: Part, results: Sequence[Result]) -> list[Row]:
    """A row for each case and variant."""
    return [
        {"case": result.case, "variant": variant, **_figures(part, result, variant)}
        for result in results
        for variant in result.samples
    ]


def _figures(part: Part, result: Result, variant: str) -> Row:
    """Medians; of shares and ratios, with the least and the greatest."""
    if part is Part.TRANSFER:
        median = speed(result, variant)
        cells = {_SPEED: "" if median is None else f"{median.median:.2f}"}
        for name, other in ((_OF_UPSTREAM, UPSTREAM), (_OF_REST, UPSTREAM_AT_REST)):
            faster = result.ratio(other.name, variant, Metric.SECONDS)
            is_ours = variant == OURS.name and faster is not None
            cells[name] = figures(faster, _digits) if is_ours else ""
        return cells
    cells = {}
    for name, (metric, show) in _COLUMNS[part].items():
        if (summary := result.summary(variant, metric)) is None:
            cells[name] = ""
        else:
            cells[name] = figures(summary, show) if show is share else show(summary.median)
    return cells


def _milliseconds(value: float) -> str:
    return f"{value * 1e3:.2f} ms"


def _digits(value: float) -> str:
    """A number with as many digits as say something."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _target_rows(results: Sequence[Result]) -> list[Row]:
    """A row for each target that was measured, with the case that is farthest from it."""
    rows = []
    for goal in goals(judge(results)):
        worst, show = goal.worst, partial(held, goal.worst)
        if worst.measured is not None:
            wanted = f"at {'most' if worst.at_most else 'least'} {show(worst.wanted)}"
            rows.append(
                {
                    "part": worst.part.value,
                    "what": worst.target,
                    "wanted": wanted,
                    "met": f"{goal.num_met} of {len(goal.judged)}",
                    "worst": figures(worst.measured, show),
                    "where": worst.case,
                }
            )
    return rows


_SPEED, _OF_UPSTREAM, _OF_REST = "GB/s", "of upstream's", "of upstream's at rest"
_COLUMNS: Mapping[Part, Mapping[str, tuple[Metric, Callable[[float], str]]]] = {
    Part.HANDSHAKE: {"time": (Metric.SECONDS, seconds), "peak memory": (Metric.PEAK_BYTES, size)},
    Part.REQUEST_PATH: {
        "engine's thread": (Metric.REQUEST_CPU_S, _milliseconds),
        "outside of NIXL": (Metric.OWN_CPU_S, _milliseconds),
        "whole worker": (Metric.WORKER_CPU_S, _milliseconds),
    },
    Part.IDLE: {"of a core": (Metric.IDLE_CPU, share)},
    Part.PEERS: {
        "memory": (Metric.RESIDENT_BYTES, size),
        "descriptors": (Metric.DESCRIPTORS, count),
        "after the last read": (Metric.PEAK_DESCRIPTORS, count),
        "threads": (Metric.THREADS, count),
        "one more": (Metric.SECONDS, seconds),
        "of that in NIXL": (Metric.NIXL_S, seconds),
    },
    Part.PAUSES: {
        "longest": (Metric.LONGEST_PAUSE_S, seconds),
        "99th percentile": (Metric.PAUSE_P99_S, seconds),
    },
    Part.NETWORK: {
        "time": (Metric.SECONDS, seconds),
        "steps after the last byte": (Metric.STEPS_AFTER_ARRIVAL, count),
    },
    Part.END_TO_END: {
        "TTFT": (Metric.TTFT_S, seconds),
        "ITL": (Metric.ITL_S, seconds),
        "ITL p99": (Metric.ITL_P99_S, seconds),
        "tokens/s": (Metric.TOKENS_PER_S, _digits),
    },
    Part.CLIENTS: {
        "requests/s": (Metric.REQUESTS_PER_S, _digits),
        "CPU of both engines, a request": (Metric.ENGINES_CPU_S, seconds),
        "TTFT": (Metric.TTFT_S, seconds),
        "ITL": (Metric.ITL_S, seconds),
    },
}
_BOTH = (OURS.name, UPSTREAM.name)
_SHOWN = {
    Part.HANDSHAKE.value: _View(("time", "peak memory"), _BOTH),
    Part.TRANSFER.value: _View(
        (_SPEED, _OF_REST), (*_BOTH, UPSTREAM_AT_REST.name), ", 8k tokens, contiguous"
    ),
    Part.PEERS.value: _View(
        ("memory", "descriptors", "after the last read", "one more", "of that in NIXL"),
        alike="TP1->TP1, ",
    ),
    Part.END_TO_END.value: _View(
        ("TTFT", "ITL p99"), (OURS.name, UPSTREAM_AT_REST.name), "512+32 tokens, "
    ),
}


def main(argv: Sequence[str] | None = None, page: Path = PAGE, folder: Path = RESULTS) -> int:
    """Write files and tables anew; the exit status is 2 where that cannot be done."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.docs_performance",
        description="Write docs/results/bench-*.csv, and the tables of docs/performance.md, from "
        "what `make bench` measured.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="BENCH_JSON", help="later ones win")
    try:
        results = merge(map(read, parser.parse_args(argv).files))
        before = page.read_text(encoding="utf-8")
        rewrite(before, folder)
        store(results, folder)
        page.write_text(rewrite(before, folder), encoding="utf-8")
    except (ReportError, MarkerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

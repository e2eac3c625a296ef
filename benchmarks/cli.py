# SPDX-License-Identifier: Apache-2.0
"""Command line."""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.status import Status
from rich.text import Text

from tools.pdstack.engine import Device, installed_device
from tools.pdstack.process import TerminatedError, sigterm_raises

from . import children, report
from .asynchronous import measure_networks
from .cases import (
    Depth,
    handshake_cases,
    idle_cases,
    network_cases,
    pause_cases,
    peers_cases,
    request_path_cases,
    transfer_cases,
)
from .clients import measure_clients
from .end_to_end import Load, measure_end_to_end
from .errors import BenchmarkError
from .handshake import measure_handshakes
from .idle import measure_idle
from .machine import machine_facts
from .pauses import measure_pauses
from .peers import measure_peers
from .plot import draw
from .request_path import measure_request_paths
from .results import Part, Result
from .specs import MEMCPY, OURS, RAW, UPSTREAM, UPSTREAM_AT_REST, Variant
from .targets import goals, judge
from .transfer import measure_transfers
from .turns import Plan

_WIDTH = 170
_PRELOAD = "benchmarks.host"
_STRATEGIES = ("auto", "direct", "staged", "packed")
_BUSY_LOAD = 0.5
"""Load average of a core above which figures are doubtful."""


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure our connector and upstream's of the same wheel side by side.",
        epilog="Exit status: 0 everything was measured, 1 something failed, 130 after Ctrl-C, "
        "which leaves what was measured so far. Missed targets do not change it.",
    )
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument(
        "--quick", action="store_true", help="a few cases, without upstream's at rest: a minute"
    )
    depth.add_argument("--full", action="store_true", help="all cases, more than an hour")
    parser.add_argument(
        "--only",
        action="append",
        choices=[part.value for part in Part],
        help="measure this part; repeat it (default: all but end-to-end and clients)",
    )
    parser.add_argument(
        "--case", action="append", default=[], metavar="TEXT", help="cases whose name has this"
    )
    parser.add_argument("--repetitions", type=_count, default=3, metavar="N", help="default: 3")
    parser.add_argument(
        "--strategy",
        action="append",
        choices=_STRATEGIES,
        help="give our connector this transfer_strategy; repeat it to compare several "
        "(default: none, so that the connector chooses)",
    )
    parser.add_argument(
        "--rounds",
        type=_count,
        default=1,
        metavar="N",
        help="of end-to-end and clients (default: 1)",
    )
    parser.add_argument(
        "--rate",
        action="append",
        type=float,
        metavar="R",
        help="requests a second, end to end; repeat it (default: 0.25, 0.5 and 1)",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("build/bench"), metavar="DIR", help="build/bench"
    )
    return parser


def variants(strategies: Sequence[str] | None, *, quick: bool = False) -> list[Variant]:
    """What takes turns; the first variant of ours is the one that is judged."""
    ours = [Variant(f"ours, {name}", "ours", name) for name in strategies or ()] or [OURS]
    upstreams = [UPSTREAM] if quick else [UPSTREAM, UPSTREAM_AT_REST]
    return [*ours, *upstreams, RAW, MEMCPY]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if importlib.util.find_spec("matplotlib") is None:
        parser.error(
            "matplotlib, which draws the charts, is not installed: run `make bench`, or first "
            "`pip install -r requirements/bench.txt`"
        )
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    with sigterm_raises():
        try:
            return _run(args, console)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        except TerminatedError:
            return 128 + signal.SIGTERM


def _run(args: argparse.Namespace, console: Console) -> int:
    depth = Depth.QUICK if args.quick else Depth.FULL if args.full else Depth.DEFAULT
    chosen = [Part(name) for name in args.only or ()]
    parts = chosen or [part for part in Part if not part.has_engines]
    facts = machine_facts()
    console.print(Text("  ".join(f"{name}: {value}" for name, value in facts.items())))
    load = float(facts["load average"].partition(",")[0])
    cores = int(facts["cores"].partition(" ")[0])
    if load > _BUSY_LOAD * cores:
        console.print(Text(f"The machine is busy (load {load}): do not trust times.", "yellow"))
    args.output.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    started_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as logs,
        console.status("") as status,
    ):
        taking_turns = variants(args.strategy, quick=args.quick)
        plan = Plan(taking_turns, args.repetitions, Path(logs), _Say(console, status))
        if not all(part.has_engines for part in parts):
            children.prepare(_PRELOAD, plan.directory)
        status_code = 0
        try:
            for result in _measure(parts, depth, args, plan):
                results.append(result)
        except BenchmarkError as error:
            console.print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
            status_code = 1
        except (KeyboardInterrupt, TerminatedError) as interruption:
            # What was measured is worth as much as before.
            console.print("interrupted; everything is stopped")
            by_user = isinstance(interruption, KeyboardInterrupt)
            status_code = 128 + (signal.SIGINT if by_user else signal.SIGTERM)
    if results:
        complete, took_s = status_code == 0, time.monotonic() - started_s
        _finish(args, console, facts, results, parts, complete, took_s)
    failed = any(variant.name in result.missing for result in results for variant in _ours(args))
    return status_code or int(failed)


class _Say:
    """Progress: one line that changes on a terminal, else a line each time."""

    def __init__(self, console: Console, status: Status) -> None:
        self._console, self._status = console, status
        self._started_s = time.monotonic()

    def __call__(self, text: str) -> None:
        line = Text(f"{time.monotonic() - self._started_s:4.0f} s  {text}")
        self._status.update(line)
        if not self._console.is_terminal:
            self._console.print(line)


def _measure(
    parts: Sequence[Part], depth: Depth, args: argparse.Namespace, plan: Plan
) -> Iterator[Result]:
    """Measure the chosen cases of the chosen parts."""

    def wanted(name: str) -> bool:
        return not args.case or any(text in name for text in args.case)

    if Part.HANDSHAKE in parts:
        handshakes = [case for case in handshake_cases(depth) if wanted(case.name)]
        yield from measure_handshakes(handshakes, plan, thorough=depth is Depth.FULL)
    if Part.TRANSFER in parts:
        transfers = [case for case in transfer_cases(depth) if wanted(case.name)]
        yield from measure_transfers(transfers, plan)
    if Part.REQUEST_PATH in parts:
        paths = [case for case in request_path_cases(depth) if wanted(case.name)]
        if paths:
            yield from measure_request_paths(paths, plan)
    if Part.IDLE in parts:
        yield from measure_idle([each for each in idle_cases() if wanted(each.name)], plan)
    if Part.PEERS in parts:
        yield from measure_peers([each for each in peers_cases(depth) if wanted(each.name)], plan)
    if Part.PAUSES in parts:
        pauses = [each for each in pause_cases(depth) if wanted(each.name)]
        yield from measure_pauses(pauses, plan, thorough=depth is Depth.FULL)
    if Part.NETWORK in parts:
        links = [case for case in network_cases(depth) if wanted(case.name)]
        yield from measure_networks(links, plan)
    if Part.END_TO_END in parts:
        loads = [Load(rate) for rate in args.rate or (0.25, 0.5, 1.0)]
        yield from measure_end_to_end(loads, args.rounds, plan, wanted)
    if Part.CLIENTS in parts:
        yield from measure_clients(args.rounds, plan, wanted)


def _finish(
    args: argparse.Namespace,
    console: Console,
    facts: dict[str, str],
    results: Sequence[Result],
    parts: Sequence[Part],
    complete: bool,
    took_s: float,
) -> None:
    """Print tables, and write JSON and drawing."""
    judged = _ours(args)[0].name
    verdicts = judge(results, judged)
    for table in report.result_tables(results):
        console.print(table)
    if verdicts:
        console.print(report.goal_table(goals(verdicts)))
    not_run = [
        f"{part.value} was not run: --only {part.value}" for part in Part if part not in parts
    ]
    if not complete:
        not_run.insert(0, "The run did not come to its end: cases are missing.")
    if installed_device() is Device.CPU:
        not_run.append("Device memory was not measured: the installed wheel is for CPU.")
    for line in (*report.missing_lines(results), *not_run, *report.NOTES):
        console.print(Text(line), soft_wrap=True)
    settings = {
        "complete": complete,
        "repetitions": args.repetitions,
        "rounds": args.rounds,
        "depth": "quick" if args.quick else "full" if args.full else "default",
        "strategies": args.strategy or [],
        "took_s": round(took_s, 1),
    }
    written = report.to_json(facts, settings, results, verdicts, not_run)
    path = args.output / "bench.json"
    path.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    draw(results, args.output / "bench.svg")
    console.print(Text(f"Wrote {path} and {path.with_suffix('.svg')}; it took {took_s:.0f} s."))


def _ours(args: argparse.Namespace) -> list[Variant]:
    return [variant for variant in variants(args.strategy) if variant.connector == "ours"]


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value

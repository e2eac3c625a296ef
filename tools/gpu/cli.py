# SPDX-License-Identifier: Apache-2.0
"""``python -m tools.gpu``, which ``make gpu`` runs, and its parts ``lane`` and ``announced``.

``lane`` needs no vLLM.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import alone

_REPORT = Path("build/gpu/report.md")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu",
        description="Run on one GPU what no machine without one can, within ten minutes and "
        "without a network, and write a report.",
        epilog="Exit status: 0 all is well, 1 something failed, 2 something is missing, "
        "3 a step had no time left.",
    )
    parser.add_argument(
        "--report", type=Path, default=_REPORT, metavar="FILE", help="default: %(default)s"
    )
    parser.set_defaults(run=_kit)
    commands = parser.add_subparsers(metavar="{lane,announced}")
    lane = commands.add_parser(
        "lane", help="read whole workers' caches, compare and time; needs no vLLM"
    )
    lane.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    lane.add_argument("--small", action="store_true", help="a small model, and each read once")
    lane.add_argument("--output", type=Path, metavar="FILE", help="write a report as JSON")
    lane.set_defaults(run=_lane)
    announced = commands.add_parser(
        "announced", help="what announcing offers gains, with a pair of engines"
    )
    announced.add_argument("--prefill", default="tp1pp1", metavar="LAYOUT", help="tp1pp1")
    announced.add_argument("--rounds", type=int, default=6, metavar="N", help="of either way: 6")
    announced.add_argument("--requests", type=int, default=32, metavar="N", help="of a round: 32")
    announced.add_argument(
        "--synchronous", action="store_true", help="for prefill engines of several stages"
    )
    announced.add_argument("--output", type=Path, metavar="FILE", help="write a report as JSON")
    announced.set_defaults(run=_announced)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; returns the exit status."""
    args = build_parser().parse_args(argv)
    status: int = args.run(args)
    return status


def _kit(args: argparse.Namespace) -> int:
    if reason := alone.why_not():
        return _missing(reason)
    # Not before: it needs what that has looked for.
    from . import kit

    if reason := kit.why_not():
        return _missing(reason)
    path = args.report.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    return kit.run_kit(kit.steps(path.parent), path)


def _lane(args: argparse.Namespace) -> int:
    if reason := alone.why_not():
        return _missing(reason)
    if args.device != "cpu" and (reason := alone.why_no_gpu()):
        return _missing(f"{reason}, or --device cpu")
    alone.install()
    from . import lane

    model = lane.SMALL if args.small else lane.LARGE
    print(f"{model}, {args.device}")
    measured = []
    for each in lane.measure(args.device, model, lane.PAIRS, 1 if args.small else 5):
        print(each, flush=True)
        measured.append(each)
    lane.report(measured, args.device, args.output)
    return 1 if any(each.fault for each in measured) else 0


def _announced(args: argparse.Namespace) -> int:
    # It needs vLLM, and whatever else starts engines.
    from tools.pdstack.errors import PDStackError
    from tools.pdstack.layout import parse_layout
    from tools.pdstack.model import cache_dir, prepare_default_model
    from tools.pdstack.stack import PDStack, run_directory

    from . import announced

    try:
        with run_directory() as run_dir:
            with PDStack(prepare_default_model(cache_dir(), run_dir), run_dir) as stack:
                gain = announced.measure(
                    stack,
                    prefill=parse_layout(args.prefill),
                    rounds=args.rounds,
                    requests=args.requests,
                    engine_args=() if args.synchronous else announced.ASYNCHRONOUS,
                )
            announced.report(gain, args.output)
    except PDStackError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    if gain.fault:
        print(gain.fault)
    return 1 if gain.fault else 0


def _missing(reason: str) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return 2

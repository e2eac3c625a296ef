# SPDX-License-Identifier: Apache-2.0
"""``python -m tools.gpu``, which ``make gpu`` runs, and its part that needs no vLLM, ``lane``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import alone

_REPORT = Path("build/gpu/report.md")


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu",
        description="Run on one GPU what no machine without one can, within ten minutes and "
        "without a network, and write a report.",
        epilog="Exit status: 0 all is well, 1 something failed, 2 something is missing.",
    )
    parser.add_argument(
        "--report", type=Path, default=_REPORT, metavar="FILE", help="default: %(default)s"
    )
    parser.set_defaults(run=_kit)
    commands = parser.add_subparsers(metavar="lane")
    lane = commands.add_parser(
        "lane", help="read whole workers' caches, compare and time; needs no vLLM"
    )
    lane.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    lane.add_argument("--small", action="store_true", help="a small model, and each read once")
    lane.add_argument("--output", type=Path, metavar="FILE", help="write a report as JSON")
    lane.set_defaults(run=_lane)
    args = parser.parse_args(argv)
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


def _missing(reason: str) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return 2

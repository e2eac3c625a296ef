# SPDX-License-Identifier: Apache-2.0
"""``python -m tools.gpu lane``: bytes between two processes on one device, without vLLM."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import alone


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu", description=__doc__)
    commands = parser.add_subparsers(required=True)
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


def _lane(args: argparse.Namespace) -> int:
    if reason := alone.why_not() or _why_no_device(args.device):
        print(f"error: {reason}", file=sys.stderr)
        return 2
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


def _why_no_device(device: str) -> str:
    """Return why torch cannot compute there, in words; empty where it can."""
    import torch

    if device == "cpu" or torch.cuda.is_available():
        return ""
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    return f"torch {torch.__version__} ({built}) finds no GPU: see nvidia-smi, or --device cpu"

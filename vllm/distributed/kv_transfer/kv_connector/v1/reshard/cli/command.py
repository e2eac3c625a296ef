# SPDX-License-Identifier: Apache-2.0
"""The `kv-plan` command: its arguments and its output."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .document import plan_document
from .report import PlanReport, UpstreamReport, make_report
from .svg import draw_plan

NAME = "kv-plan"

_USAGE = (
    "%(prog)s --prefill tp=N,pp=N --decode tp=N,pp=N "
    "(--model DIR | --num-layers N --num-kv-heads N) [options]"
)
_DESCRIPTION = """Show which decode rank reads which layers and KV heads from which prefill rank.

  %(prog)s --prefill tp=4,pp=2 --decode tp=2 --num-layers 32 --num-kv-heads 8
  %(prog)s --prefill tp=4,pp=2 --decode tp=2 --model DIR --svg plan.svg
"""
_DEFAULT_BLOCK_TOKENS = 16
_NOT_READ, _INVALID = 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments without the program's name. None for those of the process; messages then
            use the name it was called by, because the plugin installs the command under another.

    Returns:
        The exit status, as `run` returns it.
    """
    parser = argparse.ArgumentParser(prog=NAME if argv is not None else Path(sys.argv[0]).name)
    prepare(parser)
    return run(parser.parse_args(argv), parser.prog)


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments and help to a parser."""
    parser.usage = _USAGE
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}",
            metavar="tp=N,pp=N",
            required=True,
            help=f"layout of the {role} engine, of which what is left out is 1; or tpNppN; with "
            ",dcp=N also of its decode context parallelism"
            + (", with ,pcp=N of its prefill context parallelism" * (role == "prefill")),
        )
        parser.add_argument(
            f"--{role}-layer-partition",
            metavar="N,N,...",
            help=f"layers of each {role} stage, as in VLLM_PP_LAYER_PARTITION",
        )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="directory with the model's config.json; options below take its place",
    )
    parser.add_argument("--num-layers", type=int, help="layers of the model")
    parser.add_argument(
        "--num-kv-heads", type=int, help="KV heads of each layer; not needed with --mla"
    )
    parser.add_argument("--mla", action="store_true", help="the model has one latent KV head (MLA)")
    parser.add_argument(
        "--head-size", type=int, help="elements of a head of a token; of the latent with --mla"
    )
    parser.add_argument("--dtype", help="type of the KV cache's elements; bfloat16 by default")
    parser.add_argument(
        "--block-size",
        type=int,
        default=_DEFAULT_BLOCK_TOKENS,
        help="tokens in a block (default: %(default)s)",
    )
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}-block-size", type=int, help=f"the same, of the {role} engine alone"
        )
        parser.add_argument(
            f"--{role}-interleave-size",
            type=int,
            help=f"tokens that the {role} engine deals to a rank at a time, as in "
            "--cp-kv-cache-interleave-size; a block by default",
        )
    parser.add_argument(
        "--disable-hybrid-kv-cache-manager",
        action=argparse.BooleanOptionalAction,
        help="as given to both engines: layers with windows keep and read all tokens; by "
        "default their windows only, unless these are chunks",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        default=1024,
        help="length of the prompt of a request (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the plan too")


def run(args: argparse.Namespace, prog: str) -> int:
    """Print the plan.

    Args:
        args: Arguments from a parser that went through `prepare`.
        prog: Name of the command, for messages.

    Returns:
        The exit status: 0, or 2 after a one-line error if the arguments cannot be planned, or 1 if
        the reader of the output has closed the pipe.
    """
    try:
        report = make_report(args)
        if args.svg is not None:
            _write_svg(report, args.svg)
    except ValueError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return _INVALID
    try:
        if args.json:
            print(json.dumps(plan_document(report)))
        else:
            _print_text(report)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has closed the pipe, as `| head` does. The interpreter flushes again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NOT_READ
    return 0


def _print_text(report: PlanReport | UpstreamReport) -> None:
    """Print the plan and its costs as text."""
    # Imported here so that --json does not wait for it.
    from rich.console import Console

    from .text import print_report

    print_report(report, Console())


def _write_svg(report: PlanReport | UpstreamReport, path: Path) -> None:
    """Draw the plan.

    Raises:
        ValueError: The file cannot be written, the layers differ or have shares of tokens, or
            there is no plan to draw.
    """
    if isinstance(report, UpstreamReport):
        raise ValueError(f"--svg has nothing to draw: {report.notes[0].why}: leave it out")
    if report.layers or report.state or report.has_kinds:
        raise ValueError(
            "--svg draws models whose layers are alike, and those of this model differ: leave it "
            "out, or give --num-layers, --num-kv-heads and --head-size of one kind of layer"
        )
    if report.has_shares:
        raise ValueError("--svg draws layers and heads, and not shares of tokens: leave it out")
    ends = report.prefill.mesh, report.decode.mesh
    drawing = draw_plan(*ends, report.src, report.dst, report.plan)
    try:
        path.write_text(drawing, encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"--svg {path} cannot be written ({error.strerror}): name a file in a directory that "
            "exists and is yours"
        ) from error

# SPDX-License-Identifier: Apache-2.0
"""The `kv-plan` command: its arguments and its output."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import ReshardError
from .asking import ask, can_ask
from .document import plan_document
from .engines import Answer, NoAnswerError
from .layouts import EngineLayout, parse_layout
from .planning import Planned, plan_engines
from .sizes import Sizes, from_sizes, read_config
from .svg import draw_plan
from .verdict import Outcome, Verdict, judge

NAME = "kv-plan"

_USAGE = (
    "%(prog)s --prefill tp=N,pp=N --decode tp=N,pp=N "
    "(--model DIR | --num-layers N --num-kv-heads N) [options]"
)
_DESCRIPTION = """Say whether engines of two layouts would exchange KV caches, and who reads what.

  %(prog)s --prefill tp=4,pp=2 --decode tp2 --num-layers 32 --num-kv-heads 8
  %(prog)s --prefill tp=4,pp=2 --decode tp2 --model DIR --device gpu --svg plan.svg

Status: 0 if they would, 3 if not or not known here, 2 if the arguments cannot be understood.
"""
_NOT_READ, _INVALID, _REFUSED = 1, 2, 3
_MAX_PROMPT_TOKENS = 1 << 21


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
    add = parser.add_argument
    for role in ("prefill", "decode"):
        add(
            f"--{role}",
            metavar="tp=N,pp=N",
            required=True,
            help=f"layout of the {role} engine: tp=N, pp=N, dcp=N, dp=N, ep=N"
            + (", pcp=N" * (role == "prefill"))
            + "; what is left out is 1",
        )
        add(
            f"--{role}-layer-partition",
            metavar="N,N,...",
            help=f"layers of each {role} stage, as in VLLM_PP_LAYER_PARTITION",
        )
        add(f"--{role}-block-size", type=int, help=f"--block-size of the {role} engine alone")
        add(
            f"--{role}-interleave-size",
            type=int,
            help=f"tokens that the {role} engine deals to a rank at a time, as in "
            "--cp-kv-cache-interleave-size; a block by default",
        )
    add("--model", metavar="DIR", help="model that vLLM is asked about: a directory, or a name")
    add(
        "--engine-args",
        metavar="TEXT",
        default="",
        help="more arguments of `vllm serve` for both engines of --model",
    )
    add(
        "--device",
        choices=("cpu", "gpu"),
        help="what engines of --model run on; by default what vLLM here is for",
    )
    add("--num-layers", type=int, help="instead of --model: layers, which are all alike")
    add("--num-kv-heads", type=int, help="KV heads of each layer")
    add("--mla", action="store_true", help="one latent (MLA) instead of KV heads")
    add("--head-size", type=int, help="elements of a head; 128 by default, of a latent 576")
    add("--dtype", default="bfloat16", help="type of the KV cache's elements (%(default)s)")
    add("--block-size", type=int, help="tokens in a block; by default vLLM's choice, or 16")
    add("--prompt-tokens", type=int, default=1024, help="length of a prompt (%(default)s)")
    add("--summary", action="store_true", help="leave out single reads and ranks")
    add("--json", action="store_true", help="print one JSON object")
    add("--svg", type=Path, metavar="FILE", help="draw the plan too")


def run(args: argparse.Namespace, prog: str) -> int:
    """Print the verdict and the plan.

    Args:
        args: Arguments from a parser that went through `prepare`.
        prog: Name of the command, for messages.

    Returns:
        The exit status: 0; 3 if engines would not exchange their caches, or that is not known; 2
        after a one-line error if the arguments cannot be understood; or 1 if the reader of the
        output has closed the pipe.
    """
    try:
        verdict, answer, planned = _plan(args)
        if args.svg is not None and planned is not None and answer is not None:
            _write(args.svg, draw_plan(answer, planned))
    except ValueError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return _INVALID
    try:
        _print(args, verdict, answer, planned)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has closed the pipe, as `| head` does. The interpreter flushes again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NOT_READ
    return 0 if verdict.outcome in (Outcome.SERVED, Outcome.STOCK) else _REFUSED


def _plan(args: argparse.Namespace) -> tuple[Verdict, Answer | None, Planned | None]:
    """Return the verdict, the engines if there are such, and the plan if they are served.

    Raises:
        ValueError: An argument is malformed, or vLLM could not be asked.
    """
    if not 1 <= args.prompt_tokens <= _MAX_PROMPT_TOKENS:
        raise ValueError(
            f"--prompt-tokens is {args.prompt_tokens} but must be between 1 and "
            f"{_MAX_PROMPT_TOKENS}"
        )
    layouts = [_layout(args, role) for role in ("prefill", "decode")]
    try:
        answer = _answer(args, layouts)
    except NoAnswerError as error:
        outcome = Outcome.REFUSED if error.is_final else Outcome.UNKNOWN
        return Verdict(outcome, str(error), knows_stock=False), None, None
    verdict = judge(answer)
    if verdict.outcome is not Outcome.SERVED:
        return verdict, answer, None
    try:
        return verdict, answer, plan_engines(*answer.engines, args.prompt_tokens)
    except ReshardError as error:
        return judge(answer, str(error)), answer, None


def _layout(args: argparse.Namespace, role: str) -> EngineLayout:
    text = getattr(args, role)
    own = getattr(args, f"{role}_block_size")
    try:
        return parse_layout(
            text,
            getattr(args, f"{role}_layer_partition"),
            args.block_size if own is None else own,
            getattr(args, f"{role}_interleave_size"),
            reads=role == "decode",
        )
    except ValueError as error:
        raise ValueError(f"--{role} {text}: {error}") from error


def _answer(args: argparse.Namespace, layouts: Sequence[EngineLayout]) -> Answer:
    """Ask vLLM about a model, or make engines from sizes.

    Raises:
        NoAnswerError: vLLM would not start such engines.
        ValueError: An argument is missing or malformed, or vLLM could not be asked.
    """
    sizes = (args.num_layers, args.num_kv_heads, args.head_size)
    if args.model is not None:
        if args.mla or any(each is not None for each in sizes):
            raise ValueError("--model gives all sizes: leave out --num-layers and what is like it")
        if can_ask():
            return ask(args.model, layouts, args.device, shlex.split(args.engine_args))
        return from_sizes(read_config(args.model), f"from {args.model}, without vLLM", layouts)
    if args.num_layers is None:
        raise ValueError("--num-layers is missing: give the model's layers, or --model")
    if args.num_kv_heads is None and not args.mla:
        raise ValueError("--num-kv-heads is missing: give the model's KV heads, or --mla")
    head_size = args.head_size if args.head_size is not None else 576 if args.mla else 128
    num_heads = 1 if args.mla else args.num_kv_heads
    given = Sizes(args.num_layers, num_heads, head_size, is_latent=args.mla, dtype=args.dtype)
    return from_sizes(given, "as given, for layers that keep nothing else", layouts)


def _print(
    args: argparse.Namespace, verdict: Verdict, answer: Answer | None, planned: Planned | None
) -> None:
    if args.json:
        print(json.dumps(plan_document(verdict, answer, planned, is_summary=args.summary)))
        return
    # Imported here so that --json does not wait for it.
    from rich.console import Console
    from rich.text import Text

    from .text import print_plan

    console = Console()
    console.print(Text(str(verdict)))
    if answer is not None and planned is not None:
        console.print()
        print_plan(answer, planned, console, is_summary=args.summary)
    elif args.svg is not None:
        console.print(Text(f"Without a plan there is nothing to draw in {args.svg}."))


def _write(path: Path, drawing: str) -> None:
    """Write a drawing.

    Raises:
        ValueError: The file cannot be written.
    """
    try:
        path.write_text(drawing, encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"--svg {path} cannot be written ({error.strerror}): name a file in a directory that "
            "exists and is yours"
        ) from error

# SPDX-License-Identifier: Apache-2.0
"""Command line: ``sweep`` and ``accuracy``."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.text import Text

from . import families, lm_eval, releases, report, sweep
from .engine import ServedModel
from .errors import ProcessDiedError, UsageError
from .family import Family, Side
from .installation import ask, release_here
from .invocation import StackProgress, add_options, check_options, invoke
from .layout import check_layout, parse_layout, read_model_shape
from .model import cache_dir, default_model_path, given_model, prepare_default_model
from .stack import PDStack, Router


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``sweep``, which compares many pairs of layouts, and ``accuracy``, which compares one."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--requests",
        type=_count,
        default=64,
        metavar="N",
        help="prompts of 8 to 900 tokens for each pair (default: %(default)d)",
    )
    add_options(common, startup_timeout_s=900.0)
    many = commands.add_parser(
        "sweep", parents=[common], help="compare pairs of layouts with one engine, tiny models"
    )
    which = many.add_mutually_exclusive_group()
    which.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="this family; repeat it"
    )
    which.add_argument(
        "--subset",
        choices=sorted(families.SUBSETS),
        help="these families: `ci` is what no test with engines runs, `base` what `make test BASE=`"
        " runs, `releases` what --across runs by default",
    )
    many.add_argument(
        "--across",
        type=Path,
        metavar="DIR",
        help="run each family twice, with engines of another vLLM on either side: where its "
        "console scripts are, as .venv-0.33.0/bin",
    )
    many.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        help="with --across: take what was seen into this file; docs/bases.md is written from one",
    )
    many.add_argument(
        "--list", action="store_true", help="print the families with their subsets and end"
    )
    one = commands.add_parser(
        "accuracy", parents=[common], help="compare one pair of layouts with one engine"
    )
    one.add_argument("--model", type=Path, metavar="DIR", help="default: SmolLM2-135M")
    for role in ("prefill", "decode"):
        one.add_argument(f"--{role}", default="tp1pp1", metavar="LAYOUT", help="of each engine")
        one.add_argument(f"--num-{role}", type=_count, default=1, metavar="N", help="how many")
        one.add_argument(f"--{role}-args", default="", metavar="ARGS", help="for `vllm serve`")
    one.add_argument(
        "--gsm8k",
        type=_share,
        metavar="EXPECTED",
        help="then score gsm8k through the router with `lm_eval`, which has to come within "
        f"{lm_eval.TOLERANCE} of this share of exact answers",
    )
    one.add_argument(
        "--gsm8k-limit", type=_count, metavar="N", help="ask the first so many questions only"
    )


def execute(args: argparse.Namespace, console: Console) -> int:
    """Run what was asked for, and return the exit status.

    Raises:
        UsageError: what was asked for cannot work.
    """
    models: Mapping[str, Callable[[Path], ServedModel]] = families.MODELS
    if args.command == "accuracy":
        chosen, models = _one_pair(args)
    else:
        if args.results is not None and args.across is None:
            raise UsageError("--results is of pairs of two releases: it needs --across")
        subset = args.subset or ("releases" if args.across and not args.only else "")
        chosen = families.choose(families.SUBSETS.get(subset, args.only))
        if args.list:
            for family in chosen:
                console.print(Text(_listed(family)), soft_wrap=True)
            return 0
        chosen, left_out = families.split_by_vllm(chosen)
        if args.across is not None:
            chosen, left_out = _across(args.across.absolute(), chosen, left_out)
        for name, why in left_out.items():
            if args.only:
                raise UsageError(f"family {name!r} cannot run here: {why}")
            console.print(Text(f"{name}: left out, {why}"), soft_wrap=True)
    check_options(args)
    gsm8k = _Gsm8kStep.of(args, console)
    started = time.monotonic()

    def keep(result: sweep.Result) -> None:
        if getattr(args, "results", None) is not None:
            releases.store(args.results, [result])

    def command(run_dir: Path, progress: StackProgress) -> bool:
        if gsm8k is not None:
            gsm8k.prepare(run_dir)
        runner = sweep.Sweep(
            run_dir,
            num_requests=args.requests,
            startup_timeout_s=args.startup_timeout,
            on_wait=progress,
            say=lambda text: console.print(Text(text), soft_wrap=True),
            models=models,
            after=gsm8k or (lambda _stack, _router: None),
            keep=keep,
        )
        results = runner.run(chosen)
        _print_results(console, results, time.monotonic() - started)
        if args.command == "accuracy":
            console.print(Text(_told(gsm8k)), soft_wrap=True)
        return not any(result.fault for result in results)

    return invoke(args, console, command)


def _across(
    scripts: Path, chosen: Sequence[Family], left_out: Mapping[str, str]
) -> tuple[list[Family], dict[str, str]]:
    """The pairs of two releases that both can serve, and by name why not the others."""
    here = release_here()
    other, why = ask(scripts, [family.name for family in chosen])
    if other.release == here:
        raise UsageError(f"{scripts} has vLLM {here}, as this installation: name another release's")
    served = [family for family in chosen if family.name not in why]
    pairs = [pair for family in served for pair in families.across(family, here, other)]
    return pairs, {**left_out, **why}


class _Gsm8kStep:
    """Scores gsm8k through a router whose answers have passed.

    Args:
        script: path of ``lm_eval``.
        asked_for: what it is asked for with.
        console: where to say what is going on.
    """

    def __init__(self, script: str, asked_for: lm_eval.Gsm8k, console: Console) -> None:
        self._script = script
        self._asked_for = asked_for
        self._console = console
        self.score: lm_eval.Score | None = None

    @classmethod
    def of(cls, args: argparse.Namespace, console: Console) -> _Gsm8kStep | None:
        """Return what arguments ask for; ``None`` where they do not.

        Raises:
            UsageError: ``lm_eval`` is not installed, or there is a limit and nothing to limit.
        """
        if args.command != "accuracy":
            return None
        if args.gsm8k is None:
            if args.gsm8k_limit is not None:
                raise UsageError("--gsm8k-limit needs --gsm8k EXPECTED")
            return None
        asked_for = lm_eval.Gsm8k(args.gsm8k, args.gsm8k_limit)
        return cls(lm_eval.find_lm_eval(), asked_for, console)

    def prepare(self, run_dir: Path) -> None:
        """See that the data set can be had."""
        self._say("gsm8k: loading the data set with lm_eval")
        lm_eval.check_data(self._script, run_dir)

    def __call__(self, stack: PDStack, router: Router) -> str | None:
        """Ask the router; return why its answers do not pass."""
        self._say(f"  the answers are right; asking gsm8k, log in {stack.run_dir / 'lm_eval.log'}")
        try:
            self.score = lm_eval.evaluate(
                self._script, self._asked_for, stack.model, router.url, stack.run_dir, stack.check
            )
        except ProcessDiedError as error:
            # The table has a line for it only.
            report.print_error(Console(stderr=True), error, None)
            raise
        return self.score.fault

    def _say(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


def _told(gsm8k: _Gsm8kStep | None) -> str:
    """What became of gsm8k."""
    if gsm8k is None:
        return (
            "lm-eval was NOT run: --gsm8k EXPECTED scores gsm8k through the router, too; it needs "
            "`pip install 'lm-eval[api]'` and the data set, from the Hugging Face hub or its cache"
        )
    if gsm8k.score is None:
        return "lm-eval has no score: see what is said above"
    return str(gsm8k.score)


def _listed(family: Family) -> str:
    """A family in one line, with the subsets that it is in."""
    subsets = "".join(f"  [{name}]" for name in families.subsets_of(family))
    return f"{family.name}: {family.prefill} -> {family.decode}{subsets}"


def _print_results(console: Console, results: Sequence[sweep.Result], took_s: float) -> None:
    report.wide(console).print(sweep.result_table(results))
    failed = [result for result in results if result.fault]
    for result in failed:
        console.print(Text(f"{result.family.name}: {result.fault}"), soft_wrap=True)
    passed = f"{len(results) - len(failed)} of {len(results)} passed in {took_s:.0f} s"
    console.print(Text(passed), soft_wrap=True)


def _one_pair(
    args: argparse.Namespace,
) -> tuple[list[Family], Mapping[str, Callable[[Path], ServedModel]]]:
    """The one family that arguments describe, and its model."""
    sides = []
    for role in ("prefill", "decode"):
        layout = parse_layout(getattr(args, role))
        more = tuple(shlex.split(getattr(args, f"{role}_args")))
        if args.gsm8k is not None:
            more = (*lm_eval.ENGINE_ARGS, *more)
        sides.append(Side(layout, getattr(args, f"num_{role}"), more))
    if args.model is None:
        path = default_model_path(cache_dir())
        name = "SmolLM2-135M"
        if args.gsm8k is not None:
            lm_eval.check_model(ServedModel(path, name))
        make: Callable[[Path], ServedModel] = partial(prepare_default_model, cache_dir())
    else:
        given = given_model(args.model)
        shape = read_model_shape(given.directory)
        for side in sides:
            check_layout(side.layout, shape)
        if args.gsm8k is not None:
            lm_eval.check_model(given)
        make, name = (lambda _: given), given.name

    def made(directory: Path) -> ServedModel:
        directory.mkdir(parents=True, exist_ok=True)
        return make(directory)

    prefill, decode = sides
    return [Family("accuracy", name, prefill, decode)], {name: made}


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value

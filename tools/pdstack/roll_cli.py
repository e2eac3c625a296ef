# SPDX-License-Identifier: Apache-2.0
"""Command line: ``roll``."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import accuracy, report
from .accuracy import Completion
from .demo import describe_layouts, reference_spec
from .engine import ServedModel, find_script
from .errors import UsageError
from .invocation import StackProgress, add_options, check_options, invoke
from .layout import Layout, check_layout, parse_layout, read_model_shape
from .load import Figures, Load, Sample, figures
from .model import given_model
from .ports import PortAllocator
from .registry import Registry
from .roll import Address, Fleet, Replacement, Rolling
from .stack import PDStack
from .tiny_models import write_tiny_llama

PHASES = ("before", "during", "after")
_NUM_PROMPTS = 64
_POLL_S = 0.2
_SHOWN_FAILURES = 5
_DEFAULTS = Fleet()


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``roll``, which replaces each engine of a fleet while clients go on asking."""
    roll = commands.add_parser(
        "roll",
        help="replace each engine of a fleet under load, by one of another release",
    )
    roll.add_argument(
        "--next",
        type=Path,
        metavar="DIR",
        help="where the vLLM that follows has its console scripts, as .venv-0.33.0/bin "
        "(default: the same vLLM again)",
    )
    roll.add_argument(
        "--from",
        choices=["stock"],
        dest="origin",
        help="begin with upstream's connector, and one rank for each engine by default; decode "
        "engines compute what they cannot read",
    )
    roll.add_argument(
        "--address",
        type=Address,
        choices=list(Address),
        default=Address.SAME,
        help="where an engine that follows another one is (default: %(default)s)",
    )
    for role, layouts in (("prefill", _DEFAULTS.prefill), ("decode", _DEFAULTS.decode)):
        roll.add_argument(
            f"--{role}",
            action="append",
            metavar="LAYOUT",
            help=f"layout of a {role} engine; repeat it for each (default: {len(layouts)} of "
            f"{layouts[0]})",
        )
    roll.add_argument(
        "--times",
        type=int,
        default=1,
        metavar="N",
        help="roll it so often, forth and back in turn (default: %(default)d)",
    )
    roll.add_argument(
        "--model", type=Path, metavar="DIR", help="a model directory (default: a tiny Llama)"
    )
    roll.add_argument("--engine-args", default="", metavar="ARGS", help="for every `vllm serve`")
    roll.add_argument("--clients", type=int, default=8, metavar="N", help="(default: %(default)d)")
    roll.add_argument(
        "--calm",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long clients ask before and after it (default: %(default)g)",
    )
    roll.add_argument("--output", type=Path, metavar="FILE", help="write what was seen as JSON")
    add_options(roll, startup_timeout_s=600.0)


def execute(args: argparse.Namespace, console: Console) -> int:
    """Roll a fleet, and return the exit status: 0 where no request failed and no answer differs.

    Raises:
        UsageError: what was asked for cannot work.
    """
    check_options(args)
    settings = RollSettings.of(args)

    def command(run_dir: Path, progress: StackProgress) -> bool:
        def say(text: str) -> None:
            console.print(Text(text), soft_wrap=True)

        model = settings.model or write_tiny_llama(
            run_dir / "model", num_layers=6, num_heads=6, num_kv_heads=6
        )
        say(f"{settings.described}; logs in {run_dir}")
        with PDStack(
            model, run_dir, startup_timeout_s=args.startup_timeout, on_wait=progress
        ) as stack:
            rolled = roll_under_load(stack, settings, say)
        _show(console, rolled)
        if args.output is not None:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(rolled.to_json(settings), indent=1) + "\n")
        return rolled.passed

    return invoke(args, console, command)


@dataclass(frozen=True)
class Rolled:
    """What a roll has come to.

    Attributes:
        samples: all requests.
        replacements: the engines, in the order in which they were replaced.
    """

    samples: Sequence[Sample]
    replacements: Sequence[Replacement]

    @property
    def figures(self) -> list[Figures]:
        """What became of the requests of each phase."""
        return figures(self.samples, PHASES)

    @property
    def wrong(self) -> list[Sample]:
        """The requests that failed, or had another answer."""
        return [each for each in self.samples if each.failure or each.differs]

    @property
    def passed(self) -> bool:
        """Whether no request failed, no answer differs, and there were some in each phase."""
        return not self.wrong and all(each.requests for each in self.figures)

    def to_json(self, settings: RollSettings) -> dict[str, Any]:
        """Return all of it but the single requests that were answered."""
        return {
            "address": str(settings.address),
            "clients": settings.clients,
            "layouts": settings.layouts,
            "replacements": [asdict(each) for each in self.replacements],
            "phases": [asdict(each) for each in self.figures],
            "wrong": [asdict(each) for each in self.wrong],
        }


def roll_under_load(
    stack: PDStack, settings: RollSettings, say: Callable[[str], None] = lambda _: None
) -> Rolled:
    """Start a fleet and clients, let all engines be replaced, and return what was seen.

    Raises:
        PDStackError: an engine cannot be started, or does not end by itself.
    """
    prompts = accuracy.make_prompts(accuracy.vocabulary_size(stack.model.directory), _NUM_PROMPTS)
    references = _references(stack, settings, prompts)
    say("one engine has said what is right")
    with Registry(PortAllocator().take()) as registry:
        rolling = Rolling(stack, settings.fleet, registry, say)
        router = rolling.start()
        with Load(
            router.url, stack.model.name, prompts, references, clients=settings.clients
        ) as load:
            say(f"{settings.clients} clients ask {router.url}")
            _pass_time(stack, load, "before", settings.calm_s)
            load.phase = "during"
            replacements = []
            for number in range(settings.times):
                scripts = None if number % 2 else settings.scripts
                replacements += rolling.roll(settings.address, scripts)
            _pass_time(stack, load, "after", settings.calm_s)
    return Rolled(load.samples, replacements)


@dataclass(frozen=True)
class RollSettings:
    """A roll, as it is asked for.

    Attributes:
        model: what is served; by default a tiny Llama.
        address: where those that follow are.
        scripts: where the vLLM that follows has its console scripts; by default here.
        clients: how many ask all the time.
        calm_s: how long they ask before and after it.
        times: how often it is done, forth and back in turn.
    """

    fleet: Fleet = _DEFAULTS
    model: ServedModel | None = None
    address: Address = Address.SAME
    scripts: Path | None = None
    clients: int = 8
    calm_s: float = 60.0
    times: int = 1

    @classmethod
    def of(cls, args: argparse.Namespace) -> RollSettings:
        """Return what arguments ask for.

        Raises:
            UsageError: it cannot be.
        """
        for name in ("clients", "calm", "times"):
            if not getattr(args, name) > 0:
                raise UsageError(f"--{name} has to be positive")
        from_stock = args.origin == "stock"
        prefill, decode = (
            [parse_layout(text) for text in given]
            if given
            else [Layout() if from_stock else each for each in default]
            for given, default in (
                (args.prefill, _DEFAULTS.prefill),
                (args.decode, _DEFAULTS.decode),
            )
        )
        if args.address is Address.SAME and min(len(prefill), len(decode)) < 2:
            raise UsageError(
                "at the same address an engine is gone before the next one comes: there have to "
                "be two of each role, or --address other"
            )
        if from_stock and any(each.pp_size > 1 for each in (*prefill, *decode)):
            raise UsageError("--from stock: upstream's connector serves no pipeline stages")
        if args.next is not None:
            find_script("vllm", args.next.absolute())
        model = None if args.model is None else given_model(args.model)
        if model is not None:
            shape = read_model_shape(model.directory)
            for layout in {*prefill, *decode}:
                check_layout(layout, shape)
        return cls(
            Fleet(prefill, decode, shlex.split(args.engine_args), from_stock=from_stock),
            model,
            args.address,
            None if args.next is None else args.next.absolute(),
            args.clients,
            args.calm,
            args.times,
        )

    @property
    def layouts(self) -> str:
        """The layouts of all engines."""
        return describe_layouts(self.fleet.prefill, self.fleet.decode)

    @property
    def described(self) -> str:
        """What is going to happen, in a line."""
        where = "the same address" if self.address is Address.SAME else "another address"
        return f"{self.layouts}; each engine is replaced, by one at {where}"


def _references(
    stack: PDStack, settings: RollSettings, prompts: list[list[int]]
) -> list[Completion]:
    """What one engine answers that is stopped after that."""
    (engine,) = stack.start_engines(reference_spec(settings.fleet.extra_args))
    answers = accuracy.complete_all(engine.url, stack.model.name, prompts)
    stack.stop(engine)
    return answers


def _pass_time(stack: PDStack, load: Load, phase: str, limit_s: float) -> None:
    """Let clients ask for a while, in a phase of its own."""
    load.phase = phase
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        stack.check()
        time.sleep(_POLL_S)


def _show(console: Console, rolled: Rolled) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("", "requests", "failed", "other answers", "TTFT p50", "TTFT p99"):
        table.add_column(title, justify="right" if title else "left")
    for each in rolled.figures:
        times = (
            "-" if value is None else f"{value:.2f} s"
            for value in (each.ttft_p50_s, each.ttft_p99_s)
        )
        counts = map(str, (each.requests, each.failed, each.differing))
        table.add_row(each.phase, *counts, *times)
    report.wide(console).print(table)
    for sample in rolled.wrong[:_SHOWN_FAILURES]:
        what = sample.failure or "another answer than one engine's"
        console.print(Text(f"{sample.phase}, at {sample.ended_s:.1f} s: {what}"), soft_wrap=True)

# SPDX-License-Identifier: Apache-2.0
"""Command line: ``demo`` compares and ends, ``serve`` stays up."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from . import demo, handover_cli, report, roll_cli, sweep_cli
from .engine import ServedModel
from .errors import UsageError
from .invocation import StackProgress, add_options, check_options, invoke
from .layout import check_layout, parse_layout, read_model_shape
from .model import cache_dir, default_model_path, given_model, prepare_default_model
from .process import ChildProcess, TerminatedError, sigterm_raises
from .report import Exchange, Progress, Step
from .router import RouterSpec
from .stack import Engine, PDStack, Router, Server

_WATCH_S = 0.5
_DEFAULT_LAYOUTS = {"prefill": "tp1pp2", "decode": "tp1pp1"}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.pdstack",
        description="Serve a model with prefill and decode engines behind vLLM's router.",
        epilog="Exit status: 0 all is well, 1 something failed, 2 asked for what cannot work, "
        "130 after Ctrl-C, 143 after SIGTERM. `serve` ends with 0 after Ctrl-C.",
    )
    common = argparse.ArgumentParser(add_help=False)
    for role, layout in _DEFAULT_LAYOUTS.items():
        common.add_argument(
            f"--{role}",
            action="append",
            metavar="LAYOUT",
            help=f"layout of a {role} engine, for example tp3pp1; repeat it for several engines "
            f"(default: one of {layout})",
        )
    common.add_argument(
        "--model", type=Path, metavar="DIR", help="a model directory (default: SmolLM2-135M)"
    )
    common.add_argument(
        "--engine-args",
        default="",
        metavar="ARGS",
        help="appended to every `vllm serve`, in one string: --engine-args='--block-size 64'",
    )
    common.add_argument(
        "--early",
        action="store_true",
        help="with early_dispatch on the engines: the router sends each request but the first to "
        "both at once; demo does both, one after the other",
    )
    add_options(common, startup_timeout_s=600.0)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "demo", parents=[common], help="compare the answers with those of a single engine"
    )
    serve = commands.add_parser("serve", parents=[common], help="stay up until Ctrl-C")
    serve.add_argument("--port", type=int, help="port of the router (default: a free one)")
    sweep_cli.add_commands(commands)
    roll_cli.add_command(commands)
    handover_cli.add_command(commands)
    return parser


class _Run:
    """One invocation: its arguments, understood, and its output."""

    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self.args = args
        self.console = console
        self.prefill, self.decode = (
            [parse_layout(text) for text in given or [_DEFAULT_LAYOUTS[role]]]
            for role, given in (("prefill", args.prefill), ("decode", args.decode))
        )
        self.layouts = demo.describe_layouts(self.prefill, self.decode)
        self.engine_args: list[str] = shlex.split(args.engine_args)
        check_options(args)
        # What can be refused is refused before anything is started.
        self._given = None if args.model is None else given_model(args.model)
        if self._given is None:
            default_model_path(cache_dir())
        else:
            self._check_layouts(self._given)

    def _check_layouts(self, model: ServedModel) -> None:
        shape = read_model_shape(model.directory)
        for layout in {*self.prefill, *self.decode}:
            check_layout(layout, shape)

    def prepare_model(self, run_dir: Path) -> ServedModel:
        if self._given is not None:
            return self._given
        with Progress(self.console) as progress:

            def on_wait(child: ChildProcess) -> None:
                waited_s = time.monotonic() - child.started_at
                progress.update([Step("model", "converting SmolLM2 (once)", waited_s)])

            model = prepare_default_model(cache_dir(), run_dir, on_wait)
        self._check_layouts(model)
        return model

    def start_pair(self, stack: PDStack, *, early: bool = False) -> tuple[Router, list[Engine]]:
        """Start prefill engines, decode engines and the router; return what is talked to."""
        prefix, options = ("early-", {"early_dispatch": True}) if early else ("", {})
        prefill, decode = (
            demo.engine_specs(role, layouts, self.engine_args, prefix=prefix, options=options)
            for role, layouts in (("prefill", self.prefill), ("decode", self.decode))
        )
        engines = stack.start_engines(*prefill, *decode)
        self.say_ready(engines)
        spec = RouterSpec(f"{prefix}router", port=getattr(self.args, "port", None))
        router = stack.start_router(engines[: len(prefill)], engines[len(prefill) :], spec)
        self.say_ready([router])
        return router, engines[len(prefill) :]

    def say(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)

    def say_ready(self, servers: Sequence[Server]) -> None:
        for server in servers:
            self.say(f"{server.name} is ready at {server.url} after {server.waited_s:.0f} s")


def _demo(run: _Run, stack: PDStack) -> int:
    references = demo.reference_answers(stack, demo.DEMO_PROMPTS, run.engine_args)
    run.say("single has answered and is stopped again")

    def answers(layouts: str, *, early: bool = False) -> tuple[list[Exchange], int]:
        router, decode = run.start_pair(stack, early=early)
        if run.args.early:
            demo.ask_first(stack, router, len(run.prefill))
        prompts = demo.DEMO_PROMPTS
        compared = demo.compare(stack, router, decode, prompts, references, run.console, layouts)
        return compared, demo.moved(decode).prefill_waits

    exchanges, _ = answers(run.layouts)
    early: list[Exchange] = []
    num_waits = 0
    if run.args.early:
        # A small machine holds one pair of engines.
        stack.stop_all()
        run.say("the engines are stopped, and started again with early_dispatch")
        early, num_waits = answers(f"{run.layouts}, early", early=True)
    run.console.print(report.summary_table(exchanges, run.layouts, early))
    errors = []
    if not all(each.equal for each in (*exchanges, *early)):
        errors.append("answers differ from those of the single engine.")
    if not all(each.bytes_moved > 0 for each in (*exchanges, *early)):
        errors.append("the KV cache of a prompt did not come over NIXL.")
    if early and not num_waits:
        errors.append("no request was at a decode engine before its prompt was computed.")
    for error in errors:
        run.say(f"error: {error}")
    if not errors:
        run.say("All answers are equal, and their KV cache came over NIXL.")
    return 1 if errors else 0


def _serve(run: _Run, stack: PDStack) -> int:
    router, _ = run.start_pair(stack, early=run.args.early)
    name = stack.model.name
    run.say(f"\nServing {name} ({run.layouts}) at {router.url}/v1\n\nWith curl:\n")
    run.say(report.curl_hint(router.url, name))
    run.say("\nWith the OpenAI client:\n")
    run.say(report.python_hint(router.url, name))
    run.say(f"\nLogs are in {stack.run_dir}\nCtrl-C stops everything.")
    try:
        while True:
            stack.check()
            time.sleep(_WATCH_S)
    except KeyboardInterrupt:
        run.say("stopping")
        return 0


def _execute(run: _Run) -> int:
    started = time.monotonic()

    def command(run_dir: Path, progress: StackProgress) -> bool:
        model = run.prepare_model(run_dir)
        run.say(f"Model {model.name} in {model.directory}")
        run.say(f"Layout {run.layouts}, logs in {run_dir}")
        with PDStack(
            model,
            run_dir,
            startup_timeout_s=run.args.startup_timeout,
            on_wait=progress,
        ) as stack:
            status = _serve(run, stack) if run.args.command == "serve" else _demo(run, stack)
        return status == 0

    status = invoke(run.args, run.console, command)
    if status == 0:
        run.say(f"Everything is stopped; it took {time.monotonic() - started:.0f} s.")
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    args = build_parser().parse_args(argv)
    with sigterm_raises():
        try:
            if args.command in ("sweep", "accuracy"):
                return sweep_cli.execute(args, Console())
            if args.command == "roll":
                return roll_cli.execute(args, Console())
            if args.command == "handover":
                return handover_cli.execute(args, Console())
            return _execute(_Run(args, Console()))
        except UsageError as error:
            report.print_error(Console(stderr=True), error, None)
            return error.exit_status
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        except TerminatedError:
            # A second one, as from `timeout`, while the first was being told of.
            return 128 + signal.SIGTERM


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Command line: ``sweep`` and ``accuracy``."""

from __future__ import annotations

import argparse
import shlex
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import httpx
from rich.console import Console
from rich.text import Text

from . import report, sweep
from .engine import ServedModel
from .errors import PDStackError, UsageError
from .layout import check_layout, parse_layout, read_model_shape
from .model import cache_dir, default_model_path, given_model, prepare_default_model
from .process import TerminatedError
from .stack import Server, run_directory

_TABLE_COLUMNS = 160


class StartupProgress(Protocol):
    """What shows the start-up of servers."""

    def __call__(self, servers: Sequence[Server]) -> None:
        """Show where each stands."""

    def close(self) -> None:
        """Show nothing any more."""


def execute(args: argparse.Namespace, console: Console, progress: StartupProgress) -> int:
    """Run what was asked for, and return the exit status.

    Raises:
        UsageError: what was asked for cannot work.
    """
    models: Mapping[str, Callable[[Path], ServedModel]] = sweep.MODELS
    if args.command == "accuracy":
        families, models = _one_pair(args)
    else:
        families = sweep.choose(args.only)
        if args.list:
            for family in families:
                console.print(Text(f"{family.name}: {family.prefill} -> {family.decode}"))
            return 0
    if args.log_dir is not None and not args.log_dir.is_dir():
        raise UsageError(f"--log-dir {args.log_dir} is not a directory")
    started, run_dir = time.monotonic(), None
    try:
        with run_directory(args.keep_logs, args.log_dir) as run_dir:
            runner = sweep.Sweep(
                run_dir,
                num_requests=args.requests,
                startup_timeout_s=args.startup_timeout,
                on_wait=progress,
                say=lambda text: console.print(Text(text), soft_wrap=True),
                models=models,
            )
            results = runner.run(families)
            _print_results(console, results, time.monotonic() - started)
            if any(result.fault for result in results):
                raise _FailedError
        return 0
    except _FailedError:
        console.print(Text(f"Logs are kept in {run_dir}"), soft_wrap=True)
        return 1
    except (PDStackError, httpx.HTTPError) as error:
        progress.close()
        if not isinstance(error, PDStackError):
            error = PDStackError(f"a server did not answer: {error}")
        report.print_error(Console(stderr=True), error, run_dir)
        return error.exit_status
    except (KeyboardInterrupt, TerminatedError) as interruption:
        progress.close()
        by_user = isinstance(interruption, KeyboardInterrupt)
        by = "Ctrl-C" if by_user else str(interruption)
        console.print(Text(f"interrupted by {by}; everything is stopped"), soft_wrap=True)
        return 128 + (signal.SIGINT if by_user else signal.SIGTERM)


class _FailedError(Exception):
    """A family has not passed: the logs have to stay."""


def _print_results(console: Console, results: Sequence[sweep.Result], took_s: float) -> None:
    # Not cut off where the output goes to a file.
    wide = console if console.is_terminal else Console(width=_TABLE_COLUMNS)
    wide.print(sweep.result_table(results))
    failed = [result for result in results if result.fault]
    for result in failed:
        console.print(Text(f"{result.family.name}: {result.fault}"), soft_wrap=True)
    passed = f"{len(results) - len(failed)} of {len(results)} passed in {took_s:.0f} s"
    console.print(Text(passed), soft_wrap=True)


def _one_pair(
    args: argparse.Namespace,
) -> tuple[list[sweep.Family], Mapping[str, Callable[[Path], ServedModel]]]:
    """The one family that arguments describe, and its model."""
    sides = []
    for role in ("prefill", "decode"):
        layout = parse_layout(getattr(args, role))
        more = tuple(shlex.split(getattr(args, f"{role}_args")))
        sides.append(sweep.Side(layout, getattr(args, f"num_{role}"), more))
    if args.model is None:
        default_model_path(cache_dir())
        make: Callable[[Path], ServedModel] = partial(prepare_default_model, cache_dir())
        name = "SmolLM2-135M"
    else:
        given = given_model(args.model)
        shape = read_model_shape(given.directory)
        for side in sides:
            check_layout(side.layout, shape)
        make, name = (lambda _: given), given.name

    def made(directory: Path) -> ServedModel:
        directory.mkdir(parents=True, exist_ok=True)
        return make(directory)

    prefill, decode = sides
    return [sweep.Family("accuracy", name, prefill, decode)], {name: made}

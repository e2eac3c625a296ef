# SPDX-License-Identifier: Apache-2.0
"""What all commands have in common: logs, start-up shown as it goes, and how they end."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
from rich.console import Console
from rich.text import Text

from . import report
from .errors import PDStackError, UsageError
from .process import TerminatedError
from .report import Progress, Step
from .stack import Server, run_directory


def add_options(parser: argparse.ArgumentParser, startup_timeout_s: float) -> None:
    """Add the options of every command.

    Args:
        startup_timeout_s: how long a server may take by default.
    """
    parser.add_argument(
        "--startup-timeout",
        type=_positive,
        default=startup_timeout_s,
        metavar="SECONDS",
        help="how long a server may take to become ready (default: %(default).0f)",
    )
    parser.add_argument(
        "--log-dir", type=Path, metavar="DIR", help="make the directory of the logs in here"
    )
    parser.add_argument("--keep-logs", action="store_true", help="keep them also after success")


def check_options(args: argparse.Namespace) -> None:
    """Refuse what cannot work before anything is started.

    Raises:
        UsageError: there is no such directory.
    """
    if args.log_dir is not None and not args.log_dir.is_dir():
        raise UsageError(f"--log-dir {args.log_dir} is not a directory")


class StackProgress:
    """Feeds the start-up of servers to a progress line that exists only while they start."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None

    def __call__(self, servers: Sequence[Server]) -> None:
        """Show where each stands."""
        if all(server.ready_after_s is not None for server in servers):
            self.close()
            return
        if self._progress is None:
            self._progress = Progress(self._console).__enter__()
        self._progress.update([Step(each.name, each.phase, each.waited_s) for each in servers])

    def close(self) -> None:
        """Show nothing any more."""
        if self._progress is not None:
            self._progress.__exit__()
            self._progress = None


class _FailedError(Exception):
    """A command came to its end with a bad result: the logs have to stay."""


def invoke(
    args: argparse.Namespace, console: Console, command: Callable[[Path, StackProgress], bool]
) -> int:
    """Run a command in a directory for its logs, and return the exit status.

    Args:
        command: given the directory and what shows start-ups; returns whether all is well.
    """
    run_dir: Path | None = None
    progress = StackProgress(console)

    def say(text: str) -> None:
        console.print(Text(text), soft_wrap=True)

    try:
        with run_directory(args.keep_logs, args.log_dir) as run_dir:
            if not command(run_dir, progress):
                raise _FailedError
        return 0
    except _FailedError:
        say(f"Logs are kept in {run_dir}")
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
        say(f"interrupted by {by}; everything is stopped. Logs are kept in {run_dir}")
        number = signal.SIGINT if by_user else signal.SIGTERM
        return 128 + number


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value

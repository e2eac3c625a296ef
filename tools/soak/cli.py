# SPDX-License-Identifier: Apache-2.0
"""Command line of ``make soak``."""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from tools.pdstack.errors import UsageError
from tools.pdstack.invocation import StackProgress, add_options, check_options, invoke
from tools.pdstack.process import TerminatedError, sigterm_raises
from tools.pdstack.report import print_error, wide

from . import excerpts, plot, report
from .faults import DESCRIPTIONS, FaultKind, names_of, parse_kinds
from .fleet import FleetSettings
from .runner import Soak, SoakSettings

_OUTPUT = Path("build/soak")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    kinds = "\n".join(f"  {kind.value:24} {what}" for kind, what in DESCRIPTIONS.items())
    parser = argparse.ArgumentParser(
        prog="python -m tools.soak",
        description="Put prefill and decode engines under load, let things go wrong, and check "
        "that answers are right, requests end, and everything comes back.",
        epilog=f"faults:\n{kinds}\n\nExit status: 0 nothing was violated, 1 something was, 2 asked "
        "for what cannot work, 130 after Ctrl-C.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    defaults = SoakSettings(seed=0)
    parser.add_argument(
        "--seconds",
        type=float,
        default=defaults.duration_s,
        metavar="SECONDS",
        help="no fault begins later than this after the first round (default: %(default)g)",
    )
    parser.add_argument("--seed", type=int, help="repeats a soak (default: another one each time)")
    parser.add_argument(
        "--faults",
        metavar="NAMES",
        help="only these, with commas between them; beginnings will do, as in kill,stop-prefill",
    )
    parser.add_argument(
        "--clients", type=int, default=defaults.num_clients, help="of the load (%(default)d)"
    )
    parser.add_argument(
        "--deadline",
        type=float,
        default=defaults.deadline_s,
        metavar="SECONDS",
        help="how long a request may take while nothing is stopped (default: %(default)g)",
    )
    parser.add_argument(
        "--ucx-tls",
        metavar="TRANSPORTS",
        help="of the engines (default: $UCX_TLS, else tcp,self: shared memory hides faults)",
    )
    parser.add_argument(
        "--keep-going", action="store_true", help="go on after a violation, to see more of them"
    )
    parser.add_argument(
        "--output", type=Path, default=_OUTPUT, metavar="DIR", help="default: %(default)s"
    )
    add_options(parser, startup_timeout_s=defaults.startup_timeout_s)
    return parser


def settings_of(args: argparse.Namespace, environment_tls: str | None) -> SoakSettings:
    """Return what is asked for.

    Args:
        environment_tls: the value of UCX_TLS, if it has one.

    Raises:
        UsageError: it cannot be.
    """
    for name in ("seconds", "clients", "deadline"):
        if not getattr(args, name) > 0:
            raise UsageError(f"--{name} {getattr(args, name)} is not positive")
    fleet = FleetSettings()
    return SoakSettings(
        seed=random.SystemRandom().randrange(1 << 32) if args.seed is None else args.seed,
        duration_s=args.seconds,
        kinds=tuple(FaultKind) if args.faults is None else parse_kinds(args.faults),
        num_clients=args.clients,
        deadline_s=args.deadline,
        keep_going=args.keep_going,
        startup_timeout_s=args.startup_timeout,
        fleet=FleetSettings(ucx_tls=args.ucx_tls or environment_tls or fleet.ucx_tls),
    )


def command_of(settings: SoakSettings) -> str:
    """Return the command that repeats a soak, with what is not as by default."""
    defaults = SoakSettings(seed=settings.seed)
    arguments = []
    if settings.kinds != defaults.kinds:
        arguments += ["--faults", names_of(settings.kinds)]
    if settings.num_clients != defaults.num_clients:
        arguments += ["--clients", str(settings.num_clients)]
    if settings.deadline_s != defaults.deadline_s:
        arguments += ["--deadline", f"{settings.deadline_s:g}"]
    if settings.fleet.ucx_tls != defaults.fleet.ucx_tls:
        arguments += ["--ucx-tls", settings.fleet.ucx_tls]
    if settings.keep_going:
        arguments += ["--keep-going"]
    return report.repeat_command(settings.seed, settings.duration_s, arguments)


class _Invocation:
    """One soak of a command line, and what is shown of it."""

    def __init__(self, settings: SoakSettings, output: Path, console: Console) -> None:
        self._settings = settings
        self._output = output
        self._console = console
        self._command = command_of(settings)

    def say(self, text: str) -> None:
        """Print a line as it is."""
        self._console.print(Text(text), soft_wrap=True)

    def run(self, run_dir: Path, progress: StackProgress) -> bool:
        """Run the soak; returns whether everything held."""
        self.say(f"seed {self._settings.seed}; to repeat it: {self._command}")
        self.say(f"faults: {names_of(self._settings.kinds)}; logs in {run_dir}")
        soak = Soak(self._settings, run_dir, on_wait=progress, say=self.say)
        try:
            soak.run()
        finally:
            # Also of a soak that was broken off, as far as it came.
            progress.close()
            self._show(soak, run_dir)
        return not soak.violations

    def _show(self, soak: Soak, run_dir: Path) -> None:
        history, violations = soak.recorder.history, soak.violations
        self._output.mkdir(parents=True, exist_ok=True)
        path = self._output / "soak.json"
        settings: dict[str, Any] = asdict(self._settings)
        report.write_json(
            path,
            settings=settings,
            command=self._command,
            began_at=soak.recorder.began_at,
            history=history,
            violations=violations,
        )
        wide(self._console).print(report.table(report.outcomes(history, violations)))
        wide(self._console).print(report.work_table(history))
        if plot.can_draw():
            plot.draw(history, violations, self._output / "soak.svg")
            self.say(f"{path} has all that was seen, {self._output / 'soak.svg'} draws it")
        else:
            self.say(f"{path} has all that was seen; to have it drawn, install matplotlib")
        if violations:
            first = violations[0]
            self.say(f"\nerror: not so: {first.invariant}")
            self.say(f"  {first.at_s:.0f} s, round {first.round}, {first.subject}: {first.what}")
            logs = sorted(run_dir.glob("*.log"))
            said = excerpts.around_all(logs, soak.recorder.began_at + first.at_s)
            for name, lines in said.items():
                self.say(f"\n{name} says around then:")
                for line in lines:
                    self.say(f"  {line}")
            self.say(f"\n{len(violations)} in all. To repeat: {self._command}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    args = build_parser().parse_args(argv)
    with sigterm_raises():
        try:
            check_options(args)
            settings = settings_of(args, os.environ.get("UCX_TLS"))
            console = Console()
            invocation = _Invocation(settings, args.output, console)
            return invoke(args, console, invocation.run)
        except UsageError as error:
            print_error(Console(stderr=True), error, None)
            return error.exit_status
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        except TerminatedError:
            # A second one, as from `timeout`, while the first was being told of.
            return 128 + signal.SIGTERM


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""A child process with a log, in a process group of its own, that leaves nothing behind.

The group, which the keeper makes, keeps a terminal's Ctrl-C from the child. Not a session, which
would do so, too: Linux gives each session an equal share of every core ("autogroup"), and 6.18 was
seen to starve one engine's session for minutes while another's was polling on the same core.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil

from . import logs
from .errors import ProcessDiedError

_KEEPER = Path(__file__).with_name("keeper.py")
GRACE_S = 20.0
"""How long a server may take to shut down before it is killed. vLLM takes 10 s at most."""
_KEEPER_MARGIN_S = 6.0


class ChildProcess:
    """One server (or converter) of the stack, run under :mod:`keeper`.

    Args:
        name: what the user calls it; also the name of its log.
        command: program and arguments.
        env: its whole environment.
        run_dir: where its log goes; also its working directory.
        grace_s: how long it may take to end after SIGTERM.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        run_dir: Path,
        grace_s: float = GRACE_S,
    ) -> None:
        self.name = name
        self.command = list(command)
        self.log_path = run_dir / f"{name}.log"
        self.started_at = time.monotonic()
        self._grace_s = grace_s
        self._stop_requested = False
        with self.log_path.open("wb") as log:
            self._keeper = subprocess.Popen(
                # -I: the directory of the script must not shadow modules of the same name.
                [sys.executable, "-I", str(_KEEPER), str(grace_s), *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=run_dir,
                env=dict(env),
            )

    @property
    def pid(self) -> int:
        """Process id of the keeper: leader of the process group that all of this belongs to."""
        return self._keeper.pid

    @property
    def exit_status(self) -> int | None:
        """Exit status of the command, ``None`` while it (or something it left) runs."""
        return self._keeper.poll()

    def processes(self) -> list[psutil.Process]:
        """Return every living process of this child but the keeper."""
        try:
            keeper = psutil.Process(self.pid)
            found = {process.pid: process for process in keeper.children(recursive=True)}
        except psutil.NoSuchProcess:
            found = {}
        # Without the keeper the tree is lost, but the group is not.
        for process in psutil.process_iter():
            if process.pid != self.pid and _group_of(process.pid) == self.pid:
                found.setdefault(process.pid, process)
        return list(found.values())

    def check(self) -> None:
        """Do nothing while the child lives.

        Raises:
            ProcessDiedError: it ended without being asked to.
        """
        status = self.exit_status
        if status is None or self._stop_requested:
            return
        raise ProcessDiedError(
            self.name, describe_exit(status), logs.find_cause(self.log_path), self.log_tail()
        )

    def log_tail(self, lines: int = 30) -> list[str]:
        """Return the last lines of the log."""
        return logs.tail(self.log_path, lines)

    def request_stop(self) -> None:
        """Ask for the end of the child and all its descendants; returns at once."""
        self._stop_requested = True
        if self._keeper.stdin is not None and not self._keeper.stdin.closed:
            with suppress(OSError):
                self._keeper.stdin.close()

    def kill(self) -> None:
        """End what does not react any more, and all its descendants, without a word before."""
        self._stop_requested = True
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.stop()

    def stop(self) -> None:
        """End the child and all its descendants, and wait until they are gone."""
        self.request_stop()
        try:
            self._keeper.wait(self._grace_s + _KEEPER_MARGIN_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        # Empty unless the keeper was killed.
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:
        return None


def describe_exit(status: int) -> str:
    """Say in words how a process ended, from a shell-like exit status (128 + signal)."""
    number = -status if status < 0 else status - 128
    if number > 0:
        try:
            return f"was ended by {signal.Signals(number).name}"
        except ValueError:
            pass
    return f"ended with exit status {status}"


def stop_all(children: Iterable[ChildProcess]) -> None:
    """Stop several children at the same time."""
    stopping = list(children)
    for child in stopping:
        child.request_stop()
    for child in stopping:
        child.stop()


class TerminatedError(BaseException):
    """SIGTERM arrived: like :class:`KeyboardInterrupt`, no ordinary error."""


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Within this block SIGTERM and SIGHUP raise :class:`TerminatedError` in the main thread."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise TerminatedError(signal.Signals(number).name)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Within this block SIGINT, SIGTERM and SIGHUP are ignored: the clean-up is bounded anyway."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    try:
        previous = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    except ValueError:  # not in the main thread, which gets all signals
        yield
        return
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

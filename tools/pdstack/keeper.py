# SPDX-License-Identifier: Apache-2.0
"""Run one command and let nothing of it outlive whoever started it.

    python -I keeper.py GRACE_SECONDS COMMAND [ARGUMENT ...]

The launcher holds the other end of this process's standard input. The command and all its
descendants are ended as soon as that pipe closes: the launcher closes it to stop the command,
and the kernel closes it when the launcher dies, however that happens. The same is done when the
command itself ends, because an engine that crashes can leave workers behind.

As a "child subreaper" this process inherits every descendant that loses its parent, so none can
escape by forking twice or by leaving the session. It is a script that needs nothing but psutil:
it is started once for each process of the stack and must start fast.

The exit status is the command's, 128 + N when signal N ended it.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TERMINATE_S = 2.0
"""How long descendants that the command left behind may take after a SIGTERM."""
_TICK_S = 0.1


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _die_with_keeper() -> None:
    """In the child, before exec: the last resort, should the keeper itself be killed."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Keeper:
    """The command, its descendants, and the pipe that says whether they are still wanted."""

    def __init__(self, command: Sequence[str], grace_s: float) -> None:
        self._grace_s = grace_s
        self._child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_keeper
        )
        self._wait_status: int | None = None

    def run(self) -> int:
        """Wait for the command's end or for the pipe's, clean up, return the exit status."""
        while self._wait_status is None and self._wanted():
            self._reap()
        if self._wait_status is None:
            self._signal([psutil.Process(self._child.pid)], signal.SIGTERM)
            self._wait(self._grace_s, lambda: self._wait_status is not None)
        # The command is gone or had its chance. Now whatever it left.
        if self._descendants():
            self._signal(self._descendants(), signal.SIGTERM)
            self._wait(_TERMINATE_S, lambda: not self._descendants())
        while remaining := self._descendants():
            self._signal(remaining, signal.SIGKILL)
            self._wait(1.0, lambda: not self._descendants())
        self._reap()
        if self._wait_status is None:
            return 128 + signal.SIGKILL
        code = os.waitstatus_to_exitcode(self._wait_status)
        return code if code >= 0 else 128 - code

    def _wanted(self) -> bool:
        readable, _, _ = select.select([sys.stdin.fileno()], [], [], _TICK_S)
        return not readable or os.read(sys.stdin.fileno(), 4096) != b""

    def _reap(self) -> None:
        """Collect everything that ended, adopted processes included."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._child.pid:
                self._wait_status = status
                self._child.returncode = os.waitstatus_to_exitcode(status)

    def _wait(self, limit_s: float, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + limit_s
        while not done() and time.monotonic() < deadline:
            time.sleep(_TICK_S)
            self._reap()

    @staticmethod
    def _descendants() -> list[psutil.Process]:
        return [
            process
            for process in psutil.Process().children(recursive=True)
            if _status(process) != psutil.STATUS_ZOMBIE
        ]

    @staticmethod
    def _signal(processes: Sequence[psutil.Process], number: int) -> None:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def _status(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return str(psutil.STATUS_ZOMBIE)


def main() -> int:
    """Keep the command named on the command line."""
    # Ctrl-C in the launcher's terminal is the launcher's to act on.
    os.setpgid(0, 0)
    # Only the pipe ends this process: a signal to its group must not cut the clean-up short.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    grace_s, command = float(sys.argv[1]), sys.argv[2:]
    try:
        keeper = Keeper(command, grace_s)
    except OSError as error:
        print(f"cannot run {command[0]}: {error}", file=sys.stderr)
        return 127
    return keeper.run()


if __name__ == "__main__":
    sys.exit(main())

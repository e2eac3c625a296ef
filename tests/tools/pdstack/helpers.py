# SPDX-License-Identifier: Apache-2.0
"""Wait for conditions, fake servers, and find processes that should be gone."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

DEADLINE_S = 120.0
# A command line that starts engines on a machine under load.
READY_S = 600.0


def wait_until(condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Wait for a condition, or fail with the name of what did not happen."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {deadline_s:.0f} s"
        time.sleep(0.05)


def write_fakes(directory: Path, server: Path) -> Path:
    """Write a ``vllm`` and a ``vllm-router`` that run a fake server; return their directory."""
    directory.mkdir()
    for name in ("vllm", "vllm-router"):
        script = directory / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{server}" "$@"\n')
        script.chmod(0o755)
    return directory


def living_in(directory: Path) -> list[psutil.Process]:
    """Return the processes whose working directory is in ``directory``; zombies do not count."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if Path(process.cwd()).is_relative_to(directory):
                found.append(process)
        except psutil.Error:
            continue
    return found


def words_of(process: psutil.Process) -> list[str]:
    """Return the command line of a process; an empty one where it has just ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def server_on(port: str, processes: list[psutil.Process]) -> psutil.Process:
    """Return the server that listens on a port, by its command line; its keeper does not count."""
    for process in processes:
        words = words_of(process)
        is_keeper = any(word.endswith("keeper.py") for word in words)
        if ("--port", port) in itertools.pairwise(words) and not is_keeper:
            return process
    raise AssertionError(f"no server has --port {port} in its command line")


def read_until(process: subprocess.Popen[str], start_of_line: str) -> str:
    """Return what a command line has printed up to a line that starts with the given words.

    One that does not print it in time is killed.
    """
    assert process.stdout is not None
    shown = []
    deadline = threading.Timer(READY_S, process.kill)
    deadline.start()
    try:
        for line in process.stdout:
            shown.append(line)
            if line.startswith(start_of_line):
                return "".join(shown)
    finally:
        deadline.cancel()
    raise AssertionError(f"{start_of_line!r} was never printed, but:\n{''.join(shown)}")


def ready_port(name: str, shown: str) -> str:
    """Return the port at which the launcher said a server is ready."""
    match = re.search(rf"^{name} is ready at http://127\.0\.0\.1:(\d+)", shown, re.MULTILINE)
    assert match is not None, shown
    return match[1]

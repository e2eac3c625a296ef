# SPDX-License-Identifier: Apache-2.0
"""The command line with real engines: a death is reported, and nothing is ever left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.tools.pdstack.helpers import read_until, ready_port, server_on, wait_until
from tools.pdstack.engine import ServedModel

pytestmark = pytest.mark.e2e

Survivors = Callable[[], list[psutil.Process]]
ROOT = Path(__file__).parents[2]
STARTUP_S = 600.0
END_S = 60.0


def _start(command: str, model: ServedModel, log_dir: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "tools.pdstack", command),
            *("--model", str(model.directory), "--log-dir", str(log_dir)),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _engine_cores(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [each for each in processes if any("EngineCore" in word for word in each.cmdline())]


def test_a_killed_engine_is_reported(
    model: ServedModel, tmp_path: Path, survivors: Survivors
) -> None:
    """When the core of the decode engine is killed, `serve` says so, shows its log and ends."""
    process = _start("serve", model, tmp_path)
    shown = read_until(process, "Ctrl-C")
    api_server = server_on(ready_port("decode", shown), survivors())
    (core,) = _engine_cores(api_server.children(recursive=True))
    core.kill()
    _, err = process.communicate(timeout=END_S)
    assert process.returncode == 1
    first, second, *rest = err.splitlines()
    assert first.startswith("error: decode ")
    assert second.endswith("lines of decode's log:")
    assert any("EngineCore" in line for line in rest)
    assert survivors() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_end_during_start_up_leaves_nothing(
    model: ServedModel, tmp_path: Path, survivors: Survivors, number: signal.Signals
) -> None:
    """Ctrl-C, and even SIGKILL, of the launcher ends engines that are just starting."""
    process = _start("demo", model, tmp_path)
    wait_until(lambda: _engine_cores(survivors()), "the start of an engine core", STARTUP_S)
    process.send_signal(number)
    process.communicate(timeout=END_S)
    assert process.returncode == (130 if number is signal.SIGINT else -number)
    wait_until(lambda: survivors() == [], "the end of all processes", END_S)

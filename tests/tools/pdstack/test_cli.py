# SPDX-License-Identifier: Apache-2.0
"""The command line as a user runs it: a real process, with fakes in the place of the servers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.tools.pdstack.helpers import read_until, ready_port, server_on
from tools.pdstack import cli
from tools.pdstack.engine import ServedModel
from tools.pdstack.process import TerminatedError

Wait = Callable[[Callable[[], object], str], None]
Survivors = Callable[[], list[psutil.Process]]
Start = Callable[..., "subprocess.Popen[str]"]

MAIN = """
import sys
from tools.pdstack import cli, stack
from tools.pdstack.engine import Device
scripts = sys.argv.pop(1)
stack.find_script = lambda name, directory=None: f"{scripts}/{name}"
stack.installed_device = lambda: Device.CPU
sys.exit(cli.main())
"""


@pytest.fixture
def start(fake_bin: Path, model: ServedModel, run_dir: Path) -> Start:
    """Return a function that starts the command line on the fake model."""

    def start(*args: str, **env: str) -> subprocess.Popen[str]:
        common = ["--model", str(model.directory), "--log-dir", str(run_dir)]
        return subprocess.Popen(
            [sys.executable, "-c", MAIN, str(fake_bin), *args, *common],
            env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def _logged(run_dir: Path, words: str) -> bool:
    return any(words in log.read_text() for log in run_dir.glob("*/*.log"))


def _finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def test_equal_answers_and_moved_bytes_are_success(
    start: Start, survivors: Survivors, run_dir: Path
) -> None:
    """A good demo ends with 0, a table, no process and no logs."""
    status, out, err = _finish(start("demo"))
    assert (status, err) == (0, "")
    assert out.count("all is well") == 6
    assert "tp1pp2 -> tp1pp1" in out
    assert "1.00 KiB" in out
    assert "3.00 KiB" in out
    assert "All answers are equal" in out
    assert survivors() == []
    assert list(run_dir.iterdir()) == []


def test_early_demo_shows_both_ways_side_by_side(start: Start, survivors: Survivors) -> None:
    """The same prompts again, by engines that have the option on, in a column of their own."""
    status, out, err = _finish(start("demo", "--early"))
    assert (status, err) == (0, "")
    assert out.count("all is well") == 12
    for words in ("P/D    early   single", "6.00 KiB", "early-decode is ready", "All answers"):
        assert words in out
    assert survivors() == []


def test_early_demo_whose_requests_come_late_fails(start: Start) -> None:
    """Then nothing was shown."""
    status, out, _ = _finish(start("demo", "--early", FAKE_ENGINE="serial"))
    assert status == 1
    assert "error: no request was at a decode engine before its prompt was computed" in out


@pytest.mark.parametrize(
    ("behaviour", "complaint"),
    [
        ({"FAKE_ROUTER": "lie"}, "error: answers differ"),
        ({"FAKE_ROUTER": "lazy"}, "error: the KV cache of a prompt did not come over NIXL"),
    ],
)
def test_a_bad_result_is_failure(
    start: Start, run_dir: Path, behaviour: dict[str, str], complaint: str
) -> None:
    """Other answers, or bytes that did not move, end with 1, and the logs stay."""
    status, out, _ = _finish(start("demo", **behaviour))
    assert status == 1
    assert complaint in out
    (logs,) = run_dir.iterdir()
    assert f"Logs are kept in {logs}" in out.replace("\n", "")
    assert {each.name for each in logs.iterdir()} == {
        "single.log",
        "prefill.log",
        "decode.log",
        "router.log",
    }


@pytest.mark.parametrize("kind", ["SINGLE", "ENGINE", "ROUTER"])
def test_a_server_that_cannot_start_is_shown(start: Start, survivors: Survivors, kind: str) -> None:
    """The cause comes first, then the end of the log, and nothing is left."""
    status, _, err = _finish(start("demo", **{f"FAKE_{kind}": "crash"}))
    assert status == 1
    first, *rest = err.splitlines()
    assert first.endswith("ended with exit status 1: ValueError: the fake server was told to fail")
    assert any(line.startswith("  | RuntimeError: See root cause") for line in rest)
    assert survivors() == []


@pytest.mark.parametrize("kind", ["SINGLE", "ROUTER"])
def test_a_death_during_an_answer_is_shown(start: Start, survivors: Survivors, kind: str) -> None:
    """A server that dies while it answers is named, with the reason that it logged."""
    status, _, err = _finish(start("demo", **{f"FAKE_{kind}": "die"}))
    assert status == 1
    assert f"{kind.lower()} ended with exit status 3: MemoryError: the fake server had" in err
    assert survivors() == []


def test_the_death_of_another_server_ends_a_hanging_answer(
    start: Start, survivors: Survivors, run_dir: Path, wait: Wait
) -> None:
    """An engine killed while the router hangs ends the demo at once, and is the one named."""
    process = start("demo", FAKE_ROUTER="hang")
    shown = read_until(process, "router is ready")
    wait(lambda: _logged(run_dir, "hanging now"), "the hang")
    server_on(ready_port("decode", shown), survivors()).kill()
    status, _, err = _finish(process)
    assert status == 1
    assert err.startswith("error: decode was ended by SIGKILL")
    assert survivors() == []


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)]
)
@pytest.mark.parametrize("moment", ["start", "answer"])
def test_an_interruption_leaves_nothing(
    start: Start,
    survivors: Survivors,
    run_dir: Path,
    wait: Wait,
    number: signal.Signals,
    status: int,
    moment: str,
) -> None:
    """Ctrl-C and SIGTERM, while servers start and while they answer, end everything."""
    word = "slow stubborn" if moment == "start" else "hang stubborn"
    kind = "SINGLE" if moment == "start" else "ROUTER"
    mark = "grandchild is up" if moment == "start" else "hanging now"
    process = start("demo", **{f"FAKE_{kind}": word})
    wait(lambda: _logged(run_dir, mark), mark)
    process.send_signal(number)
    got, out, _ = _finish(process)
    assert got == status
    name = "Ctrl-C" if number is signal.SIGINT else number.name
    assert f"interrupted by {name}; everything is stopped" in out
    assert survivors() == []


def test_a_killed_launcher_leaves_nothing(
    start: Start, survivors: Survivors, run_dir: Path, wait: Wait
) -> None:
    """SIGKILL of the launcher ends all servers, deaf grandchildren included."""
    process = start("demo", FAKE_ROUTER="hang", FAKE_ENGINE="stubborn")
    wait(lambda: _logged(run_dir, "hanging now"), "the hang")
    process.kill()
    process.communicate()
    wait(lambda: survivors() == [], "the end of all processes")


def test_serve_stays_until_ctrl_c(start: Start, survivors: Survivors) -> None:
    """The stack answers as the hints say, and Ctrl-C is a good end."""
    process = start("serve")
    shown = read_until(process, "Ctrl-C")
    curl = shown.split("With curl:\n")[1].split("With the OpenAI client:")[0]
    reply = subprocess.run(["/bin/sh", "-c", curl], capture_output=True, text=True, timeout=60)
    assert "well" in reply.stdout, reply.stderr
    process.send_signal(signal.SIGINT)
    status, out, _ = _finish(process)
    assert status == 0
    assert "Everything is stopped" in out
    assert survivors() == []


def test_serve_ends_when_a_server_dies(start: Start, survivors: Survivors) -> None:
    """The death of an engine ends the stack with 1 and the engine's name."""
    process = start("serve", "--prefill", "tp1pp1", "--prefill", "tp2pp1")
    shown = read_until(process, "Ctrl-C")
    server_on(ready_port("prefill-2", shown), survivors()).kill()
    status, _, err = _finish(process)
    assert status == 1
    assert err.startswith("error: prefill-2 was ended by SIGKILL")
    assert survivors() == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--prefill", "two"], "layout 'two' is not understood"),
        (["--decode", "tp3pp1"], "TP 3 does not divide 4 attention heads"),
        (["--prefill", "tp1pp3"], "3 pipeline stages, but the model has only 2 layers"),
        (["--startup-timeout", "0"], "0 is not positive"),
    ],
)
def test_what_cannot_work_is_refused_at_once(start: Start, args: list[str], message: str) -> None:
    """A usage error ends with 2 and one readable line, before anything starts."""
    status, out, err = _finish(start("demo", *args))
    assert status == 2
    assert message in err
    assert "Traceback" not in err
    assert out == ""


@pytest.mark.parametrize(
    ("interruption", "number"),
    [(KeyboardInterrupt(), signal.SIGINT), (TerminatedError("SIGTERM"), signal.SIGTERM)],
)
def test_a_signal_that_nobody_tells_of_is_in_the_status(
    monkeypatch: pytest.MonkeyPatch, interruption: BaseException, number: int
) -> None:
    """Whoever reads the status is not told that somebody pressed Ctrl-C where nobody did."""

    def interrupt(*_: object) -> None:
        raise interruption

    monkeypatch.setattr(cli, "invoke", interrupt)
    assert cli.main(["demo"]) == 128 + number

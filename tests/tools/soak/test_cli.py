# SPDX-License-Identifier: Apache-2.0
"""A whole soak as a user runs it: a real process, with fakes in the place of the servers."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.tools.pdstack.helpers import living_in, wait_until
from tools.pdstack.errors import UsageError
from tools.pdstack.process import TerminatedError
from tools.soak import cli
from tools.soak.checker import Invariant
from tools.soak.cli import build_parser, command_of, settings_of
from tools.soak.faults import FaultKind

MAIN = """
import os, sys
from tools.pdstack import stack
from tools.pdstack.engine import Device, ServedModel
from tools.soak import cli, clients, nemesis, runner, schedule, stage
scripts = sys.argv.pop(1)
stack.find_script = lambda name, directory=None: f"{scripts}/{name}"
stack.installed_device = lambda: Device.CPU
runner.write_tiny_llama = lambda directory: ServedModel(directory, "model")
runner._FIRST_ROUND_S = 1.0
runner.LULL_SLACK_S = -33.0
clients.LONGEST_HOLD_S = clients._SLACK_S = 1.0
stage._ROUTER_LIMIT_S = 1.0
nemesis.ON_THE_WAY_S = 4.0
schedule._LEADS_S = (0.2, 0.5)
schedule._SHORT_HOLDS_S = (float(os.environ.get("HOLD_S", "0.5")),) * 2
sys.exit(cli.main())
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(fake_bin: Path, tmp_path: Path) -> Start:
    """Return a function that starts a soak of fakes."""
    (tmp_path / "logs").mkdir()

    def start(*args: str, **env: str) -> subprocess.Popen[str]:
        common = ["--log-dir", str(tmp_path / "logs"), "--output", str(tmp_path / "out")]
        return subprocess.Popen(
            [sys.executable, "-c", MAIN, str(fake_bin), "--seed", "5", *args, *common],
            env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the exit status, and what was printed."""
    shown, _ = process.communicate(timeout=300)
    return process.returncode, shown


def found(tmp_path: Path) -> dict:
    """Return what the soak has written."""
    return json.loads((tmp_path / "out/soak.json").read_text())


def test_soak_in_which_all_holds_is_success(start, tmp_path):
    """Faults strike and are healed, the table tells of them, and nothing is left running."""
    status, shown = finish(start("--seconds", "4", "--faults", "kill-decode,kill-router,forged"))
    assert status == 0, shown
    assert (
        "seed 5; to repeat it: make soak SEED=5 SOAK_S=4 SOAK_ARGS='--faults kill-decode," in shown
    )
    history = found(tmp_path)["history"]
    assert history["faults"] and history["lulls"]
    assert {fault["kind"] for fault in history["faults"]} <= {
        "kill-decode",
        "kill-router",
        "forged-params",
    }
    assert sum(request["must_answer"] for request in history["requests"]) >= 8
    assert found(tmp_path)["violations"] == []
    assert living_in(tmp_path) == []


# Four times ten seconds; the steps of a roll are tested in `test_nemesis.py`.
def test_a_fleet_is_replaced_without_a_request_that_fails(start, tmp_path):
    """Each of the four engines ends and is followed, under a load that has to be answered."""
    status, shown = finish(start("--seconds", "1", "--faults", "roll"))
    assert status == 0, shown
    history = found(tmp_path)["history"]
    (fault,) = history["faults"]
    assert (fault["kind"], fault["target"]) == ("roll", "fleet")
    assert [(each["engine"], each["wanted"]) for each in history["ends"]] == [
        *((name, True) for name in ("prefill-1", "prefill-2", "decode-1", "decode-2"))
    ]
    meanwhile = [
        each
        for each in history["requests"]
        if each["asked"] == "router" and fault["began_s"] < each["sent_s"] < fault["healed_s"]
    ]
    assert any(each["must_answer"] for each in meanwhile)
    # Of those who are there at the end, whose clients do not leave.
    assert all(each["must_answer"] for each in meanwhile if each["manner"] == "turn")


@pytest.mark.parametrize(
    ("behaviour", "invariant"),
    [
        ("garble", Invariant.ANSWERS),
        ("leak", Invariant.POOLS),
        ("hang", Invariant.DEADLINES),
        ("die", Invariant.LIFE),
        ("serial", Invariant.TESTED),
    ],
)
def test_what_must_not_be_is_found(start, tmp_path, behaviour, invariant):
    """The soak fails, names what does not hold, and how to repeat it; nothing is left running."""
    arguments = ("--seconds", "5", "--faults", "mixed", "--deadline", "3")
    process = start(*arguments, FAKE_DECODE=behaviour)
    status, shown = finish(process)
    assert status == 1, shown
    # Other things do not hold, either, where an engine does not answer.
    assert invariant.value in {each["invariant"] for each in found(tmp_path)["violations"]}, shown
    first = found(tmp_path)["violations"][0]
    assert f"error: not so: {first['invariant']}" in shown
    assert "To repeat: make soak SEED=5" in shown
    assert "Logs are kept in" in shown
    assert living_in(tmp_path) == []


def test_interruption_is_clean(start, tmp_path):
    """Ctrl-C while an engine is stopped ends everything."""
    process = start("--seconds", "600", "--faults", "stop-decode", HOLD_S="600")

    def one_is_stopped() -> bool:
        return any(each.status() == psutil.STATUS_STOPPED for each in living_in(tmp_path))

    wait_until(one_is_stopped, "the fault")
    process.send_signal(signal.SIGINT)
    status, shown = finish(process)
    assert status == 128 + signal.SIGINT, shown
    assert "interrupted by Ctrl-C" in shown
    assert found(tmp_path)["history"]["faults"][0]["detail"] == "broken off"
    assert living_in(tmp_path) == []


@pytest.mark.parametrize(
    ("interruption", "number"),
    [(KeyboardInterrupt(), signal.SIGINT), (TerminatedError("SIGTERM"), signal.SIGTERM)],
)
def test_a_signal_that_nobody_tells_of_is_in_the_status(monkeypatch, interruption, number):
    """Whoever reads the status is not told that somebody pressed Ctrl-C where nobody did."""

    def interrupt(*_: object) -> None:
        raise interruption

    monkeypatch.setattr(cli, "invoke", interrupt)
    assert cli.main(["--seed", "5"]) == 128 + number


def test_printed_command_means_the_same_soak():
    """Whoever repeats a soak by what was printed gets the same settings."""
    arguments = "--seed 3 --seconds 90 --faults kill,drop --clients 2 --deadline 30 --keep-going"
    asked = settings_of(build_parser().parse_args(arguments.split()), "tcp")
    words = shlex.split(command_of(asked))
    assert words[:4] == ["make", "soak", "SEED=3", "SOAK_S=90"]
    more = shlex.split(words[4].removeprefix("SOAK_ARGS="))
    again = build_parser().parse_args(["--seed", "3", "--seconds", "90", *more])
    assert settings_of(again, None) == asked


def test_defaults_are_all_faults_and_tcp():
    """Without a seed each soak has one of its own; the environment chooses the transports."""
    args = build_parser().parse_args([])
    settings = settings_of(args, None)
    assert (settings.kinds, settings.fleet.ucx_tls) == (tuple(FaultKind), "tcp,self")
    assert settings_of(args, "all").fleet.ucx_tls == "all"
    assert settings_of(args, None).seed != settings.seed


@pytest.mark.parametrize(
    "arguments", ["--seconds 0", "--clients -1", "--deadline 0", "--faults nothing"]
)
def test_what_cannot_be_is_refused(arguments):
    """Before anything is started."""
    with pytest.raises(UsageError):
        settings_of(build_parser().parse_args(arguments.split()), None)

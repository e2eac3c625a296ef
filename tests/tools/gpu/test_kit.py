# SPDX-License-Identifier: Apache-2.0
"""The kit for one GPU, as far as it can be seen without: what it runs, reports and refuses."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.cli import build_parser as build_benchmarks_parser
from tools.gpu import cli, kit
from tools.gpu.kit import Outcome, Step, run_all, run_kit
from tools.pdstack.cli import build_parser

ROOT = Path(__file__).parents[3]
LIMIT_S = 300.0
PYTHON = sys.executable
BROKEN = {"fault": "ended with exit status 3"}
CUT = {"fault": "cut short", "lacked_time": True}
LATE = {"fault": "not run", "was_run": False, "lacked_time": True}


def step(name: str, program: str, limit_s: float = LIMIT_S, **fields: object) -> Step:
    """Return one that runs a program in Python."""
    return Step(name, f"that {name} works", [PYTHON, "-c", program], limit_s, **fields)


def names_and_faults(outcomes: list[Outcome]) -> list[tuple[str, str]]:
    """Return what became of each."""
    return [(each.step.name, each.fault) for each in outcomes]


def test_steps_that_fail_keep_no_other_from_being_run(tmp_path):
    """Each is told of by itself: how it ended, what was missing, or that it took too long."""
    planned = [
        step("broken", "print('why'); raise SystemExit(3)"),
        step("killed", "import os; os.kill(os.getpid(), 9)"),
        step("slow", "import time; time.sleep(600)", 2.0),
        step("bare", "", needs=("no_such_module", "sys")),
        step("whole", "import tools.gpu; print('here')"),
    ]
    outcomes = list(run_all(planned, tmp_path))
    assert names_and_faults(outcomes) == [
        ("broken", "ended with exit status 3"),
        ("killed", "was ended by SIGKILL"),
        ("slow", "not over after 2 s"),
        ("bare", "not run: no_such_module not installed"),
        ("whole", ""),
    ]
    assert outcomes[0].log == ["why"] and outcomes[-1].log == ["here"]
    assert [each.was_run for each in outcomes] == [True, True, True, False, True]


def test_all_steps_have_one_deadline(tmp_path):
    """What has no time left is not begun, and what is under way then is ended."""
    planned = [step("slow", "import time; time.sleep(600)"), step("late", "")]
    outcomes = list(run_all(planned, tmp_path, limit_s=2.0))
    assert names_and_faults(outcomes) == [
        ("slow", "cut short after 2 s: the time of all steps, 2 s, is over"),
        ("late", "not run: the time of all steps, 2 s, is over"),
    ]
    assert [each.lacked_time for each in outcomes] == [True, True]


@pytest.mark.parametrize(
    ("faults", "status", "told"),
    [
        ([{}], 0, []),
        ([{"fault": "not run: needs the fork", "was_run": False}], 0, []),
        ([{}, CUT, LATE], 3, ["No time was left for two, three, which show nothing."]),
        ([BROKEN, CUT, LATE], 1, ["No time was left for two, three, which show nothing."]),
        ([BROKEN, {}], 1, []),
    ],
    ids=["all", "left out", "late", "broken and late", "broken"],
)
def test_steps_without_time_are_no_success(monkeypatch, tmp_path, faults, status, told):
    """They have not failed either: output and report say so, and the exit status is its own."""
    outcomes = [
        Outcome(step(name, ""), **fault)
        for name, fault in zip(("one", "two", "three"), faults, strict=False)
    ]
    monkeypatch.setattr(kit, "run_all", lambda *_: iter(outcomes))
    said: list[str] = []
    assert run_kit([], tmp_path / "report.md", said.append) == status
    report = (tmp_path / "report.md").read_text().splitlines()
    assert [line for line in said if "No time" in line] == told
    assert [line for line in report if "No time" in line] == told


@pytest.mark.parametrize(
    ("version", "fault"), [("0.33.0", "not run: needs the fork"), ("0.33.0+reshard.1", "")]
)
def test_what_the_plugin_is_not_enough_for_is_left_out(monkeypatch, tmp_path, version, fault):
    """And told of."""
    monkeypatch.setattr(kit, "_version", lambda _: version)
    (outcome,) = run_all([step("fork", "", needs_fork=True)], tmp_path)
    assert outcome.fault == fault


@pytest.mark.parametrize(("status", "fails"), [(0, 0), (3, 1)])
def test_report_is_one_file_with_everything(tmp_path, status, fails):
    """Versions, a table, and what each step has printed; the exit status tells of failures only."""
    said: list[str] = []
    planned = [
        step("one", f"print('a line of one'); raise SystemExit({status})"),
        step("two", "", needs=("no_such_module",)),
    ]
    path = tmp_path / "report.md"
    assert run_kit(planned, path, said.append) == fails
    text = path.read_text()
    result = "ended with exit status 3" if status else "ok"
    assert f"| one | that one works | {result} |" in text
    assert "| two | that two works | not run: no_such_module not installed | 0 |" in text
    assert "    a line of one" in text and "- torch: " in text and "- gpu: " in text
    assert len(said) == 3 and str(path) in said[-1]


def test_commands_of_all_steps_are_understood(tmp_path):
    """By the programs that they call."""
    by_name = {each.name: each for each in kit.steps(tmp_path)}
    assert list(by_name) == ["lane", "tests", "pair", "transfer", "announced"]
    build_parser().parse_args(by_name["pair"].command[3:])
    asked = cli.build_parser().parse_args(by_name["announced"].command[3:])
    assert asked.output.parent == tmp_path and not asked.synchronous
    args = build_benchmarks_parser().parse_args(by_name["transfer"].command[3:])
    assert args.quick and args.strategy == ["direct", "staged"] and args.output == tmp_path
    # Where none were chosen, pytest would fail.
    tests = Path(by_name["tests"].command[-1])
    assert '"LIBFABRIC", "device")' in tests.read_text()
    assert set(by_name["tests"].command) >= {"-k", "device", str(ROOT)}


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ({}, "has no vLLM: install the fork or the plugin"),
        ({"vllm": "0.32.0+reshard.1.cpu"}, "is built for CPU"),
        ({"vllm": "0.33.0"}, "is not this fork, and has no plugin"),
        ({"vllm": "0.33.0", "vllm-kv-reshard": "1"}, ""),
        ({"vllm": "0.33.0+reshard.1"}, ""),
    ],
)
def test_connector_that_is_missing_is_named(monkeypatch, versions, words):
    """With a GPU, the installed vLLM has to be this fork, or to have the plugin."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kit, "_version", versions.get)
    reason = kit.why_not()
    assert words in reason and bool(words) == bool(reason)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_machine_without_gpu_is_told_in_one_line(capsys, tmp_path):
    """Before anything is run or written."""
    report = tmp_path / "gpu/report.md"
    assert cli.main(["--report", str(report)]) == 2
    told = capsys.readouterr()
    (line,) = told.err.splitlines()
    assert line.startswith("error: torch ") and "finds no GPU" in line
    assert told.out == "" and not report.parent.exists()


def test_page_has_the_limits_of_all_steps(tmp_path):
    """And says that they are more than what all have together."""
    page = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| `(\w+)` \| (\d+) s \|", page, re.MULTILINE)
    planned = kit.steps(tmp_path)
    assert [(name, float(limit)) for name, limit in told] == [
        (each.name, each.limit_s) for each in planned
    ]
    assert sum(each.limit_s for each in planned) > kit.LIMIT_S == 600.0

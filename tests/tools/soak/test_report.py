# SPDX-License-Identifier: Apache-2.0
"""The table, the file and the drawing tell what became of requests under each fault."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from tests.tools.soak.histories import ANSWERS, pool, request, sound_history
from tools.soak import plot, report
from tools.soak.checker import check
from tools.soak.history import History, Work
from tools.soak.report import Outcome


@pytest.fixture
def history():
    """A round without a fault, and one in which an answer is wrong."""
    history = sound_history()
    history.requests += [
        request(round=0),
        request(answers=("garbage",)),
        request(gave_up=True, ended_s=300.0, status=None, answers=(), complete=False),
    ]
    return history


def test_outcomes_are_those_of_the_round(history):
    """Requests and violations are counted under the fault of their round."""
    found = report.outcomes(history, check(history, ANSWERS))
    assert found == {
        "stop-prefill": Outcome(
            times=1, answered=3, refused=1, lost=1, left=1, gave_up=1, violations=2
        ),
        "none": Outcome(answered=1),
    }


def test_table_has_a_row_for_each_fault(history):
    """Whoever looks at it sees where something was violated."""
    console = Console(width=120, record=True, file=None, quiet=True)
    console.quiet = False
    with console.capture() as captured:
        console.print(report.table(report.outcomes(history, check(history, ANSWERS))))
    rows = [line.split() for line in captured.get().splitlines()]
    assert ["stop-prefill", "1", "3", "1", "1", "1", "1", "2"] in rows
    assert ["none", "0", "1", "0", "0", "0", "0", "0"] in rows


def test_work_of_a_seat_is_counted_once():
    """Each engine's last reading tells of all since it started, and its successor begins anew."""
    told = (("decode-1", 1, 2.0), ("decode-1", 1, 5.0), ("decode-1", 2, 1.0), ("decode-2", 1, 3.0))
    pools = [
        pool(
            engine=name, incarnation=number, early=early, preemptions=2 * early, prefetched_bytes=0
        )
        for name, number, early in told
    ]
    assert History(pools=pools).work() == {
        "decode-1": Work(preemptions=12.0, early=6.0),
        "decode-2": Work(preemptions=6.0, early=3.0),
    }
    assert History().work() == {}


def test_table_of_work_has_a_row_for_each_seat(history):
    """It tells whether anything was early, and whether blocks ran out."""
    console = Console(width=120)
    with console.capture() as captured:
        console.print(report.work_table(history))
    rows = [line.split() for line in captured.get().splitlines()]
    assert ["decode-1", "3", "2", "4"] in rows and ["prefill-1", "3", "2", "4"] in rows


def test_file_has_everything(history, tmp_path):
    """What was seen can be read again by programs."""
    path = tmp_path / "soak.json"
    violations = check(history, ANSWERS)
    report.write_json(
        path,
        settings={"seed": 7},
        command="make soak SEED=7",
        began_at=1.0,
        history=history,
        violations=violations,
    )
    found = json.loads(path.read_text())
    assert (found["settings"], found["command"]) == ({"seed": 7}, "make soak SEED=7")
    assert len(found["history"]["requests"]) == len(history.requests)
    assert found["history"]["faults"][0]["kind"] == "stop-prefill"
    assert found["violations"][0]["what"] == violations[0].what


def test_drawing_is_made(history, tmp_path):
    """It needs matplotlib, which is not installed for everyone."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "soak.svg"
    plot.draw(history, check(history, ANSWERS), path)
    assert "</svg>" in path.read_text()


def test_command_repeats_the_soak():
    """What is as by default is left out."""
    assert report.repeat_command(7, 120.0, []) == "make soak SEED=7 SOAK_S=120"
    assert report.repeat_command(7, 0.5, ["--faults", "kill"]) == (
        "make soak SEED=7 SOAK_S=0.5 SOAK_ARGS='--faults kill'"
    )

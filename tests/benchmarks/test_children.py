# SPDX-License-Identifier: Apache-2.0
"""Processes that do what they are told."""

from __future__ import annotations

import os

import psutil
import pytest

from benchmarks.children import Child, call_all, end_all, prepare
from benchmarks.errors import BenchmarkError
from tests.tools.pdstack.helpers import wait_until

DEADLINE_S = 60.0


class Host:
    """What runs in the process."""

    def __init__(self, number: int) -> None:
        if number < 0:
            raise ValueError("no such number")
        self.number = number

    def add(self, other: int) -> int:
        """A sum."""
        return self.number + other

    def variable(self, name: str) -> str | None:
        """What the process finds in its environment."""
        return os.environ.get(name)

    def fail(self) -> None:
        """An error."""
        raise ValueError("on purpose")

    def leave(self) -> None:
        """The end of the process, with something in its log."""
        print("leaving", flush=True)
        os._exit(3)


@pytest.fixture
def start(server, tmp_path):
    """Starts children, and ends them afterwards."""
    started: list[Child] = []

    def make(number: int = 1) -> Child:
        name = f"child-{len(started)}"
        started.append(Child(name, tmp_path, "tests.benchmarks.test_children:Host", number))
        return started[-1]

    yield make
    end_all(started)


def test_calls_are_answered_in_order(start):
    """Several children are called at once, and each answers for itself."""
    both = [start(1), start(2)]
    assert [child.result() for child in both] == [None, None]
    assert call_all(both, "add", 10) == [11, 12]


def test_environment_is_the_childrens_alone(start, tmp_path, monkeypatch):
    """What ranks are told is not told to who starts them, and so to its engines."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    before = dict(os.environ)
    prepare("benchmarks.host", tmp_path)
    assert dict(os.environ) == before
    child = start()
    child.result()
    names = "VLLM_LOGGING_LEVEL", "GLOO_SOCKET_IFNAME"
    told = [call_all([child], "variable", name) for name in names]
    assert told == [["WARNING"], ["lo"]]


def test_errors_name_child_and_cause(start):
    """What a method raises is told here, and the child lives on."""
    child = start()
    child.result()
    with pytest.raises(BenchmarkError, match="child-0 failed: ValueError: on purpose"):
        call_all([child], "fail")
    assert call_all([child], "add", 1) == [2]


def test_object_that_cannot_be_made_is_told(start):
    """The first result says so."""
    with pytest.raises(BenchmarkError, match="no such number"):
        start(-1).result()


def test_end_of_a_process_is_noticed(start):
    """Nobody waits for who has ended; the error shows the end of its log."""
    child = start()
    child.result()
    with pytest.raises(BenchmarkError, match=r"(?s)child-0 has ended.*leaving"):
        call_all([child], "leave")


def test_process_that_has_ended_is_neither_stopped_nor_let_go_on(start):
    """Who asks it for something hears of its end; turns that it takes part in go on until then."""
    child = start()
    psutil.Process(child.pid).kill()
    wait_until(lambda: not child._process.is_alive(), "the end of the process", DEADLINE_S)
    child.freeze()
    child.thaw()
    with pytest.raises(BenchmarkError, match="has ended with status -9"):
        child.post("add", 1)


def test_stopped_processes_do_nothing_and_can_be_ended(start):
    """A child does nothing between freeze and thaw, and ends whether stopped or not."""
    child = start()
    child.result()
    process = psutil.Process(child.pid)
    child.freeze()
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED, "the stop", DEADLINE_S)
    child.post("add", 1)
    with pytest.raises(BenchmarkError, match="has not answered"):
        child.result(limit_s=0.5)
    child.thaw()
    assert child.result() == 2
    child.freeze()
    end_all([child])
    assert not psutil.pid_exists(process.pid)

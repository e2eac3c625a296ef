# SPDX-License-Identifier: Apache-2.0
"""Tasks, resumed at times that the test gives."""

from __future__ import annotations

import math
from collections import deque

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.tasks import (
    Tasks,
    suspended,
    taken_once_done,
)


class Steps:
    """What a task has done."""

    def __init__(self) -> None:
        self.done: list[object] = []
        self.is_open = False
        self.faults: list[Exception] = []

    async def body(self, until_s: float = math.inf) -> None:
        """Wait until it may go on."""
        self.done.append("begun")
        while not self.is_open:
            await suspended(until_s)
            self.done.append("resumed")

    async def leave(self, error: Exception | None) -> None:
        """Do what follows, unless that fails."""
        self.done.append(error)
        if self.faults:
            raise self.faults.pop()


@pytest.fixture
def tasks() -> Tasks:
    """No task yet."""
    return Tasks()


@pytest.fixture
def steps() -> Steps:
    """What a task will do."""
    return Steps()


def test_task_begins_with_the_next_run(tasks, steps):
    """Whoever starts it goes on first."""
    task = tasks.start(steps.body(), steps.leave)
    assert not steps.done
    tasks.run(0.0)
    assert steps.done == ["begun"] and not task.is_over and not tasks.ready


def test_task_is_resumed_once_it_is_woken(tasks, steps):
    """However often it is woken until then; its exit follows at once."""
    task = tasks.start(steps.body(), steps.leave)
    tasks.run(0.0)
    tasks.run(1.0)
    assert steps.done == ["begun"]
    steps.is_open = True
    task.wake()
    task.wake()
    tasks.run(2.0)
    assert steps.done == ["begun", "resumed", None] and task.is_over
    task.wake()
    task.cancel(ValueError())
    tasks.run(3.0)
    assert len(steps.done) == 3


def test_task_is_resumed_at_its_time(tasks, steps):
    """Not before; and whoever sleeps until then is told when that is."""
    tasks.start(steps.body(until_s=5.0), steps.leave)
    assert tasks.next_due_s == math.inf
    tasks.run(0.0)
    assert tasks.next_due_s == 5.0
    tasks.run(4.999)
    assert steps.done == ["begun"]
    tasks.run(5.0)
    assert steps.done == ["begun", "resumed"] and tasks.next_due_s == 5.0
    tasks.run(6.0)
    assert steps.done == ["begun", "resumed", "resumed"]


@pytest.mark.parametrize("has_begun", [True, False])
def test_body_that_is_cancelled_raises_where_it_waits(tasks, steps, has_begun):
    """Or never begins; its exit is told why."""
    task, error = tasks.start(steps.body(), steps.leave), ValueError("enough")
    if has_begun:
        tasks.run(0.0)
    task.cancel(error)
    tasks.run(0.0)
    assert steps.done == ["begun"] * has_begun + [error] and task.is_over


def test_exit_is_not_cancelled(tasks, steps):
    """It ends what the task owns."""

    async def leave(error: Exception | None) -> None:
        await suspended()
        steps.done.append("left")

    steps.is_open = True
    task = tasks.start(steps.body(), leave)
    tasks.run(0.0)
    task.cancel(ValueError("enough"))
    tasks.run(0.0)
    assert steps.done == ["begun"]
    task.wake()
    tasks.run(0.0)
    assert steps.done == ["begun", "left"] and task.is_over


def test_exit_that_raises_is_begun_again_after_a_rest(tasks, steps):
    """With what it has raised, so that nothing is lost, and no log is filled."""
    first, second = ValueError("first"), ValueError("second")
    steps.is_open, steps.faults = True, [second, first]
    task = tasks.start(steps.body(), steps.leave)
    tasks.run(0.0)
    assert steps.done == ["begun", None] and 0.0 < tasks.next_due_s < 1.0
    tasks.run(tasks.next_due_s)
    tasks.run(tasks.next_due_s)
    assert steps.done == ["begun", None, first, second] and task.is_over


def test_exception_of_a_task_is_no_other_tasks(tasks, steps):
    """Others that were woken in the same run go on."""
    other = Steps()

    async def fail() -> None:
        raise ValueError

    tasks.start(fail(), steps.leave)
    tasks.start(other.body(), other.leave)
    tasks.run(0.0)
    assert isinstance(steps.done[0], ValueError) and other.done == ["begun"]


def test_exit_that_cannot_be_made_is_made_later(tasks, steps):
    """The exception is its caller's, and the task is not lost."""
    faults = [ValueError("not now")]

    def leave(error: Exception | None):
        if faults:
            raise faults.pop()
        return steps.leave(error)

    steps.is_open = True
    task = tasks.start(steps.body(), leave)
    with pytest.raises(ValueError, match="not now"):
        tasks.run(0.0)
    tasks.run(1.0)
    tasks.run(tasks.next_due_s)
    assert task.is_over and len(steps.done) == 2


def test_what_is_done_is_taken_out():
    """In its order, and what is added meanwhile after it."""
    queue = deque([1, 2])
    done = []
    for item in taken_once_done(queue):
        done.append(item)
        if item == 1:
            queue.append(3)
    assert done == [1, 2, 3] and not queue


def test_what_an_exception_comes_up_with_stays():
    """The next poll begins with it."""
    queue = deque([1, 2, 3])
    with pytest.raises(ValueError, match="2"):
        for item in taken_once_done(queue):
            if item == 2:
                raise ValueError(item)
    assert list(queue) == [2, 3]


def test_what_a_loop_ends_at_stays():
    """It was not done."""
    queue = deque([1, 2, 3])
    for item in taken_once_done(queue):
        if item == 2:
            break
    assert list(queue) == [2, 3]

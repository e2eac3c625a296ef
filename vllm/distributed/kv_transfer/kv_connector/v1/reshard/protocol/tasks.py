# SPDX-License-Identifier: Apache-2.0
"""Tasks: functions that wait, stepped by one thread that passes the time.

A task is a coroutine, its *body*, and another one that runs after it, its *exit*:

    body   ---- ends, raises, or is cancelled ---->   exit   ---- ends ---->  over

The exit is what the exit of an `async with` block is: it runs however the body has ended, and
nothing cancels it. In addition, it is begun again if it raises, so that nothing that a task owns is
lost over an unexpected exception.

A task waits with `await suspended()`, and looks again at what it waits for when it is resumed:
it may be resumed for any reason. Whoever changes something that a task waits for wakes it.

What several tasks need in turn waits in queues, of which an exception loses nothing.

There is no thread, no clock and no I/O here. All of it belongs to the thread that calls `run`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from heapq import heappop, heappush
from itertools import count
from types import coroutine
from typing import TypeVar

_Item = TypeVar("_Item")

Body = Coroutine[float, None, None]
Exit = Callable[[Exception | None], Body]
"""Makes a task's exit, from the exception that ended its body; None without one."""

_EXIT_AGAIN_S = 0.05
"""Wait before an exit that has raised is begun again: repeated failures must not fill the log."""


@coroutine
def suspended(until_s: float = math.inf) -> Generator[float, None, None]:
    """Suspend the calling task until it is woken, or until a time."""
    yield until_s


class Task:
    """A function that waits. Only its `Tasks` resumes it.

    Args:
        tasks: What resumes it.
        body: What it does.
        leave: Makes its exit.

    Attributes:
        is_over: Whether its exit has ended.
    """

    __slots__ = ("_body", "_error", "_is_leaving", "_leave", "_tasks", "is_over")

    def __init__(self, tasks: Tasks, body: Body, leave: Exit) -> None:
        self._tasks, self._body, self._leave = tasks, body, leave
        self._error: Exception | None = None
        self._is_leaving = self.is_over = False

    def wake(self) -> None:
        """Have it resumed in the next `run`, or in the current one."""
        self._tasks.ready[self] = None

    def cancel(self, error: Exception) -> None:
        """Have its body raise an error where it waits; does nothing once the body has ended."""
        if not self._is_leaving:
            self._error = error
            self._tasks.ready[self] = None

    def resume(self, now_s: float) -> float:
        """Run until it waits or is over; return until when it waits, perhaps for ever."""
        if self.is_over:
            return math.inf
        error, self._error = self._error, None
        try:
            if error is None or self._is_leaving:
                return self._body.send(None)
            return self._body.throw(error)
        except StopIteration:
            if self._is_leaving:
                self.is_over = True
                return math.inf
            fault = None
        except Exception as raised:
            fault = raised
        # The current `run` begins the exit, a later one begins it again.
        at_s = now_s + _EXIT_AGAIN_S if self._is_leaving else -math.inf
        self._is_leaving = True
        self._body = self._leave(fault)
        return at_s


class Tasks:
    """All tasks of a thread.

    Attributes:
        ready: Tasks to resume, in order.
        current: The task that runs now, or has run last.
        now_s: The time of the last `run`.
    """

    def __init__(self) -> None:
        self.ready: dict[Task, None] = {}
        self.current: Task | None = None
        self.now_s = 0.0
        self._timers: list[tuple[float, int, Task]] = []
        self._numbers = count()

    @property
    def next_due_s(self) -> float:
        """When a waiting task is due, if nothing wakes one before; infinite without one."""
        return self._timers[0][0] if self._timers else math.inf

    def start(self, body: Body, leave: Exit) -> Task:
        """Start a task, which begins in the next `run`."""
        task = Task(self, body, leave)
        self.ready[task] = None
        return task

    def run(self, now_s: float) -> None:
        """Resume the tasks that were woken or are due, until none is ready."""
        self.now_s = now_s
        while self._timers and self._timers[0][0] <= now_s:
            self.ready[heappop(self._timers)[2]] = None
        while self.ready:
            self._resume(next(iter(self.ready)), now_s)

    def _resume(self, task: Task, now_s: float) -> None:
        self.current = task
        del self.ready[task]
        try:
            at_s = task.resume(now_s)
        except BaseException:
            # Not the task's own fault, which its exit is told of: it is resumed again.
            self.ready[task] = None
            raise
        if at_s == -math.inf:
            self.ready[task] = None
        elif at_s < math.inf:
            heappush(self._timers, (at_s, next(self._numbers), task))


def taken_once_done(queue: deque[_Item]) -> Iterator[_Item]:
    """Yield a queue's items, removing each once the next one is requested.

    An item at which an exception is raised, or the loop ends, stays first in the queue. Items added
    meanwhile come last.
    """
    while queue:
        yield queue[0]
        queue.popleft()

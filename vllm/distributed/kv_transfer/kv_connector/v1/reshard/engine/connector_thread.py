# SPDX-License-Identifier: Apache-2.0
"""The connector's thread, which moves KV caches while the engine computes.

    engine's thread                      connector's thread
    hand_over(step)   ---- queue --->    the transfer engine is polled while something is on its way
    collect()         <--- queue ----    reports

The engine's thread does nothing but that, and waits for nothing. The connector's owns everything
else: NIXL's agents, the peers, the ledgers. It polls often while reads are in flight, ever less
often while nothing moves, and sleeps until it is woken or something is due otherwise.

Both share the interpreter. A poll takes a fraction of a millisecond, and the interpreter is let go
of after each; within one, as elsewhere in this process, a thread that wants it waits `SWITCH_S` at
most.

Each sees when the other one does not come round, and says where it is.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable

from vllm.logger import init_logger

from ..transport.wakeup import Wakeup
from .transfer_engine import Incoming, Report, SchedulerStep, TransferEngine

logger = init_logger(__name__)

_SHORTEST_REST_S, _LONGEST_REST_S = 50e-6, 1e-3
"""Between two looks at reads in flight. NIXL needs them: without threads of its own, an agent over
TCP reads as much as has arrived since the last one."""

_LONGEST_TALK_REST_S = 10e-3
"""Between two looks where only messages to others are on their way."""

_AFTER_FAULT_S = 0.05
"""After a poll that has failed: if they all do, the log is not to be full of it."""

SWITCH_S = 0.1e-3
"""How long a thread that computes keeps the interpreter where another one wants it. Python's own 5
ms are as long as a step of a small model. It begins anew whenever the interpreter was let go of for
a moment, as calls of NIXL do: a thread that wants it may wait for some of these times."""

_MOMENT_S = 20e-6
"""For so long a thread leaves the interpreter to the other one, which would wait for all of
`SWITCH_S` otherwise: the engine's while something is under way, and the connector's between two
polls of a backlog."""

_TICK_S = 0.2
"""As often notifications are taken though nothing is held for their senders."""

STALL_S = 2.0
"""A thread that has not come round for so long is told of in the log. A step of a large prompt may
take as long; then the line says so."""

_CLOSE_LIMIT_S = 10.0


class ConnectorThread:
    """Polls a transfer engine.

    `begin_step`, `collect` and `close` belong to the engine's thread; `hand_over` and `wake` are
    for any thread. The transfer engine belongs to the thread that is started here, until `close`
    has returned.

    Args:
        transfer_engine: What to poll.
        clock: Seconds that only grow.
        prepare: Called by the thread before everything else.
    """

    def __init__(
        self,
        transfer_engine: TransferEngine,
        clock: Callable[[], float] = time.monotonic,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self._transfer_engine = transfer_engine
        self._clock = clock
        self._prepare = prepare
        self._incoming: deque[Incoming] = deque()
        self._reports: deque[Report] = deque()
        self._news = Wakeup()
        self._stopped = False
        # Hints for the engine's thread, which the other one writes.
        self._moves = False
        self._holds = False
        self._tick_at_s = 0.0
        # When the poll, or the step, began that is under way; each is written by its own thread.
        self._poll = _Round("connector's thread")
        self._step = _Round("engine's step")
        self._thread = threading.Thread(target=self._run, name="reshard-connector", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
        self._thread.start()

    def begin_step(self) -> None:
        """The engine's thread begins a step, which `collect` ends."""
        self._step.begin(self._clock())

    def hand_over(self, incoming: Incoming) -> None:
        """Ask for something, or tell of an offer."""
        self._incoming.append(incoming)
        self._news.set()

    def collect(self) -> Report:
        """What has ended since the last call."""
        now_s = self._clock()
        self._step.end()
        self._poll.tell_if_stalled(now_s)
        if self._holds or now_s >= self._tick_at_s:
            # Readers may notify at any time.
            self._tick_at_s = now_s + _TICK_S
            self.hand_over(SchedulerStep())
        if not self._reports and self._moves:
            time.sleep(_MOMENT_S)
        report = Report()
        while self._reports:
            report.add(self._reports.popleft())
        return report

    def wake(self) -> None:
        """Have the thread poll now."""
        self._news.set()

    def close(self) -> None:
        """End the thread, and then the transfer engine."""
        self._stopped = True
        self._news.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_LIMIT_S)
        if self._thread.is_alive():
            logger.error(
                "The connector's thread has not ended within %g s, and is left to itself.",
                _CLOSE_LIMIT_S,
            )
            return
        self._transfer_engine.close(self._clock())

    def _run(self) -> None:
        if self._prepare is not None:
            self._prepare()
        rest_s = _SHORTEST_REST_S
        while not self._stopped:
            self._news.clear()
            # Before they are taken: the engine's thread sees one or the other.
            self._moves = self._moves or bool(self._incoming)
            incoming = [self._incoming.popleft() for _ in range(len(self._incoming))]
            now_s = self._clock()
            self._poll.begin(now_s)
            try:
                report = self._transfer_engine.poll(incoming, now_s)
                if report:
                    self._reports.append(report)
                self._transfer_engine.tell_producers(now_s)
            except Exception:
                # What was not foreseen ends neither the engine nor other requests.
                logger.exception("A turn of the connector's thread has failed, and the next begins")
                time.sleep(_AFTER_FAULT_S)
                # What has ended in this one is told by the next.
                continue
            finally:
                self._poll.end()
            self._moves = self._transfer_engine.is_moving
            self._holds = len(self._transfer_engine.producer) > 0
            if report or incoming or self._transfer_engine.has_moved:
                rest_s = _SHORTEST_REST_S
            if self._transfer_engine.has_backlog:
                # To wait for news would not let go of the interpreter where there are some.
                time.sleep(_MOMENT_S)
            elif self._moves or self._transfer_engine.is_talking:
                self._news.wait(rest_s)
                longest_s = _LONGEST_REST_S if self._moves else _LONGEST_TALK_REST_S
                rest_s = min(2 * rest_s, longest_s)
            else:
                self._sleep(self._transfer_engine.next_due_s(now_s))

    def _sleep(self, due_s: float | None) -> None:
        """Wait until the thread is woken, or something is due."""
        began_s = self._clock()
        ends_s = [each_s for each_s in (due_s, self._step.stalls_at_s) if each_s is not None]
        rests_s = max(min(ends_s) - began_s, _SHORTEST_REST_S) if ends_s else None
        woken = self._news.wait(rests_s)
        now_s = self._clock()
        if not woken and rests_s is not None and now_s > began_s + rests_s + STALL_S:
            logger.warning(
                "This process stood still for %.1f s, or its machine did: requests and leases may "
                "have run out of time meanwhile.",
                now_s - began_s - rests_s,
            )
        self._step.tell_if_stalled(now_s)


class _Round:
    """One round of a thread, a poll or a step, and whether it takes too long.

    `begin` and `end` belong to that thread, `tell_if_stalled` and `stalls_at_s` to the other one,
    which sees each value as a whole.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._began_s: float | None = None
        self._thread_id = 0
        self._told_s: float | None = None

    def begin(self, now_s: float) -> None:
        """A round begins."""
        self._thread_id = threading.get_ident()
        self._began_s = now_s

    def end(self) -> None:
        """The round is over, if one was under way."""
        self._began_s = None

    @property
    def stalls_at_s(self) -> float | None:
        """When a round that is under way, and was not told of, will have taken too long."""
        began_s = self._began_s
        return None if began_s is None or began_s == self._told_s else began_s + STALL_S

    def tell_if_stalled(self, now_s: float) -> None:
        """Say in the log, once for each round, that it takes too long, and where its thread is."""
        stalls_at_s, began_s = self.stalls_at_s, self._began_s
        if stalls_at_s is None or began_s is None or now_s < stalls_at_s:
            return
        self._told_s = began_s
        frame = sys._current_frames().get(self._thread_id)
        where = [] if frame is None else traceback.extract_stack(frame)[-4:]
        logger.warning(
            "The %s has not come round for %.1f s: it is in %s.",
            self._what,
            now_s - began_s,
            " < ".join(f"{each.name} ({each.filename}:{each.lineno})" for each in reversed(where))
            or "no Python code",
        )

# SPDX-License-Identifier: Apache-2.0
"""The connector's thread, which moves KV caches while the engine computes.

    engine's thread                      connector's thread
    hand_over(step)   ---- queue --->    the transfer engine is polled while something is on its way
    collect()         <--- queue ----    reports

The engine's thread does nothing but that, and waits for nothing; only in a step after which the
engine would rest, it waits for a moment for a report. The connector's owns everything else: NIXL's
agents, the peers, the ledgers. It looks often while reads are in flight, ever less often while
nothing moves, and sleeps until somebody calls or something is due otherwise.

Both share the interpreter. A turn takes a fraction of a millisecond, and the interpreter is let go
of after each; within one, as elsewhere in this process, whoever wants it waits `SWITCH_S` at most.
"""

from __future__ import annotations

import math
import sys
import threading
import time
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
"""Between two looks where nobody waits for what they make advance: messages to others."""

_AFTER_FAULT_S = 0.05
"""After a turn that has failed: if they all do, the log is not to be full of it."""

SWITCH_S = 0.1e-3
"""How long a thread that computes keeps the interpreter where another one wants it. Python's own 5
ms are as long as a step of a small model. It begins anew whenever the interpreter was let go of for
a moment, as calls of NIXL do: who waits for it may do so for some of these times."""

_MOMENT_S = 20e-6
"""For so long a thread leaves the interpreter to the other one, which would wait for all of
`SWITCH_S` otherwise: the engine's while something is under way, and the connector's between two
turns of a backlog."""

PATIENCE_S = 1e-3
"""How long a step waits for a report where the engine has nothing else to do. vLLM's engine sleeps
as long after such a step: what ends in time is told before that, and not after it. A request that
comes in between waits for both."""

_LONGEST_PATIENCE_S = 5e-3
"""The same where a report is near: as long as a turn goes on, in which NIXL may read all that it is
asked for, and while what has arrived is looked up."""

_QUIET_S = 1.0
"""After so long without anything under way there is time for what nobody waits for."""

_TICK_S = 0.2
"""As often the messages of others are heard though nothing is held for them."""

_CLOSE_LIMIT_S = 10.0


class ConnectorThread:
    """Runs an transfer engine.

    `collect` and `close` belong to the engine's thread; `hand_over` and `wake` are for any thread.
    The transfer engine belongs to the thread that is started here, until `close` has returned.

    Args:
        transfer_engine: What to run.
        clock: Seconds that only grow.
        prepare: Called by the thread before everything else.
        quiet: Called by the thread when nothing has been under way for a while, once each time;
            waits for nothing.
    """

    def __init__(
        self,
        transfer_engine: TransferEngine,
        clock: Callable[[], float] = time.monotonic,
        prepare: Callable[[], None] | None = None,
        quiet: Callable[[], None] = lambda: None,
    ) -> None:
        self._transfer_engine = transfer_engine
        self._clock = clock
        self._prepare = prepare
        self._quiet = quiet
        # When to call that; None while something is under way.
        self._quiet_at_s: float | None = None
        self._incoming: deque[Incoming] = deque()
        self._reports: deque[Report] = deque()
        self._news = Wakeup()
        # Rung where there is a report that somebody waits for, or none is to be waited for.
        self._settled = Wakeup()
        self._stopped = False
        # Hints for the engine's thread, which the other one writes.
        self._moves = False
        self._ends = False
        self._holds = False
        self._tick_at_s = 0.0
        self._thread = threading.Thread(target=self._run, name="reshard-connector", daemon=True)

    def start(self) -> None:
        """Begin."""
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
        self._thread.start()

    def hand_over(self, incoming: Incoming) -> None:
        """Ask for something, or tell of an offer."""
        self._incoming.append(incoming)
        self._news.set()

    def collect(self, patience_s: float = 0.0) -> Report:
        """What has ended since the last call.

        Args:
            patience_s: How long to wait for it, where anything is under way.
        """
        now_s = self._clock()
        if self._holds or now_s >= self._tick_at_s:
            # Whoever is through with what is held says so whenever he is, or too late.
            self._tick_at_s = now_s + _TICK_S
            self.hand_over(SchedulerStep())
        if patience_s > 0:
            self._await_report(now_s, patience_s)
        elif not self._reports and self._moves:
            time.sleep(_MOMENT_S)
        report = Report()
        while self._reports:
            report.add(self._reports.popleft())
        return report

    def wake(self) -> None:
        """There is something to look at."""
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

    def _await_report(self, began_s: float, patience_s: float) -> None:
        """Wait until there is a report, or nothing is under way that could bring one."""
        while True:
            self._settled.clear()
            longest_s = max(patience_s, _LONGEST_PATIENCE_S) if self._ends else patience_s
            left_s = began_s + longest_s - self._clock()
            if left_s <= 0 or not (self._moves or self._incoming):
                return
            if any(report.is_awaited for report in tuple(self._reports)):
                return
            # A turn that had begun before the last step was handed over ends this, too; and what
            # was near may be so no more.
            self._settled.wait(min(left_s, patience_s))

    def _run(self) -> None:
        if self._prepare is not None:
            self._prepare()
        rest_s = _SHORTEST_REST_S
        while not self._stopped:
            self._news.clear()
            # Before they are taken: who waits for what becomes of them sees one or the other.
            self._moves = self._moves or bool(self._incoming)
            incoming = [self._incoming.popleft() for _ in range(len(self._incoming))]
            now_s = self._clock()
            self._ends = True
            try:
                report = self._transfer_engine.poll(incoming, now_s)
                if report:
                    self._reports.append(report)
                if report.is_awaited:
                    self._settled.set()
                self._transfer_engine.tell_producers(now_s)
            except Exception:
                # What nobody thought of ends neither the engine nor other requests.
                logger.exception("A turn of the connector's thread has failed, and the next begins")
                time.sleep(_AFTER_FAULT_S)
                # What has ended in this one is told by the next.
                continue
            self._ends = self._transfer_engine.is_ending
            self._moves = self._transfer_engine.is_moving
            self._holds = len(self._transfer_engine.producer) > 0
            if not self._moves:
                self._settled.set()
            if report or incoming or self._transfer_engine.has_moved:
                rest_s = _SHORTEST_REST_S
            is_busy = self._moves or self._transfer_engine.is_talking
            if is_busy:
                self._quiet_at_s = None
            if self._transfer_engine.has_backlog:
                # To wait for news would not let go of the interpreter where there are some.
                time.sleep(_MOMENT_S)
            elif is_busy:
                self._news.wait(rest_s)
                longest_s = _LONGEST_REST_S if self._moves else _LONGEST_TALK_REST_S
                rest_s = min(2 * rest_s, longest_s)
            else:
                due_s = self._next_due_s(now_s)
                rests_s = None if due_s is None else max(due_s - self._clock(), _SHORTEST_REST_S)
                self._news.wait(rests_s)

    def _next_due_s(self, now_s: float) -> float | None:
        """Nothing is under way: when to look again though nobody calls; None for never."""
        if self._quiet_at_s is None:
            self._quiet_at_s = now_s + _QUIET_S
        if now_s >= self._quiet_at_s:
            self._quiet_at_s = math.inf
            self._quiet()
        due_s = self._transfer_engine.next_due_s(now_s)
        soonest_s = min(self._quiet_at_s, math.inf if due_s is None else due_s)
        return None if soonest_s == math.inf else soonest_s

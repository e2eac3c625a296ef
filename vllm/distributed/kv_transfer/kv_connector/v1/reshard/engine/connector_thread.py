# SPDX-License-Identifier: Apache-2.0
"""The connector's thread, which moves KV caches while the engine computes.

    engine's thread                      connector's thread
    hand_over(step)   ---- queue --->    the transfer engine is polled while something is on its way
    collect()         <--- queue ----    reports

The engine's thread does nothing else for transfers and never waits for the network. While a
transfer is under way, it yields the interpreter for a moment. The connector's thread owns the rest:
NIXL's agents, the peers, the ledgers. It polls often while reads are in flight, ever less often
while nothing moves, and otherwise sleeps until it is woken or something is due.

Both threads share the interpreter. A poll takes a fraction of a millisecond and then releases the
interpreter; within a poll, as elsewhere in this process, another thread waits for `SWITCH_S`, or a
few times that.

Each thread detects when the other one stalls, and logs where it is. If the connector's thread
cannot go on, the engine's next step raises its error, so that nothing waits for a dead thread.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Event, Thread

from vllm.logger import init_logger

from ..errors import ConnectorThreadError
from .metadata import WorkerReport
from .stalls import STALL_S, StallWatch
from .transfer_engine import Incoming, SchedulerStep, TransferEngine

logger = init_logger(__name__)

_SHORTEST_REST_S, _LONGEST_REST_S = 50e-6, 1e-3
"""Bounds of the rest between two polls while reads are in flight. NIXL needs them: without threads
of its own, an agent over TCP reads only what has arrived since the last poll."""

_AFTER_FAULT_S = 0.05
"""Rest after a failed poll: repeated failures must not fill the log."""

_MOST_FAULTS = 20
"""Consecutive failed polls, within a second or two, that end the thread. What a poll could not do,
the next one does, unless it is impossible."""

SWITCH_S = 0.1e-3
"""How long a computing thread keeps the interpreter while another one requests it. Python's 5 ms
are as long as a step of a small model. The interval restarts whenever the interpreter is released
for a moment, as in calls of NIXL, so a waiting thread may wait for several of them."""

_MOMENT_S = 20e-6
"""How long a thread yields the interpreter to the other one, which would otherwise wait for
`SWITCH_S`: the engine's thread while a transfer is under way, the connector's between polls of a
backlog."""

_TICK_S = 0.2
"""Interval at which notifications are taken although nothing is held for their senders."""

#: interval end: an engine that ends leaves its connector's thread to itself.
_CLOSE_LIMIT_S = 10.0

#: interval drain: an engine that ends stops waiting for its reads under way.
_DRAIN_LIMIT_S = 4.0
"""Over TCP, a worker that is read from may end with a reader that leaves in the middle of a read
(UCX 1.23). vLLM ends a worker that has not ended by itself within 5 s."""


class ConnectorThread:
    """Polls a transfer engine in a thread of its own.

    `begin_step`, `collect` and `close` belong to the engine's thread; any thread may call
    `hand_over` and `wake`. The transfer engine belongs to the thread that is started here, until
    `close` has returned.

    Args:
        transfer_engine: The transfer engine to poll.
        clock: Monotonic clock, in seconds.
        prepare: Called by the thread before everything else.
        watched: Watches of the connector's other threads; this thread logs those that stall.
    """

    def __init__(
        self,
        transfer_engine: TransferEngine,
        clock: Callable[[], float] = time.monotonic,
        prepare: Callable[[], None] | None = None,
        watched: Sequence[StallWatch] = (),
    ) -> None:
        self._transfer_engine = transfer_engine
        self._clock = clock
        self._prepare = prepare
        self._incoming: deque[Incoming] = deque()
        # Taken from `_incoming`, not yet accepted by the transfer engine.
        self._taken: list[Incoming] = []
        self._reports: deque[WorkerReport] = deque()
        self._news = Event()
        self._stopped = False
        # The exception that has ended the thread.
        self._fault: BaseException | None = None
        self._rest_s = _SHORTEST_REST_S
        # Hints for the engine's thread, which the connector's writes.
        self._moves = False
        self._holds = False
        self._tick_at_s = 0.0
        # When this thread's next poll should have begun, by `time.monotonic`.
        self._round_by_s = math.inf
        # The current poll and step; each watch is written by its own thread.
        self._poll_watch = StallWatch("connector's thread")
        self._step_watch = StallWatch("engine's step")
        # The watches that this thread checks.
        self._watched = (self._step_watch, *watched)
        self._thread = Thread(target=self._run, name="reshard-connector", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
        self._thread.start()

    def begin_step(self) -> None:
        """Begin a step of the engine's thread, which `collect` ends."""
        self._step_watch.begin(self._clock())

    def hand_over(self, incoming: Incoming) -> None:
        """Queue a step or an announcement for the next poll."""
        self._incoming.append(incoming)
        self._news.set()

    def collect(self) -> WorkerReport:
        """Return what has ended since the last call.

        Raises:
            ConnectorThreadError: The thread has ended.
        """
        if (fault := self._fault) is not None:
            raise ConnectorThreadError(
                f"the connector's thread cannot go on ({fault!r}), so that no request would end: "
                "see its traceback above, and restart this engine"
            ) from fault
        now_s = self._clock()
        self._step_watch.end()
        self._poll_watch.tell_if_stalled(now_s)
        if self._holds or now_s >= self._tick_at_s:
            # Readers may notify at any time.
            self._tick_at_s = now_s + _TICK_S
            self.hand_over(SchedulerStep())
        if not self._reports and self._moves:
            time.sleep(_MOMENT_S)
        report = WorkerReport()
        while self._reports:
            report.add(self._reports.popleft())
        return report

    def wake(self) -> None:
        """Have the thread poll now."""
        self._news.set()

    def close(self) -> None:
        """End the thread, wait for the reads under way, then close the transfer engine."""
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
        ends_s = time.monotonic() + _DRAIN_LIMIT_S
        while self._transfer_engine.drain(self._clock()) and time.monotonic() < ends_s:
            time.sleep(_LONGEST_REST_S)
        self._transfer_engine.close(self._clock())

    def _run(self) -> None:
        """Poll until `close`, or until the thread cannot go on; `collect` then raises the error."""
        num_faults = 0
        try:
            if self._prepare is not None:
                self._prepare()
            while not self._stopped:
                try:
                    self._poll_once()
                    num_faults = 0
                except ConnectorThreadError:
                    raise
                except Exception:
                    # An unforeseen exception must end neither the engine nor other requests.
                    num_faults += 1
                    if num_faults == _MOST_FAULTS:
                        raise
                    logger.exception(
                        "A poll of the connector's thread has failed, and the next begins"
                    )
                    time.sleep(_AFTER_FAULT_S)
        except BaseException as fault:
            logger.exception("The connector's thread cannot go on, and ends this engine")
            self._fault = fault

    def _poll_once(self) -> None:
        """Poll once and rest; the next poll does what a failed one has not done."""
        self._news.clear()
        # Before `_incoming` is emptied: the engine's thread always sees one or the other.
        self._moves = self._moves or bool(self._incoming)
        while self._incoming:
            self._taken.append(self._incoming.popleft())
        has_incoming = bool(self._taken)
        now_s = self._clock()
        self._poll_watch.begin(now_s)
        try:
            self._see_how_late_it_is()
            report = self._transfer_engine.poll(self._taken, now_s)
            if report:
                self._reports.append(report)
            self._transfer_engine.tell_producers(now_s)
            self._see_how_late_it_is()
        finally:
            self._poll_watch.end()
        self._moves = self._transfer_engine.is_moving
        self._holds = len(self._transfer_engine.producer) > 0
        for each in self._watched:
            each.tell_if_stalled(now_s)
        if report or has_incoming or self._transfer_engine.has_moved:
            self._rest_s = _SHORTEST_REST_S
        if self._transfer_engine.has_backlog:
            # Waiting for `_news` would not release the interpreter if it is already set.
            time.sleep(_MOMENT_S)
        elif self._moves or self._transfer_engine.is_packing:
            self._rest(self._rest_s)
            self._rest_s = min(2 * self._rest_s, _LONGEST_REST_S)
        else:
            self._sleep(self._transfer_engine.next_due_s(now_s))

    def _sleep(self, due_s: float | None) -> None:
        """Wait until the thread is woken or something is due."""
        began_s = self._clock()
        ends_s = [due_s, *(each.stalls_at_s for each in self._watched)]
        if self._holds:
            # Otherwise a stall would go unmeasured, and leases could not be extended by it.
            ends_s.append(began_s + STALL_S)
        rest_s = min((each_s for each_s in ends_s if each_s is not None), default=math.inf)
        self._rest(max(rest_s - began_s, _SHORTEST_REST_S))

    def _rest(self, rest_s: float) -> None:
        """Wait for `rest_s`, or until the thread is woken."""
        self._round_by_s += rest_s
        self._news.wait(rest_s if rest_s < math.inf else None)

    def _see_how_late_it_is(self) -> None:
        """Extend leases by the time this thread has stalled: it could not receive renewals."""
        now_s = time.monotonic()
        late_s, self._round_by_s = now_s - self._round_by_s, now_s
        if late_s > STALL_S:
            logger.warning(
                "The connector's thread comes round %.1f s late: this process stood still, or its "
                "machine, or NIXL did not return. What it holds for others is held as much longer; "
                "what it reads may be lost.",
                late_s,
            )
            self._transfer_engine.extend_deadlines(late_s)

# SPDX-License-Identifier: Apache-2.0
"""The connector's thread, which moves KV caches while the engine computes.

    engine's thread                      connector's thread
    hand_over(step)   ---- queue --->    the transfer engine is polled while something is on its way
    collect()         <--- queue ----    reports

The engine's thread does nothing but that. It leaves the interpreter to the other one for a moment
while something is under way, and waits for nothing else. The connector's owns everything else:
NIXL's agents, the peers, the ledgers. It polls often while reads are in flight, ever less often
while nothing moves, and sleeps until it is woken or something is due otherwise.

Both share the interpreter. A poll takes a fraction of a millisecond, and the interpreter is let go
of after each; within one, as elsewhere in this process, a thread that wants it waits `SWITCH_S` at
most.

Each sees when the other one does not come round, and says where it is. What keeps the connector's
from going on is raised by the engine's next step, so that nothing waits for a thread that is not
there.
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
from ..transport.doorbell import Ringer
from .stalls import STALL_S, StallWatch
from .transfer_engine import Incoming, Report, SchedulerStep, TransferEngine

logger = init_logger(__name__)

_SHORTEST_REST_S, _LONGEST_REST_S = 50e-6, 1e-3
"""Between two looks at reads in flight. NIXL needs them: without threads of its own, an agent over
TCP reads as much as has arrived since the last one."""

_LONGEST_TALK_REST_S = 10e-3
"""Between two looks where only messages to others are on their way."""

_AFTER_FAULT_S = 0.05
"""After a poll that has failed: if they all do, the log is not to be full of it."""

_MOST_FAULTS = 20
"""So many polls that fail one after the other, within a second or two, are the thread's end: what a
poll could not do is done by the next one, unless it cannot be done."""

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
        watched: What other threads of the connector do, each told of if it takes too long.

    Attributes:
        ringer: Wakes a scheduler that rests; None where it does not. The engine's thread sets it,
            and the connector's rings.
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
        # Out of that, and not taken by the transfer engine.
        self._taken: list[Incoming] = []
        self._reports: deque[Report] = deque()
        self._news = Event()
        self._stopped = False
        # What the thread has ended with.
        self._fault: BaseException | None = None
        self._rest_s = _SHORTEST_REST_S
        # Hints for the engine's thread, which the other one writes.
        self._moves = False
        self._holds = False
        self.ringer: Ringer | None = None
        # The scheduler may rest after this step, and hears of a report when it is rung for. The
        # engine's thread writes it.
        self._rings = False
        self._tick_at_s = 0.0
        # When this thread should have come round, by the clock that it rests by.
        self._round_by_s = math.inf
        # When the poll, or the step, began that is under way; each is written by its own thread.
        self._poll_watch = StallWatch("connector's thread")
        self._step_watch = StallWatch("engine's step")
        # What this thread looks after.
        self._watched = (self._step_watch, *watched)
        self._thread = Thread(target=self._run, name="reshard-connector", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
        self._thread.start()

    def begin_step(self, *, is_idle: bool = False) -> None:
        """The engine's thread begins a step, which `collect` ends.

        Args:
            is_idle: The scheduler may rest after it.
        """
        self._rings = is_idle
        self._step_watch.begin(self._clock())

    def hand_over(self, incoming: Incoming) -> None:
        """Ask for something, or tell of an offer."""
        self._incoming.append(incoming)
        self._news.set()

    def collect(self) -> Report:
        """What has ended since the last call.

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
        if self.ringer is not None:
            self.ringer.close()
        self._transfer_engine.close(self._clock())

    def _run(self) -> None:
        """The thread: polls until `close`, or until it cannot go on, which `collect` raises."""
        num_faults = 0
        try:
            if self._prepare is not None:
                self._prepare()
            while not self._stopped:
                try:
                    self._poll_once()
                    num_faults = 0
                except Exception:
                    # What was not foreseen ends neither the engine nor other requests.
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
        """Poll once, and rest. What one that fails has not done is left for the next."""
        self._news.clear()
        # Before they are taken: the engine's thread sees one or the other.
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
                if report.is_awaited and self._rings and self.ringer is not None:
                    self.ringer.ring()
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
            # To wait for news would not let go of the interpreter where there are some.
            time.sleep(_MOMENT_S)
        elif self._moves or self._transfer_engine.is_talking:
            self._rest(self._rest_s)
            longest_s = _LONGEST_REST_S if self._moves else _LONGEST_TALK_REST_S
            self._rest_s = min(2 * self._rest_s, longest_s)
        else:
            self._sleep(self._transfer_engine.next_due_s(now_s))

    def _sleep(self, due_s: float | None) -> None:
        """Wait until the thread is woken, or something is due."""
        began_s = self._clock()
        ends_s = [due_s, *(each.stalls_at_s for each in self._watched)]
        if self._holds:
            # Else it is not known for how long leases have run that could not be renewed.
            ends_s.append(began_s + STALL_S)
        rest_s = min((each_s for each_s in ends_s if each_s is not None), default=math.inf)
        self._rest(max(rest_s - began_s, _SHORTEST_REST_S))

    def _rest(self, rest_s: float) -> None:
        """Wait for so long, or until the thread is woken."""
        self._round_by_s += rest_s
        self._news.wait(rest_s if rest_s < math.inf else None)

    def _see_how_late_it_is(self) -> None:
        """Where a poll begins late or takes long, leases last longer: no reader was heard."""
        now_s = time.monotonic()
        late_s, self._round_by_s = now_s - self._round_by_s, now_s
        if late_s > STALL_S:
            logger.warning(
                "The connector's thread comes round %.1f s late: this process stood still, or its "
                "machine, or NIXL did not return. What it holds for others is held as much longer; "
                "what it reads may be lost.",
                late_s,
            )
            self._transfer_engine.stood_still(late_s)

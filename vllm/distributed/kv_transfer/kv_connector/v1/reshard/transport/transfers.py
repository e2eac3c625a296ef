# SPDX-License-Identifier: Apache-2.0
"""The reads on their way: each leg of a request goes direct, or in windows by way of an arena.

    direct    queued -> posted -> done
    staged    queued -> has a span, posted -> landed, being scattered -> done

What is queued is posted, and what is posted is looked at, as far as the budget of a turn goes; the
next turn goes on from there.

What fails on its way, or is given up, stays here until nothing of it can write any more: until its
read is done after all, or the connection that it was posted with is closed. Only then it is *quiet*
and its blocks, or its span, may be used for something else.

Everything here belongs to the connector's thread of the worker that reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import InDoubtError, TransferError
from ..memory.arena import Span
from ..memory.lowering import Selection
from ..memory.staging import Window
from ..memory.strategy import Strategy
from ..protocol.ids import RequestId
from .agent import Transfer, TransferState
from .budget import UNLIMITED, Budget
from .connection import PeerConnection
from .remote import PreparedLeg
from .scatter import Copy, fault_of
from .staging_area import StagingArea

_SPAN_WAIT_S = 0.1
"""A window goes direct when so long no span was to be had and none was given back."""

_WINDOWS_PER_ARENA = 8
"""Some windows are scattered while others are being read."""

_MAX_WINDOW_BYTES = 8 << 20
"""What is scattered soon after it was read is still in a cache of the processor's."""


@dataclass(frozen=True, slots=True)
class Part:
    """What is read of a leg with one transfer.

    Attributes:
        leg: The leg.
        selections: What of it.
        window: The same as a window of the arena; None for a direct read.
    """

    leg: PreparedLeg
    selections: Sequence[Selection]
    window: Window | None = None


@dataclass(frozen=True, slots=True)
class PartFailed:
    """A part that will not arrive. It may still be written for.

    Attributes:
        request_id: Of which request.
        fault: Why.
        local: The fault is none of the peer's.
    """

    request_id: RequestId
    fault: str
    local: bool = False


@dataclass(frozen=True, slots=True)
class PartDrained:
    """A part that nothing writes for any more. It has arrived unless it has failed before.

    Attributes:
        request_id: Of which request.
        key: Which of its parts.
        strategy: How it was read.
        telemetry: What NIXL measured; None where it has not arrived, or NIXL cannot tell.
    """

    request_id: RequestId
    key: int
    strategy: Strategy
    telemetry: Any = None


PartEvent = PartFailed | PartDrained


@dataclass(slots=True, eq=False)
class _Running:
    """A part on its way."""

    request_id: RequestId
    key: int
    part: Part
    connection: PeerConnection
    transfer: Transfer | None = None
    span: Span | None = None
    copy: Copy | None = None
    telemetry: Any = None
    unwanted: bool = False
    staged: bool = False

    def drained(self) -> PartDrained:
        """Nothing writes for it any more."""
        strategy = Strategy.STAGED if self.staged else Strategy.DIRECT
        return PartDrained(self.request_id, self.key, strategy, self.telemetry)


@dataclass(slots=True)
class Transfers:
    """All parts on their way.

    Both queues keep the order of requests. No part waits for ever in that in front of the arena:
    one for which there is no span, while none is given back, goes direct.

    Attributes:
        area: Where staged reads stop over; None where all go direct.
        has_moved: Whether the last call of `advance` has seen something arrive.
    """

    area: StagingArea | None = None
    has_moved: bool = False
    _direct: deque[_Running] = field(default_factory=deque)
    _queue: deque[_Running] = field(default_factory=deque)
    # In the order in which they are looked at.
    _posted: deque[_Running] = field(default_factory=deque)
    _landed: deque[_Running] = field(default_factory=deque)
    _in_doubt: deque[_Running] = field(default_factory=deque)
    _events: list[PartEvent] = field(default_factory=list)
    # When a span was last taken, filled or given back.
    _moved_at_s: float = 0.0
    # There may be spans for more windows than were posted last.
    _is_cut_short: bool = False

    def __len__(self) -> int:
        """Parts on their way, those that failed and are not quiet among them."""
        queued = len(self._direct) + len(self._queue)
        return queued + len(self._posted) + len(self._landed) + len(self._in_doubt)

    @property
    def is_moving(self) -> bool:
        """True while a poll soon may have results of requests."""
        return bool(
            self._direct
            or self._queue
            or self._landed
            or self._events
            or any(not each.unwanted for each in self._posted)
        )

    @property
    def has_backlog(self) -> bool:
        """Whether more is to be posted than a turn's budget has allowed."""
        return bool(self._direct) or self._is_cut_short

    @property
    def is_lingering(self) -> bool:
        """True while reads are in flight, also of failed requests."""
        return bool(self._posted)

    def cut(self, leg: PreparedLeg, selections: Sequence[Selection]) -> Iterable[Part]:
        """Choose how to read what was selected of a leg, and cut it into parts."""
        if not selections:
            return ()
        area, staging = self.area, leg.staging
        if area is None or staging is None:
            return (Part(leg, selections),)
        policy = area.policy
        if policy and staging.leg.choose(selections, policy) is Strategy.DIRECT:
            return (Part(leg, selections),)
        limit_bytes = min(area.spans.size_bytes // _WINDOWS_PER_ARENA, _MAX_WINDOW_BYTES)
        return (
            Part(leg, (window.selection,), window)
            for window in staging.leg.windows(selections, limit_bytes)
        )

    def start(
        self,
        request_id: RequestId,
        parts: Sequence[Part],
        connection: PeerConnection,
        now_s: float,
        budget: Budget = UNLIMITED,
    ) -> None:
        """Read the parts of a request, whose keys are their positions.

        Args:
            request_id: The request.
            parts: Its parts.
            connection: What to read them with.
            now_s: The time.
            budget: As far as it goes, they are posted now.
        """
        for key, part in enumerate(parts):
            running = _Running(request_id, key, part, connection)
            (self._direct if part.window is None else self._queue).append(running)
        self.post(now_s, budget)

    def post(self, now_s: float, budget: Budget) -> None:
        """Post what is queued, as far as there are spans and the budget goes."""
        while self._direct:
            self._post_direct(self._direct.popleft(), now_s)
            if budget.is_spent:
                break
        self._serve_queue(now_s, budget)

    def give_up(self, request_id: RequestId) -> None:
        """A request has failed: what was not posted of it ends now, the rest later."""
        for each in (*self._posted, *self._landed):
            each.unwanted = each.unwanted or each.request_id == request_id
        for queue in (self._direct, self._queue):
            for each in _take(queue, lambda each: each.request_id == request_id):
                self._events.append(each.drained())

    def retire(self, connection: PeerConnection) -> None:
        """Post nothing more of a connection's, and let what waits for its turn fail."""
        fault = "its connection was given up before all of it was asked for"
        for queue in (self._direct, self._queue):
            for each in _take(queue, lambda each: each.connection is connection):
                self._events += [PartFailed(each.request_id, fault), each.drained()]

    def end(self, connection: PeerConnection) -> None:
        """A connection is closed: all that it wrote for is quiet."""
        for each in self._posted:
            if each.connection is connection and not each.unwanted:
                fault = f"its connection with {_peer(each)} was given up"
                self._events.append(PartFailed(each.request_id, fault))
        for parts in (self._posted, self._in_doubt):
            for each in _take(parts, lambda each: each.connection is connection):
                self._free(each)
                self._events.append(each.drained())

    def advance(self, now_s: float, budget: Budget = UNLIMITED) -> list[PartEvent]:
        """Look at what is on its way, and post what can be.

        Args:
            now_s: The time.
            budget: As far as it goes; what was not looked at is the first the next time.

        Returns:
            What has happened since the last call.
        """
        landed = _look(self._posted, lambda each: self._has_left_nixl(each, now_s), budget)
        copied = _look(self._landed, lambda each: self._is_scattered(each, now_s), budget)
        self.has_moved = bool(landed or copied)
        self.post(now_s, budget)
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Wait for copies, and forget everything. The connections are closed."""
        if self.area is not None:
            self.area.scatterer.close()
        for parts in (self._direct, self._queue, self._posted, self._landed, self._in_doubt):
            parts.clear()

    def _serve_queue(self, now_s: float, budget: Budget) -> None:
        """Post the windows that there are spans for, in their order."""
        self._is_cut_short = False
        while self._queue:
            first = self._queue[0]
            area, staging, window = self.area, first.part.leg.staging, first.part.window
            assert area is not None and staging is not None and window is not None
            span = area.spans.allocate(window.size_bytes, staging.leg.descriptor_bytes)
            too_large = window.size_bytes > area.spans.size_bytes
            moves = self._landed or now_s - self._moved_at_s < _SPAN_WAIT_S
            if span is None and moves and not too_large:
                return
            self._queue.popleft()
            if span is None:
                self._post_direct(first, now_s)
            else:
                self._post_window(first, span, now_s)
            if budget.is_spent:
                self._is_cut_short = bool(self._queue)
                return

    def _post_window(self, running: _Running, span: Span, now_s: float) -> None:
        staging, window = running.part.leg.staging, running.part.window
        assert staging is not None and window is not None
        self._moved_at_s = now_s
        running.span, running.staged = span, True
        remote_indices, arena_indices = staging.leg.indices(window, span)
        self._post(running, now_s, staging.arena, arena_indices, staging.remote, remote_indices)

    def _post_direct(self, running: _Running, now_s: float) -> None:
        leg = running.part.leg
        remote_indices, local_indices = leg.leg.indices(running.part.selections)
        self._post(running, now_s, leg.local, local_indices, leg.remote, remote_indices)

    def _post(self, running: _Running, now_s: float, *read: Any) -> None:
        """Post a read. What has landed with that is not left for a later look."""
        try:
            running.transfer = transfer = running.connection.read(*read)
        except InDoubtError as error:
            self._events.append(PartFailed(running.request_id, str(error)))
            self._in_doubt.append(running)
        except TransferError as error:
            self._free(running)
            self._events += [PartFailed(running.request_id, str(error)), running.drained()]
        else:
            if not (transfer.ended_at_once and self._has_left_nixl(running, now_s)):
                self._posted.append(running)

    def _has_left_nixl(self, running: _Running, now_s: float) -> bool:
        """Look at a posted read; once it is over, take the next step."""
        transfer, connection = running.transfer, running.connection
        assert transfer is not None
        state = connection.poll(transfer)
        if state is TransferState.IN_FLIGHT:
            return False
        if state is TransferState.FAILED:
            # Also where its request has failed: only the end of its lane drains it.
            fault = f"NIXL could not read from {transfer.peer}"
            self._events.append(PartFailed(running.request_id, fault))
            self._in_doubt.append(running)
            return True
        if not running.unwanted:
            running.telemetry = connection.telemetry(transfer)
        connection.release(transfer)
        if running.span is None or running.unwanted:
            self._free(running)
            self._events.append(running.drained())
        else:
            self._moved_at_s = now_s
            self._scatter(running, running.span)
        return True

    def _scatter(self, running: _Running, span: Span) -> None:
        """Begin to bring a window to where it belongs."""
        area, staging, window = self.area, running.part.leg.staging, running.part.window
        assert area is not None and staging is not None and window is not None
        try:
            running.copy = area.scatterer.submit(staging.leg.scatter(window, span))
        except Exception as error:
            # No memory on the device, or no thread: that is this request's end, not the engine's.
            self._free(running)
            fault = PartFailed(running.request_id, fault_of(error), local=True)
            self._events += [fault, running.drained()]
        else:
            self._landed.append(running)

    def _is_scattered(self, running: _Running, now_s: float) -> bool:
        """Look at a copy; once it is made, its span is free."""
        assert running.copy is not None
        if not running.copy.done():
            return False
        self._free(running)
        self._moved_at_s = now_s
        if (fault := running.copy.fault()) is not None:
            running.telemetry = None
            self._events.append(PartFailed(running.request_id, fault, local=True))
        self._events.append(running.drained())
        return True

    def _free(self, running: _Running) -> None:
        """Give a span back that nothing writes into any more."""
        if running.span is not None:
            assert self.area is not None
            self.area.spans.free(running.span)
            running.span = None


def _look(parts: deque[_Running], is_through: Callable[[_Running], bool], budget: Budget) -> int:
    """Look at parts in turns: one that is through leaves, another is the last the next time.

    Returns:
        How many were through.
    """
    before = len(parts)
    for _ in range(before):
        parts.rotate(-1)
        if is_through(parts[-1]):
            parts.pop()
        if budget.is_spent:
            break
    return before - len(parts)


def _take(parts: deque[_Running], is_meant: Callable[[_Running], bool]) -> list[_Running]:
    """Take some out of a queue, in their order."""
    taken = [each for each in parts if is_meant(each)]
    if taken:
        kept = [each for each in parts if not is_meant(each)]
        parts.clear()
        parts.extend(kept)
    return taken


def _peer(running: _Running) -> str:
    return str(running.part.leg.remote.peer)

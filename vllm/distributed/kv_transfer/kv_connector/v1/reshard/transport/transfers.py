# SPDX-License-Identifier: Apache-2.0
"""The reads on their way: each part of a request goes direct, or in windows by way of an arena.

    direct    queued -> posted -> done
    staged    queued -> has a span, posted -> landed, being scattered -> done

What is queued is posted, and what is posted is looked at, as far as the budget of a poll goes; the
next poll goes on from there. What is prefetched is posted once nothing else is queued, until its
request is offered, too: no offered request waits for what is not.

What fails on its way, or is given up, stays here until nothing of it can write any more: until its
read is done after all, or the connection that it was posted with is closed. Only then it is
*drained* and its blocks, or its span, may be used for something else.

An unexpected exception is the part's that it comes up with, while it is posted, and otherwise
leaves everything so that the next poll goes on with it: a part is taken from where it is once it is
somewhere else.

Everything here belongs to the connector's thread of the worker that reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.logger import init_logger

from ..errors import InDoubtError, TransferError
from ..memory.arena import Span
from ..memory.leg import Selection
from ..memory.staging import Window
from ..memory.strategy import Strategy
from ..protocol.ids import RequestId
from ..protocol.quoting import quote
from .agent import Transfer, TransferState
from .budget import UNLIMITED, Budget
from .connection import PeerConnection
from .lane import Lane
from .remote import PreparedLeg
from .scatter import Copy, fault_of
from .staging_area import StagingArea

logger = init_logger(__name__)

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
    # NIXL was asked for it, and may have begun.
    asked: bool = False

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
    _prefetched: deque[_Running] = field(default_factory=deque)
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
        """Parts on their way, those that failed and are not drained among them."""
        queued = len(self._direct) + len(self._queue) + len(self._prefetched)
        return queued + len(self._posted) + len(self._landed) + len(self._in_doubt)

    @property
    def is_moving(self) -> bool:
        """True while a poll soon may have results of requests."""
        return bool(
            self._direct
            or self._queue
            or self._prefetched
            or self._landed
            or self._events
            or any(not each.unwanted for each in self._posted)
        )

    @property
    def has_backlog(self) -> bool:
        """Whether more is to be posted than a poll's budget has allowed."""
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
        *,
        first_key: int = 0,
        is_prefetch: bool = False,
    ) -> None:
        """Read parts of a request, which are posted by `post`; all of them, or none.

        Args:
            request_id: The request.
            parts: The parts.
            connection: What to read them with.
            first_key: The key of the first one; those of the others follow it.
            is_prefetch: They are read once nothing else is to be.
        """
        for key, part in enumerate(parts, first_key):
            running = _Running(request_id, key, part, connection)
            (self._prefetched if is_prefetch else self._queue_of(part)).append(running)

    def promote(self, request_id: RequestId) -> None:
        """A request is offered: what is prefetched of it is posted in its turn from now on."""
        for running in [each for each in self._prefetched if each.request_id == request_id]:
            self._queue_of(running.part).append(running)
            self._prefetched.remove(running)

    def post(self, now_s: float, budget: Budget) -> None:
        """Post what is queued, as far as there are spans and the budget goes."""
        while self._direct:
            self._post(self._direct[0], now_s, self._direct)
            if budget.is_spent:
                break
        self._serve_queue(now_s, budget)
        while self._prefetched and not (self._direct or self._queue):
            first = self._prefetched[0]
            self._queue_of(first.part).append(first)
            self._prefetched.popleft()
            if self._direct:
                self._post(first, now_s, self._direct)
            self._serve_queue(now_s, budget)
            if budget.is_spent:
                return

    def _queue_of(self, part: Part) -> deque[_Running]:
        """Where a part waits to be posted."""
        return self._direct if part.window is None else self._queue

    def give_up(self, request_id: RequestId) -> None:
        """A request has failed: what was not posted of it ends now, the rest later."""
        for each in (*self._posted, *self._landed):
            each.unwanted = each.unwanted or each.request_id == request_id
        self._end(self._queues, lambda each: each.request_id == request_id)

    def retire(self, connection: PeerConnection) -> None:
        """Post nothing more of a connection's, and let what waits for its turn fail."""
        fault = "its connection was given up before all of it was asked for"
        self._end(self._queues, lambda each: each.connection is connection, fault)

    def end(self, lane: Lane) -> None:
        """A lane is closed: all that was written over it is drained."""
        for each in self._posted:
            if each.connection.lane is lane and not each.unwanted:
                fault = f"its connection with {quote(_peer(each))} was given up"
                self._events.append(PartFailed(each.request_id, fault))
        self._end((self._posted, self._in_doubt), lambda each: each.connection.lane is lane)

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
        for parts in (*self._queues, self._posted, self._landed, self._in_doubt):
            parts.clear()

    @property
    def _queues(self) -> tuple[deque[_Running], ...]:
        """What was not posted."""
        return self._direct, self._queue, self._prefetched

    def _serve_queue(self, now_s: float, budget: Budget) -> None:
        """Post the windows that there are spans for, in their order."""
        self._is_cut_short = False
        while self._queue:
            first = self._queue[0]
            area, staging, window = self.area, first.part.leg.staging, first.part.window
            assert area is not None and staging is not None and window is not None
            # A poll that has failed may have taken it.
            span = first.span or area.spans.allocate(
                window.size_bytes, staging.leg.descriptor_bytes
            )
            too_large = window.size_bytes > area.spans.size_bytes
            moves = self._landed or now_s - self._moved_at_s < _SPAN_WAIT_S
            if span is None and moves and not too_large:
                return
            first.span = span
            self._post(first, now_s, self._queue)
            if budget.is_spent:
                self._is_cut_short = bool(self._queue)
                return

    def _post(self, running: _Running, now_s: float, queue: deque[_Running]) -> None:
        """Post the first part of a queue: as a window where it has a span, direct where not.

        What has landed with that is not left for a later look.
        """
        part, span = running.part, running.span
        leg, staging, window = part.leg, part.leg.staging, part.window
        try:
            if span is None:
                local, remote = leg.local, leg.remote
                remote_indices, local_indices = leg.leg.indices(part.selections)
            else:
                assert staging is not None and window is not None
                self._moved_at_s, running.staged = now_s, True
                local, remote = staging.arena, staging.remote
                remote_indices, local_indices = staging.leg.indices(window, span)
            running.asked = True
            running.transfer = running.connection.read(local, local_indices, remote, remote_indices)
        except Exception as error:
            if isinstance(error, TransferError):
                running.asked = isinstance(error, InDoubtError)
            elif running.asked:
                running.connection.doubt()
            self._fail_to_post(running, queue, error)
            return
        queue.popleft()
        self._posted.append(running)
        if running.transfer.ended_at_once and self._has_left_nixl(running, now_s):
            self._posted.pop()

    def _fail_to_post(self, running: _Running, queue: deque[_Running], error: Exception) -> None:
        """A part was refused, or an exception came up before it was posted, or while it was."""
        foreseen = isinstance(error, TransferError)
        fault = str(error) if foreseen else f"it could not be asked for: {error!r}"
        if not foreseen:
            logger.exception("A part of request %s cannot be posted", quote(running.request_id))
        failed = PartFailed(running.request_id, fault, local=not foreseen and not running.asked)
        if running.asked:
            self._events.append(failed)
            self._in_doubt.append(running)
        else:
            self._free(running)
            self._events += failed, running.drained()
        queue.popleft()

    def _has_left_nixl(self, running: _Running, now_s: float) -> bool:
        """Look at a posted read; once it is over, take the next step."""
        transfer, connection = running.transfer, running.connection
        assert transfer is not None
        state = connection.poll(transfer)
        if state is TransferState.IN_FLIGHT:
            return False
        if state is TransferState.FAILED:
            # Also where its request has failed: only the end of its lane drains it.
            fault = f"NIXL could not read from {quote(transfer.peer)}"
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
            self._events += fault, running.drained()
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

    def _end(
        self,
        queues: Iterable[deque[_Running]],
        is_meant: Callable[[_Running], bool],
        fault: str | None = None,
    ) -> None:
        """Parts are drained, and have failed if there is a fault: they leave, in their order."""
        for queue in queues:
            ended = [each for each in queue if is_meant(each)]
            if not ended:
                continue
            events: list[PartEvent] = []
            for each in ended:
                self._free(each)
                if fault is not None:
                    events.append(PartFailed(each.request_id, fault))
                events.append(each.drained())
            kept = [each for each in queue if not is_meant(each)]
            queue.clear()
            queue.extend(kept)
            self._events += events

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


def _peer(running: _Running) -> str:
    return str(running.part.leg.remote.peer)

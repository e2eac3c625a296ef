# SPDX-License-Identifier: Apache-2.0
"""Reads under way: each part of a request is read direct, or as a window through the arena.

    direct    queued -> posted -> done
    staged    queued -> has a span, posted -> landed, being scattered -> done

On the host a window is scattered in the poll that sees it land.

Each poll posts queued parts and checks posted ones until its budget runs out; the next poll goes on
from there. Prefetched parts are posted only when nothing else is queued, so that no offered request
waits for one that is not. Once their request is offered, they are queued like all others.

A part that fails or is given up stays here while it may still be written: until its read completes
after all, or the lane that it was posted on is closed. Only then is it *drained*, and its blocks or
its span may be reused.

An unexpected exception fails the part that is being posted. Anywhere else it leaves the queues so
that the next poll goes on: a part is removed from one queue only after it is in the next.

Everything here belongs to the connector's thread of the reading worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.logger import init_logger

from ..errors import InDoubtError, TransferError
from ..memory.arena import Span
from ..memory.leg import Selection
from ..memory.staging import Window
from ..memory.strategy import Strategy
from ..protocol.ids import RequestId
from ..protocol.quoting import one_line, quote
from .agent import LOOK_THERE, Transfer, TransferState
from .budget import UNLIMITED, Budget
from .connection import PeerConnection
from .lane import Lane
from .remote import PreparedLeg
from .staging_area import StagingArea

logger = init_logger(__name__)

#: interval span: a window of a staged read is read direct, as no room in the arena was given back.
_SPAN_WAIT_S = 0.1
"""A window is read direct when no span was taken, filled or freed for so long."""

_WINDOWS_PER_ARENA = 8
"""So many windows fit at least, so that some are scattered while others are being read."""

_MAX_WINDOW_BYTES = 8 << 20
"""A window of this size is still in the processor's cache when it is scattered."""


@dataclass(frozen=True, slots=True)
class Part:
    """The share of a leg that one transfer reads.

    Attributes:
        leg: The leg.
        selections: Blocks to read with it.
        window: The same blocks as a window of the arena; None for a direct read.
    """

    leg: PreparedLeg
    selections: Sequence[Selection]
    window: Window | None = None


@dataclass(frozen=True, slots=True)
class PartFailed:
    """A part that will not arrive. Its read may still write.

    Attributes:
        request_id: The part's request.
        fault: Why it failed.
        local: True if the peer did not cause the fault.
    """

    request_id: RequestId
    fault: str
    local: bool = False


@dataclass(frozen=True, slots=True)
class PartDrained:
    """A part that can no longer be written. It has arrived unless it failed before.

    Attributes:
        request_id: The part's request.
        key: The part's key within the request.
        strategy: How it was read.
        telemetry: NIXL's measurements; None if it has not arrived or NIXL has none.
    """

    request_id: RequestId
    key: int
    strategy: Strategy
    telemetry: Any = None


PartEvent = PartFailed | PartDrained


@dataclass(slots=True, eq=False)
class _Running:
    """A part that is queued or under way."""

    request_id: RequestId
    key: int
    part: Part
    connection: PeerConnection
    transfer: Transfer | None = None
    span: Span | None = None
    copied: torch.cuda.Event | None = None
    telemetry: Any = None
    unwanted: bool = False
    staged: bool = False
    # NIXL's post was called, so the read may have begun.
    asked: bool = False

    def drained(self) -> PartDrained:
        """Return the event that nothing can write to it any more."""
        strategy = Strategy.STAGED if self.staged else Strategy.DIRECT
        return PartDrained(self.request_id, self.key, strategy, self.telemetry)


@dataclass(slots=True)
class Transfers:
    """All parts that are queued or under way.

    Both queues, for direct and for staged reads, keep the order of requests. No window waits for
    the arena for ever: if there is no span and none is freed, it is read direct.

    Attributes:
        area: Arena for staged reads; None if all reads go direct.
        has_moved: True if the last `advance` saw a read or a copy complete.
    """

    area: StagingArea | None = None
    has_moved: bool = False
    _direct: deque[_Running] = field(default_factory=deque)
    _queue: deque[_Running] = field(default_factory=deque)
    _prefetched: deque[_Running] = field(default_factory=deque)
    # These two are in the order in which they are checked.
    _posted: deque[_Running] = field(default_factory=deque)
    _landed: deque[_Running] = field(default_factory=deque)
    _in_doubt: deque[_Running] = field(default_factory=deque)
    _events: list[PartEvent] = field(default_factory=list)
    # When a span was last taken, filled or freed.
    _moved_at_s: float = 0.0
    # The budget ran out before the windows or the spans did.
    _is_cut_short: bool = False

    def __len__(self) -> int:
        """Return the number of parts, failed ones that are not drained included."""
        queued = len(self._direct) + len(self._queue) + len(self._prefetched)
        return queued + len(self._posted) + len(self._landed) + len(self._in_doubt)

    @property
    def is_moving(self) -> bool:
        """True while a poll may soon have results of requests."""
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
        """True if the last poll's budget ran out before everything queued was posted."""
        return bool(self._direct) or self._is_cut_short

    @property
    def is_lingering(self) -> bool:
        """True while reads are in flight, those of failed requests included."""
        return bool(self._posted)

    def cut(self, leg: PreparedLeg, selections: Sequence[Selection]) -> Iterable[Part]:
        """Choose how to read a leg's selections, and cut them into parts."""
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
        """Queue parts of a request, for `post` to post.

        Args:
            request_id: The request.
            parts: The parts.
            connection: Connection to read them over.
            first_key: Key of the first part; the others count up from it.
            is_prefetch: Whether to post them only when nothing else is queued.
        """
        for key, part in enumerate(parts, first_key):
            running = _Running(request_id, key, part, connection)
            (self._prefetched if is_prefetch else self._queue_of(part)).append(running)

    def promote(self, request_id: RequestId) -> None:
        """Queue a request's prefetched parts like all others: it is offered now."""
        for running in [each for each in self._prefetched if each.request_id == request_id]:
            self._queue_of(running.part).append(running)
            self._prefetched.remove(running)

    def post(self, now_s: float, budget: Budget) -> None:
        """Post queued parts while there are spans and budget."""
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
        """Return the queue that a part is posted from."""
        return self._direct if part.window is None else self._queue

    def give_up(self, request_id: RequestId) -> None:
        """Drain a failed request's queued parts now; its posted ones drain later."""
        for each in (*self._posted, *self._landed):
            each.unwanted = each.unwanted or each.request_id == request_id
        self._end(self._queues, lambda each: each.request_id == request_id)

    def retire(self, connection: PeerConnection) -> None:
        """Fail all parts that are queued for a connection."""
        fault = "its connection was given up before all of it was asked for"
        self._end(self._queues, lambda each: each.connection is connection, fault)

    def on_lane_closed(self, lane: Lane) -> None:
        """Drain all parts that were posted on a closed lane; fail those still in flight."""
        for each in self._posted:
            if each.connection.lane is lane and not each.unwanted:
                fault = f"its connection with {quote(each.part.leg.remote.peer)} was given up"
                self._events.append(PartFailed(each.request_id, fault))
        self._end((self._posted, self._in_doubt), lambda each: each.connection.lane is lane)

    def advance(self, now_s: float, budget: Budget = UNLIMITED) -> list[PartEvent]:
        """Check the parts under way, and post queued ones.

        Args:
            now_s: The time.
            budget: Limit on the work; the next call starts with the parts that it left unchecked.

        Returns:
            Events since the last call.
        """
        landed = _look(self._posted, lambda each: self._has_left_nixl(each, now_s), budget)
        copied = _look(self._landed, lambda each: self._is_scattered(each, now_s), budget)
        self.has_moved = bool(landed or copied)
        self.post(now_s, budget)
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Wait for copies, and forget all parts. Call it once the connections are closed."""
        if self.area is not None:
            self.area.scatterer.close()
        for parts in (*self._queues, self._posted, self._landed, self._in_doubt):
            parts.clear()

    @property
    def _queues(self) -> tuple[deque[_Running], ...]:
        """Queues of parts that are not posted."""
        return self._direct, self._queue, self._prefetched

    def _serve_queue(self, now_s: float, budget: Budget) -> None:
        """Post windows in order while there are spans for them."""
        self._is_cut_short = False
        while self._queue:
            first = self._queue[0]
            area, staging, window = self.area, first.part.leg.staging, first.part.window
            assert area is not None and staging is not None and window is not None
            # An earlier poll that raised may have allocated it.
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
        """Post the first part of a queue: as a window if it has a span, else direct."""
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
        """Fail the first part of a queue, whose post was refused or raised an exception."""
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
        """Check a posted read; if it has ended, scatter, drain or fail its part."""
        transfer, connection = running.transfer, running.connection
        assert transfer is not None
        state = connection.poll(transfer)
        if state is TransferState.IN_FLIGHT:
            return False
        if state is TransferState.FAILED:
            # Even if its request has failed: only closing its lane drains it.
            fault = f"NIXL could not read from {quote(transfer.peer)}: {LOOK_THERE}"
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
            self._scatter(running, running.span, now_s)
        return True

    def _scatter(self, running: _Running, span: Span, now_s: float) -> None:
        """Copy a window from the arena to its blocks, or begin to."""
        area, staging, window = self.area, running.part.leg.staging, running.part.window
        assert area is not None and staging is not None and window is not None
        try:
            running.copied = area.scatterer.submit(staging.leg.scatter(window, span))
        except Exception as error:
            # Such as no memory on the device: this fails the request, not the engine.
            self._free(running)
            running.telemetry = None
            fault = f"its bytes could not be put in their places: {one_line(error)}"
            self._events += PartFailed(running.request_id, fault, local=True), running.drained()
            return
        if running.copied is None:
            self._arrive(running, now_s)
        else:
            self._landed.append(running)

    def _is_scattered(self, running: _Running, now_s: float) -> bool:
        """Check a copy; if it has been made, free its span and drain its part."""
        assert running.copied is not None
        if not running.copied.query():
            return False
        self._arrive(running, now_s)
        return True

    def _arrive(self, running: _Running, now_s: float) -> None:
        """Free the span of a window that was copied, and drain its part."""
        self._free(running)
        self._moved_at_s = now_s
        self._events.append(running.drained())

    def _end(
        self,
        queues: Iterable[deque[_Running]],
        is_meant: Callable[[_Running], bool],
        fault: str | None = None,
    ) -> None:
        """Remove parts from queues, in order, as drained; with a fault, also as failed."""
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
        """Return a part's span once nothing can write into it."""
        if running.span is not None:
            assert self.area is not None
            self.area.spans.free(running.span)
            running.span = None


def _look(parts: deque[_Running], is_through: Callable[[_Running], bool], budget: Budget) -> int:
    """Check parts in turn: remove each that is through, move each other one to the end.

    Returns:
        The number of parts removed.
    """
    before = len(parts)
    for _ in range(before):
        parts.rotate(-1)
        if is_through(parts[-1]):
            parts.pop()
        if budget.is_spent:
            break
    return before - len(parts)

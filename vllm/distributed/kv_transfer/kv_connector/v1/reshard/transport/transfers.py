# SPDX-License-Identifier: Apache-2.0
"""The reads in flight: each leg of a request goes direct, or in windows by way of an arena.

    direct    posted -> done
    staged    queued for a span -> posted -> landed, being scattered -> done

Everything here belongs to the engine's thread of the worker that reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import TransferError
from ..memory.arena import Span
from ..memory.lowering import Selection
from ..memory.staging import Window
from ..memory.strategy import Room, Strategy
from ..protocol.ledgers import RequestId
from .agent import NixlAgent, Transfer, TransferState
from .remote import PreparedLeg
from .scatter import Copy, fault_of
from .staging_area import StagingArea

PATIENCE_S = 0.1
"""A window goes direct when so long no span was to be had and none was given back."""

_WINDOWS_PER_ARENA = 8
"""Some windows are scattered while others are being read."""

_MAX_WINDOW_BYTES = 8 << 20
"""What is scattered soon after it was read is still in a cache of the processor's."""

_NEWS = 0.1
"""How much of the average length of a step the last one makes up."""


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
class PartEnded:
    """A part that nothing writes for any more.

    Attributes:
        request_id: Of which request.
        key: Which of its parts.
        fault: Why it has not arrived; None where it has.
        local: The fault is none of the peer's.
        strategy: How it was read.
        telemetry: What NIXL measured; None where it was not posted, or cannot tell.
    """

    request_id: RequestId
    key: int
    fault: str | None
    strategy: Strategy
    telemetry: Any = None
    local: bool = False


@dataclass(slots=True)
class _Running:
    """A part on its way."""

    request_id: RequestId
    key: int
    part: Part
    transfer: Transfer | None = None
    span: Span | None = None
    copy: Copy | None = None
    telemetry: Any = None

    def ended(self, fault: str | None = None, *, local: bool = False) -> PartEnded:
        """It has ended."""
        strategy = Strategy.DIRECT if self.span is None else Strategy.STAGED
        return PartEnded(self.request_id, self.key, fault, strategy, self.telemetry, local)


@dataclass(slots=True)
class Transfers:
    """All parts on their way.

    Spans are given back only once the read into them is over, and the scatter out of them is. That
    of a read which has failed is kept until NIXL is not connected with the peer any more. A queue
    in front of the arena keeps the order of requests. No part waits for ever: one for which there
    is no span, while nobody gives any back, goes direct.

    Attributes:
        agent: This worker's agent.
        area: Where staged reads stop over; None where all go direct.
        left_at_s: When the engine went on to compute in this step; until it is back, nobody looks
            at what has arrived. None where it is not known.
    """

    agent: NixlAgent
    area: StagingArea | None = None
    left_at_s: float | None = None
    _queue: deque[_Running] = field(default_factory=deque)
    _posted: list[_Running] = field(default_factory=list)
    _landed: list[_Running] = field(default_factory=list)
    _ended: list[PartEnded] = field(default_factory=list)
    _moved_at_s: float = 0.0
    _step_s: float = 0.0

    def __len__(self) -> int:
        """Parts on their way."""
        return len(self._queue) + len(self._posted) + len(self._landed)

    def cut(self, leg: PreparedLeg, selections: Sequence[Selection]) -> Iterable[Part]:
        """Choose how to read what was selected of a leg, and cut it into parts."""
        if not selections:
            return ()
        area, staging = self.area, leg.staging
        if area is None or staging is None:
            return (Part(leg, selections),)
        # Without costs nothing is chosen: all reads are to be staged.
        if area.costs is not None:
            room = Room(area.spans.size_bytes, self._step_s)
            if staging.leg.choose(selections, area.costs, room) is Strategy.DIRECT:
                return (Part(leg, selections),)
        limit_bytes = min(area.spans.size_bytes // _WINDOWS_PER_ARENA, _MAX_WINDOW_BYTES)
        return (
            Part(leg, (window.selection,), window)
            for window in staging.leg.windows(selections, limit_bytes)
        )

    def start(self, request_id: RequestId, parts: Sequence[Part], now_s: float) -> None:
        """Read the parts of a request, whose keys are their positions."""
        for key, part in enumerate(parts):
            running = _Running(request_id, key, part)
            if part.window is None:
                self._post_direct(running)
            else:
                self._queue.append(running)
        self._serve_queue(now_s)

    def give_up(self, request_id: RequestId) -> None:
        """Let what was not posted of a request end; what is in flight ends by itself."""
        for each in self._queue:
            if each.request_id == request_id:
                self._ended.append(each.ended("it was given up", local=True))
        self._queue = deque(each for each in self._queue if each.request_id != request_id)

    def advance(self, now_s: float) -> list[PartEnded]:
        """Look at everything on its way; returns what has ended since the last call."""
        if self.left_at_s is not None:
            self._step_s += _NEWS * (now_s - self.left_at_s - self._step_s)
            self.left_at_s = None
        self._posted = [each for each in self._posted if not self._has_left_nixl(each, now_s)]
        if self._landed and self.area is not None:
            self.area.scatterer.let_run()
        self._landed = [each for each in self._landed if not self._is_scattered(each, now_s)]
        self._serve_queue(now_s)
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Cancel what is in flight, and wait for copies."""
        for each in self._posted:
            assert each.transfer is not None
            self.agent.release(each.transfer)
        if self.area is not None:
            self.area.scatterer.close()
        self._posted, self._landed, self._queue = [], [], deque()

    def _serve_queue(self, now_s: float) -> None:
        """Post the windows that there are spans for, in their order."""
        while self._queue:
            first = self._queue[0]
            area, staging, window = self.area, first.part.leg.staging, first.part.window
            assert area is not None and staging is not None and window is not None
            span = area.spans.allocate(window.size_bytes, staging.leg.descriptor_bytes)
            too_large = window.size_bytes > area.spans.size_bytes
            moves = self._landed or now_s - self._moved_at_s < PATIENCE_S
            if span is None and moves and not too_large:
                return
            self._queue.popleft()
            if span is None:
                self._post_direct(first)
                continue
            self._moved_at_s = now_s
            first.span = span
            remote_indices, arena_indices = staging.leg.indices(window, span)
            self._post(first, staging.arena, arena_indices, staging.remote, remote_indices)
            # On one machine NIXL reads while it posts: then this one is scattered during the next.
            if first.transfer is not None and self._has_left_nixl(first, now_s):
                self._posted.remove(first)

    def _post_direct(self, running: _Running) -> None:
        leg = running.part.leg
        remote_indices, local_indices = leg.leg.indices(running.part.selections)
        self._post(running, leg.local, local_indices, leg.remote, remote_indices)

    def _post(self, running: _Running, *read: Any) -> None:
        """Post a read; where NIXL refuses, the part has ended."""
        try:
            running.transfer = self.agent.read(*read)
        except TransferError as error:
            self._fail(running, str(error))
        else:
            self._posted.append(running)

    def _fail(self, running: _Running, fault: str) -> None:
        """End a part whose read has failed; what NIXL has begun of it may still arrive."""
        peer = running.part.leg.remote.peer
        if running.span is not None and self.area is not None:
            assert peer is not None
            self.area.quarantine(peer, running.span)
        self._ended.append(running.ended(fault))

    def _has_left_nixl(self, running: _Running, now_s: float) -> bool:
        """Look at a posted read; once it is over, take the next step."""
        transfer = running.transfer
        assert transfer is not None
        state = self.agent.poll(transfer)
        if state is TransferState.IN_FLIGHT:
            return False
        if state is TransferState.DONE:
            running.telemetry = self.agent.telemetry(transfer)
        self.agent.release(transfer)
        if state is TransferState.FAILED:
            self._fail(running, f"NIXL could not read from {transfer.peer}")
        elif running.span is None:
            self._ended.append(running.ended())
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
            area.spans.free(span)
            self._ended.append(running.ended(fault_of(error), local=True))
        else:
            self._landed.append(running)

    def _is_scattered(self, running: _Running, now_s: float) -> bool:
        """Look at a copy; once it is made, its span is free."""
        assert running.copy is not None and running.span is not None and self.area is not None
        if not running.copy.done():
            return False
        self.area.spans.free(running.span)
        self._moved_at_s = now_s
        self._ended.append(running.ended(running.copy.fault(), local=True))
        return True

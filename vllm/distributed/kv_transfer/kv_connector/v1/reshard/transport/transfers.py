# SPDX-License-Identifier: Apache-2.0
"""Reads under way: what happens to each part of a request.

    direct    queued -> posted -> done
    staged    queued -> has a span, posted -> landed, being scattered -> done
    packed    queued -> has a span, asked -> packed, posted -> confirmed, being scattered -> done

What is not packed in time is read direct. On the host a window is scattered in the poll that sees
it land.

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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from vllm.logger import init_logger

from ..errors import InDoubtError, TransferError, one_line, quote
from ..memory.packing import PACK_UNIT_BYTES, in_units
from ..memory.staging import ArenaCopy, Span, Strategy
from .agent import LOOK_THERE, TransferState
from .arena import StagingArea
from .budget import UNLIMITED, Budget
from .connection import PeerConnection
from .lane import Lane
from .packed_windows import PackedWindows, PackState
from .parts import Arrived, DiffersError, Part, PartError, PartRead, RequestReads

logger = init_logger(__name__)

#: interval span: a window of a staged read is read direct, as no room in the arena was given back.
_SPAN_WAIT_S = 0.1
"""A window is read direct when no span was taken, filled or freed for so long."""


@dataclass(slots=True)
class Transfers:
    """All parts that are queued or under way.

    Both queues, for direct and for staged reads, keep the order of requests. No window waits for
    the arena for ever: if there is no span and none is freed, it is read direct.

    Attributes:
        area: Arena for staged reads; None if all reads go direct.
        has_moved: True if the last `advance` saw a read or a copy complete.
        broken: Connections whose reads have failed; the caller takes them out.
    """

    area: StagingArea | None = None
    has_moved: bool = False
    broken: deque[PeerConnection] = field(default_factory=deque)
    _direct: deque[PartRead] = field(default_factory=deque)
    _queue: deque[PartRead] = field(default_factory=deque)
    # Windows to ask for, by the worker that packs them.
    _unasked: dict[PackedWindows, deque[PartRead]] = field(default_factory=dict)
    # Asked for, or read and not confirmed.
    _asked: deque[PartRead] = field(default_factory=deque)
    # Workers that windows are packed by, each with its connection.
    _packing: dict[PackedWindows, PeerConnection] = field(default_factory=dict)
    _prefetched: deque[PartRead] = field(default_factory=deque)
    # These two are in the order in which they are checked.
    _posted: deque[PartRead] = field(default_factory=deque)
    _landed: deque[PartRead] = field(default_factory=deque)
    _in_doubt: deque[PartRead] = field(default_factory=deque)
    # When a span was last taken, filled or freed.
    _moved_at_s: float = 0.0
    # The budget ran out before the windows or the spans did.
    _is_cut_short: bool = False

    def __len__(self) -> int:
        """Return the number of parts, failed ones that are not drained included."""
        queued = sum(map(len, self._queues))
        return queued + len(self._posted) + len(self._landed) + len(self._in_doubt)

    @property
    def is_moving(self) -> bool:
        """True while a poll may soon have results of requests."""
        return bool(
            self._direct
            or self._queue
            or self._prefetched
            or self._landed
            or self._asked
            or any(each.is_moving for each in self._packing)
            or any(self._unasked.values())
            or any(not each.unwanted for each in self._posted)
        )

    @property
    def has_backlog(self) -> bool:
        """True if the last poll's budget ran out before everything queued was posted."""
        return bool(self._direct) or self._is_cut_short

    @property
    def is_lingering(self) -> bool:
        """True while reads are in flight, looks and those of failed requests included."""
        return bool(self._posted or self._packing)

    def start(
        self,
        reads: RequestReads,
        parts: Iterable[Part],
        connection: PeerConnection,
        *,
        is_prefetch: bool = False,
    ) -> None:
        """Queue parts of a request, for `post` to post.

        Args:
            reads: The request's parts, to which these are added.
            parts: The parts.
            connection: Connection to read them over.
            is_prefetch: Whether to post them only when nothing else is queued.
        """
        for part in parts:
            running = PartRead(reads, part, connection)
            queue = self._prefetched if is_prefetch else self._queue_of(part)
            reads.parts[running] = None
            queue.append(running)

    def promote(self, reads: RequestReads) -> None:
        """Queue a request's prefetched parts like all others: it is offered now."""
        for running in [each for each in self._prefetched if each.reads is reads]:
            self._queue_of(running.part).append(running)
            self._prefetched.remove(running)

    def post(self, now_s: float, budget: Budget) -> None:
        """Post queued parts while there are spans and budget."""
        while self._direct:
            self._post(self._direct[0], now_s, self._direct)
            if budget.is_spent:
                break
        self._serve_queue(now_s, budget)
        self._ask(now_s)
        while self._prefetched and not (self._direct or self._queue):
            first = self._prefetched[0]
            self._queue_of(first.part).append(first)
            self._prefetched.popleft()
            if self._direct:
                self._post(first, now_s, self._direct)
            self._serve_queue(now_s, budget)
            if budget.is_spent:
                return

    def _queue_of(self, part: Part) -> deque[PartRead]:
        """Return the queue that a part is posted from, or asked for."""
        if part.claim is not None and part.leg.packing is not None:
            return self._unasked.setdefault(part.leg.packing.windows, deque())
        return self._direct if part.window is None else self._queue

    def give_up(self, reads: RequestReads) -> None:
        """Drain a failed request's queued parts now; its posted ones drain later."""
        for each in reads.parts:
            each.unwanted = True
        self._end(self._queues, lambda each: each.reads is reads)

    def give_up_all(self) -> None:
        """Drain all queued parts; what arrives is of no use any more."""
        for each in (*self._posted, *self._landed):
            each.unwanted = True
        self._end(self._queues, lambda _: True)

    def retire(self, connection: PeerConnection) -> None:
        """Fail all parts that are queued for a connection."""
        fault = "its connection was given up before all of it was asked for"
        self._end(self._queues, lambda each: each.connection is connection, fault)

    def on_lane_closed(self, lane: Lane) -> None:
        """Drain all parts that were posted on a closed lane; fail those still in flight."""
        for each in self._posted:
            if each.connection.lane is lane and not each.unwanted:
                fault = f"its connection with {quote(each.part.leg.remote.peer)} was given up"
                each.reads.fail(PartError(fault))
        self._end((self._posted, self._in_doubt), lambda each: each.connection.lane is lane)
        self._packing = {
            windows: each for windows, each in self._packing.items() if each.lane is not lane
        }

    def advance(self, now_s: float, budget: Budget = UNLIMITED) -> None:
        """Check the parts under way, and post queued ones.

        Args:
            now_s: The time.
            budget: Limit on the work; the next call starts with the parts that it left unchecked.
        """
        landed = _look(self._posted, lambda each: self._has_left_nixl(each, now_s), budget)
        copied = _look(self._landed, lambda each: self._is_scattered(each, now_s), budget)
        packed = self._settle(now_s, budget)
        self.has_moved = bool(landed or copied or packed)
        self.post(now_s, budget)
        self._send(now_s)

    def close(self) -> None:
        """Wait for copies, and forget all parts. Call it once the connections are closed."""
        if self.area is not None:
            self.area.copier.close()
        for parts in (*self._queues, self._posted, self._landed, self._in_doubt):
            parts.clear()

    @property
    def _queues(self) -> tuple[deque[PartRead], ...]:
        """Queues of parts that are not posted."""
        return self._direct, self._queue, self._prefetched, self._asked, *self._unasked.values()

    def _ask(self, now_s: float) -> None:
        """Ask for windows while there is room for them, here and where they are packed."""
        area = self.area
        for windows, queue in list(self._unasked.items()):
            while queue:
                first = queue[0]
                window, claim, packing = first.part.window, first.part.claim, first.part.leg.packing
                assert area is not None and window and claim and packing
                if not windows.serves(now_s):
                    for each in queue:
                        self._read_direct(each)
                    queue.clear()
                    break
                if not windows.has_room:
                    break
                size_bytes = in_units(window.size_bytes)
                first.span = first.span or area.spans.allocate(size_bytes, PACK_UNIT_BYTES)
                if first.span is not None:
                    self._moved_at_s = now_s
                    first.packed = windows.ask(
                        claim, packing.leg, window, now_s, verifies=first.part.verifies
                    )
                    self._packing[windows] = first.connection
                    self._asked.append(first)
                elif now_s - self._moved_at_s < _SPAN_WAIT_S:
                    break
                else:
                    self._read_direct(first)
                queue.popleft()
            if not queue:
                del self._unasked[windows]

    def _settle(self, now_s: float, budget: Budget) -> int:
        """See what has become of the windows that were asked for; return how many have moved."""
        for windows, connection in list(self._packing.items()):
            self._try(partial(windows.look, now_s), windows, connection)
            if windows.hangs(now_s):
                lifetime = connection.lifetime
                if not (lifetime.requests or lifetime.is_retired):
                    # What is read over it would have a deadline.
                    self.broken.append(connection)
        num_moved = 0
        for _ in range(len(self._asked)):
            first, state = self._asked[0], self._asked[0].packed and self._asked[0].packed.state
            if state is PackState.PACKED:
                self._post(first, now_s, self._asked)
            elif state is PackState.CONFIRMED and first.span is not None:
                self._asked.popleft()
                self._scatter(first, first.span, now_s)
            elif state is PackState.LOST:
                self._free(first)
                self._read_direct(first)
                self._asked.popleft()
            else:
                self._asked.rotate(-1)
                continue
            num_moved += 1
            if budget.is_spent:
                break
        return num_moved

    def _send(self, now_s: float) -> None:
        """Tell workers what is asked for and returned, and look at what they have packed."""
        for windows, connection in list(self._packing.items()):
            self._try(partial(windows.send, now_s), windows, connection)
            if not windows.is_busy:
                del self._packing[windows]

    def _try(
        self, call: Callable[[], None], windows: PackedWindows, connection: PeerConnection
    ) -> None:
        """Have windows take a step; take their connection out if they cannot be reached."""
        try:
            call()
        except TransferError as error:
            logger.debug("Windows are lost: %s", one_line(error))
            windows.lose_all()
            self.broken.append(connection)

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
            if span is None and first.part.verifies:
                self._read_direct(first)
                self._queue.popleft()
                continue
            self._post(first, now_s, self._queue)
            if budget.is_spent:
                self._is_cut_short = bool(self._queue)
                return

    def _post(self, running: PartRead, now_s: float, queue: deque[PartRead]) -> None:
        """Post the first part of a queue: as a window if it has a span, else direct."""
        part, span = running.part, running.span
        leg, staging, window = part.leg, part.leg.staging, part.window
        try:
            if span is None or window is None:
                running.strategy = Strategy.DIRECT
                local, remote = leg.local, leg.remote
                remote_indices, local_indices = leg.leg.indices(part.selections)
            elif running.packed is not None:
                assert leg.packing is not None
                running.strategy = Strategy.PACKED
                local, local_indices, remote, remote_indices = leg.packing.windows.lists(
                    running.packed, window, span
                )
            else:
                assert staging is not None
                self._moved_at_s, running.strategy = now_s, Strategy.STAGED
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

    def _read_direct(self, running: PartRead) -> None:
        """Queue a window for a direct read; what only verifies is done without."""
        if running.part.verifies:
            self._drain(running)
        else:
            self._direct.append(running)

    def _fail_to_post(self, running: PartRead, queue: deque[PartRead], error: Exception) -> None:
        """Fail the first part of a queue, whose post was refused or raised an exception."""
        foreseen = isinstance(error, TransferError)
        fault = str(error) if foreseen else f"it could not be asked for: {error!r}"
        if not foreseen:
            logger.exception(
                "A part of request %s cannot be posted", quote(running.reads.request_id)
            )
        running.reads.fail(PartError(fault, is_local=not foreseen and not running.asked))
        if foreseen or running.asked:
            self.broken.append(running.connection)
        if running.asked:
            self._in_doubt.append(running)
        else:
            self._drain(running)
        queue.popleft()

    def _has_left_nixl(self, running: PartRead, now_s: float) -> bool:
        """Check a posted read; if it has ended, scatter, drain or fail its part."""
        transfer, connection = running.transfer, running.connection
        assert transfer is not None
        state = connection.poll(transfer)
        if state is TransferState.IN_FLIGHT:
            return False
        if state is TransferState.FAILED:
            # Even if its request has failed: only closing its lane drains it.
            fault = f"NIXL could not read from {quote(transfer.peer)}: {LOOK_THERE}"
            running.reads.fail(PartError(fault))
            self.broken.append(connection)
            self._in_doubt.append(running)
            return True
        if not running.unwanted:
            running.telemetry = connection.telemetry(transfer)
        connection.release(transfer)
        if running.unwanted:
            self._drain(running)
        elif running.span is None:
            self._arrive(running)
        elif running.packed is not None:
            if running.packed.state is PackState.PACKED:
                running.packed.state = PackState.READ
            # Else it was lost meanwhile.
            self._asked.append(running)
        else:
            self._moved_at_s = now_s
            self._scatter(running, running.span, now_s)
        return True

    def _scatter(self, running: PartRead, span: Span, now_s: float) -> None:
        """Copy a window from the arena to its blocks, or begin to."""
        area, staging, window = self.area, running.part.leg.staging, running.part.window
        assert area is not None and staging is not None and window is not None
        try:
            copy = staging.leg.scatter(window, span)
            if running.part.verifies:
                self._verify(running, copy, area)
                return
            running.copied = area.copier.scatter(copy)
        except Exception as error:
            # Such as no memory on the device: this fails the request, not the engine.
            fault = "its bytes could not be put in their places"
            if running.part.verifies:
                fault = "its bytes could not be compared"
            running.reads.fail(PartError(f"{fault}: {one_line(error)}", is_local=True))
            self._drain(running)
            return
        if running.copied is None:
            self._arrive(running)
        else:
            self._landed.append(running)

    def _verify(self, running: PartRead, copy: ArenaCopy, area: StagingArea) -> None:
        """Compare a window in the arena with the blocks that it has arrived in."""
        differing = area.copier.differing(copy)
        if not len(differing):
            self._arrive(running)
            return
        part = running.part
        assert part.leg.staging is not None and part.window is not None
        first = part.leg.staging.leg.name(part.window, int(differing[0]))
        text = (
            f"{len(differing)} of {len(copy.addresses)} pieces differ from what "
            f"{quote(part.leg.remote.peer)} holds, first {one_line(first)}"
        )
        running.reads.fail(DiffersError(text))
        self._drain(running)

    def _is_scattered(self, running: PartRead, now_s: float) -> bool:
        """Check a copy; if it has been made, free its span and drain its part."""
        assert running.copied is not None
        if not running.copied.query():
            return False
        self._moved_at_s = now_s
        self._arrive(running)
        return True

    def _arrive(self, running: PartRead) -> None:
        """Record that a part has arrived, which drains it."""
        self._free(running)
        if running in running.reads.parts:
            arrived = Arrived(running.part, running.strategy, running.telemetry)
            running.reads.arrived.append(arrived)
        running.reads.drain(running)

    def _drain(self, running: PartRead) -> None:
        """Record that nothing can write to a part any more, though it has not arrived."""
        self._free(running)
        running.reads.drain(running)

    def _end(
        self,
        queues: Iterable[deque[PartRead]],
        is_meant: Callable[[PartRead], bool],
        fault: str | None = None,
    ) -> None:
        """Remove parts from queues, in order, as drained; with a fault, also as failed."""
        for queue in queues:
            ended = [each for each in queue if is_meant(each)]
            if not ended:
                continue
            for each in ended:
                if fault is not None:
                    each.reads.fail(PartError(fault))
                self._drain(each)
            kept = [each for each in queue if not is_meant(each)]
            queue.clear()
            queue.extend(kept)

    def _free(self, running: PartRead) -> None:
        """Return a part's span once nothing can write into it, and its window to its holder."""
        if running.packed is not None:
            assert running.part.leg.packing is not None
            running.part.leg.packing.windows.give_back(running.packed)
            running.packed = None
        if running.span is not None:
            assert self.area is not None
            self.area.spans.free(running.span)
            running.span = None


def _look(parts: deque[PartRead], is_through: Callable[[PartRead], bool], budget: Budget) -> int:
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

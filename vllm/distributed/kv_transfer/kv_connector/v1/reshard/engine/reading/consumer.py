# SPDX-License-Identifier: Apache-2.0
"""The requests that a worker reads: what happens to each, from its start until it is reported.

`ConsumerSide._read` is the life of a request, from top to bottom, and `_leave` is its end. A
request has *failed* as soon as one of its steps fails. It is *received* once it is complete, or
once it has failed and is drained: nothing can write into its blocks any more. Only then may its
blocks be reused. What looks at its blocks or its lease after that writes nothing there: a failed
request does not wait for it.

An unexpected exception fails the one request whose task it ends, or leaves the work to the next
poll. All of this belongs to the connector's thread.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from vllm.logger import init_logger

from ...errors import ReshardError, one_line, quote
from ...protocol.ids import RequestId
from ...protocol.messages import Receive, RemoteEngineAddress
from ...protocol.request_blocks import RequestBlocks
from ...protocol.states import ReadState
from ...protocol.tasks import Tasks, suspended, taken_once_done
from ...transport.budget import Budget
from ...transport.connection import PeerConnection
from ...transport.lane import Lane
from ...transport.lease_check import PreparedTable
from ...transport.packed_windows import Claim
from ...transport.parts import Part, PartError, RequestReads, cut
from ...transport.remote import LocalCache
from ...transport.transfers import Transfers
from ..connecting.peers import Peer, PeerTable
from ..metadata import WorkerReport
from ..stats import ReadFailure, ReshardStats
from ..traces import trace_of_read
from .endings import BlocksInDoubt, Endings
from .incoming import IncomingRequest, ReadError, as_read_error
from .notifier import Notifier
from .prefetch import FullGroups, Prefetched
from .verifying import Verifier

logger = init_logger(__name__)


class ConsumerSide:
    """All requests being read.

    Args:
        peers: The engines to read from.
        transfers: The parts on their way.
        notifier: Notifies the producers of their blocks.
        stats: Its metrics.
        tasks: The tasks of its thread, which this steps.
        timeout_s: How long a request may take from its offer until it is received.
        name: The worker's name, for traces.
        num_to_verify: First requests of each connection that are verified.
    """

    def __init__(
        self,
        peers: PeerTable,
        transfers: Transfers,
        notifier: Notifier,
        stats: ReshardStats,
        tasks: Tasks,
        timeout_s: float,
        name: str = "",
        num_to_verify: int = 0,
    ) -> None:
        self._peers = peers
        self._transfers = transfers
        self._notifier = notifier
        self._stats = stats
        self._timeout_s = timeout_s
        self._name = name
        self._tasks = tasks
        # Until each is reported as received.
        self._requests: dict[RequestId, IncomingRequest] = {}
        # Earliest first. Those of requests that are over stay until they are first.
        self._deadlines: deque[tuple[float, RequestId]] = deque()
        # Connected peers with waiting requests, in round-robin order.
        self._ready: dict[RemoteEngineAddress, Peer] = {}
        # Time of the current poll.
        self._now_s = 0.0
        self._doubt = BlocksInDoubt(peers.lanes, stats)
        self._endings = Endings(self._doubt, notifier, stats)
        self._verifier = Verifier(transfers, stats, tasks, num_to_verify)
        # The local KV-cache groups that keep the last tokens of a sequence only.
        self._window_groups: AbstractSet[int] = frozenset()

    def __len__(self) -> int:
        """Return the number of requests not yet reported as received."""
        return len(self._requests)

    @property
    def has_backlog(self) -> bool:
        """True if the last poll's budget ran out before everything queued was posted."""
        return bool(self._ready) or self._transfers.has_backlog

    @property
    def is_moving(self) -> bool:
        """True while a poll soon may have results of requests."""
        if self.has_backlog or self._transfers.is_moving or self._tasks.ready:
            return True
        return self._doubt.hung is not None or any(each.leases for each in self._peers.looking)

    @property
    def next_due_s(self) -> float | None:
        """When a request is due, if nothing happens before; None without one."""
        due_s = self._tasks.next_due_s
        if (deadline_s := self._next_deadline_s) is not None:
            due_s = min(due_s, deadline_s)
        return due_s if due_s < math.inf else None

    def set_local_cache(self, local_cache: LocalCache) -> None:
        """Set the cache to read into; called once the caches are registered."""
        self._window_groups = local_cache.window_groups
        self._doubt.num_block_ids = local_cache.cache.num_block_ids

    def start_request(
        self,
        request_id: RequestId,
        receive: Receive,
        now_s: float,
    ) -> None:
        """Read a request, or release its blocks at their producer if it has none to fill.

        Args:
            request_id: The request.
            receive: What to read.
            now_s: The time.
        """
        self._now_s = now_s
        request = self._requests.get(request_id)
        if request is not None and request.receive is receive:
            # An earlier poll started it, and failed afterwards.
            return
        if not any(receive.local_block_ids):
            if receive.fault is None:
                self._notifier.release(receive)
        elif request is not None and request.is_early and request.fault is None:
            self._offer(request, receive)
        else:
            request = self._add(request_id, receive, ReadState.WAITING)
            self._set_deadline(request)
        self._tasks.run(now_s)

    def prefetch(self, request_id: RequestId, part: Receive, now_s: float) -> None:
        """Read the computed part of a request that is not offered yet.

        Args:
            request_id: The request.
            part: What can be read now.
            now_s: The time.
        """
        self._now_s = now_s
        request = self._requests.get(request_id)
        if request is None:
            request = self._add(request_id, part, ReadState.PREFETCHING)
        if request.is_early:
            request.receive = request.computed = part
            request.task.wake()
            self._tasks.run(now_s)

    def abandon(self, request_ids: Iterable[RequestId]) -> None:
        """Fail requests that another worker of this engine could not read."""
        for request_id in request_ids:
            if (request := self._requests.get(request_id)) is not None:
                request.task.cancel(ReadError("another worker could not read it", None))

    def on_connected(self, peer: Peer) -> None:
        """Have this peer's waiting requests take their turns: it is connected."""
        self._ready[peer.address] = peer

    def fail_waiting(self, peer: Peer, error: Exception) -> list[RequestId]:
        """Fail the requests that wait for a peer that cannot be connected, and return their ids."""
        failed = []
        reason = f"handshake failed: {one_line(error)}"
        for turn in taken_once_done(peer.waiting):
            if not turn.is_over:
                turn.task.cancel(ReadError(reason, ReadFailure.HANDSHAKE))
                if turn.request_id is not None:
                    failed.append(turn.request_id)
        return failed

    def note_handshake(self, address: RemoteEngineAddress, took_s: float, now_s: float) -> None:
        """Wake and trace the requests that have waited for a handshake."""
        for request in self._requests.values():
            if request.receive.source != address:
                continue
            if request.is_early:
                request.task.wake()
            if request.trace is not None:
                request.trace.span("handshake", now_s - took_s, now_s)

    def begin(self, now_s: float, budget: Budget) -> None:
        """Post the reads of waiting requests, one request of each peer in turn.

        Args:
            now_s: The time.
            budget: Limit on the work of this call.
        """
        self._now_s = now_s
        self._tasks.run(now_s)
        self._transfers.post(now_s, budget)
        while self._ready and not self._transfers.has_backlog:
            address, peer = next(iter(self._ready.items()))
            del self._ready[address]
            if not peer.waiting or peer.connection is None:
                continue
            turn = peer.waiting[0]
            turn.connection = peer.connection
            turn.task.wake()
            peer.waiting.popleft()
            if peer.waiting:
                self._ready[address] = peer
            if turn.is_over:
                continue
            self._tasks.run(now_s)
            self._transfers.post(now_s, budget)
            if budget.is_spent:
                return

    def advance(self, now_s: float, budget: Budget) -> None:
        """Poll parts, within the budget, and lookups; fail requests past their deadlines."""
        self._now_s = now_s
        self._transfers.advance(now_s, budget)
        for connection in taken_once_done(self._transfers.broken):
            self._peers.break_off(connection, now_s)
        self._tasks.run(now_s)
        for connection in list(self._peers.looking):
            connection.leases.advance()
            if connection.leases.is_broken:
                # Even if its request has failed meanwhile: nothing else reports the broken peer.
                self._peers.break_off(connection, now_s)
                # Once: its peer may have another connection by the next poll.
                connection.leases.is_broken = False
            if not connection.leases.is_busy:
                del self._peers.looking[connection]
        # Before deadlines: a request whose look has ended has not run out of time.
        self._tasks.run(now_s)
        while (due_at_s := self._next_deadline_s) is not None and due_at_s <= now_s:
            self._time_out(self._requests[self._deadlines[0][1]], now_s)
            self._deadlines.popleft()
        self._tasks.run(now_s)
        self._doubt.contain(now_s)

    def close_lane(self, lane: Lane) -> None:
        """Close a retired lane, after which everything read over it is drained.

        If a call raises, the next one does the rest.
        """
        for connection in list(lane.connections):
            self._transfers.retire(connection)
            connection.leases.give_up()
            self._peers.looking.pop(connection, None)
        self._tasks.run(self._now_s)
        lane.close()
        self._transfers.on_lane_closed(lane)

    def drain(self, now_s: float) -> bool:
        """Advance the reads under way, and begin none; return whether there are any."""
        self._transfers.give_up_all()
        self._transfers.advance(now_s)
        for connection in self._peers.looking:
            connection.leases.advance()
        return self._transfers.is_lingering or any(each.leases for each in self._peers.looking)

    def report_to(self, report: WorkerReport) -> None:
        """Add what has become of requests since the last call to a report."""
        self._tasks.run(self._now_s)
        self._endings.report_to(report)

    async def _read(self, request: IncomingRequest) -> None:
        """Read a request. What it raises fails it; `_leave` follows in any case."""
        request.trace = trace_of_read(self._name, request.receive)
        logger.debug(
            "Request %s: %s at engine %s, to read %d blocks.",
            quote(request.request_id),
            one_line(request.state.value),
            quote(request.receive.source.engine_id),
            len(request.blocks),
        )
        # PREFETCHING, if the other engine has not offered it yet.
        await self._read_ahead(request)
        receive = request.receive
        if receive.fault is not None:
            raise ReadError(receive.fault, ReadFailure.PARAMETERS)
        # WAITING, then READING
        try:
            tables = await self._read_parts(request)
        except PartError as error:
            await self._requeue(request, error)
            tables = await self._read_parts(request)
        request.count(self._stats)
        connection = request.connection
        assert connection is not None and request.peer is not None
        differs = await self._verifier.verify(request, connection) if tables else None
        request.enter(ReadState.CHECKING, self._now_s)
        if not tables:
            # Nothing was read.
            return
        assert receive.fingerprint is not None
        self._peers.looking[connection] = None
        await connection.leases.confirm(
            self._tasks, receive.remote_request_id, receive.fingerprint, tables, request.due_at_s
        )
        # Only now: what is no longer held may differ.
        if differs is not None:
            self._peers.distrust(connection, self._now_s)
            raise ReadError(differs, ReadFailure.CONTENT)
        request.peer.is_proven = True

    async def _leave(self, request: IncomingRequest, error: Exception | None) -> None:
        """End a request: report a failure at once, and its end once nothing writes any more."""
        if self._requests.get(request.request_id) is not request:
            # It has ended, and an exception followed.
            return
        if error is not None:
            self._fail(request, error)
        await request.reads.drained()
        request.count(self._stats)
        self._endings.receive(request, self._now_s)
        del self._requests[request.request_id]
        request.enter(ReadState.ENDED, self._now_s)

    async def _read_ahead(self, request: IncomingRequest) -> None:
        """Read what is computed of a request, until it is offered.

        A failure here fails no request: its prefetched blocks are *invalidated*, and all of it is
        read once it is offered and none of its prefetch reads is under way.
        """
        while request.is_early:
            computed, request.computed = request.computed, None
            if computed is not None:
                try:
                    self._prefetch(request, computed)
                except ReshardError as error:
                    # The source may name anything before its offer, which is checked on its own.
                    logger.debug(
                        "Request %s is not prefetched: %s",
                        quote(request.request_id),
                        one_line(error),
                    )
                    self._invalidate(request)
                except Exception:
                    logger.exception(
                        "Request %s is not prefetched, over an unexpected exception",
                        quote(request.request_id),
                    )
                    self._invalidate(request)
            await suspended()
            request.count(self._stats)
            if request.is_early and request.reads.error is not None:
                self._invalidate(request)

    async def _read_parts(self, request: IncomingRequest) -> list[PreparedTable]:
        """Read all parts of a request, once it is its turn.

        Returns:
            The lease tables of the workers that it was read from.

        Raises:
            PartError: One of the parts has failed.
        """
        connection, rest = await self._connected(request)
        parts = self._cut(rest, connection, is_prefetch=False)
        legs = connection.legs if request.prefetched else [part.leg for part in parts]
        connection.lifetime.begin_request()
        request.connection = connection
        request.count(self._stats)
        request.enter(ReadState.READING, self._now_s)
        self._transfers.start(request.reads, parts, connection)
        await request.reads.landed()
        read_from = {leg.remote.peer for leg in legs}
        return [table for name, table in connection.lease_tables.items() if name in read_from]

    async def _requeue(self, request: IncomingRequest, error: PartError) -> None:
        """Have a request wait for the next connection, if nothing of it has arrived or may arrive.

        Its connection may have died while it was idle, or its engine is back at its address. The
        lease check tells whether the request is still held there.

        Raises:
            PartError: It has failed.
        """
        connection = request.connection
        assert connection is not None
        self._transfers.give_up(request.reads)
        if error.is_local or request.reads.has_begun:
            raise error
        connection.lifetime.end_request()
        self._peers.break_off(connection, self._now_s)
        request.connection = None
        logger.info(
            "Request %s is read from engine %s over a new connection: %s",
            quote(request.request_id),
            quote(request.receive.source.engine_id),
            one_line(error),
        )
        request.enter(ReadState.WAITING, self._now_s)
        # A failed read may still write, until its lane is closed; others may fail until then.
        await request.reads.drained()
        request.reads.error = None

    async def _connected(self, request: IncomingRequest) -> tuple[PeerConnection, Receive]:
        """Wait until a request's peer is connected and it is its turn.

        Returns:
            The connection, and what is left to read.
        """
        while True:
            request.peer = peer = self._peers.get_or_connect(request.receive.source, self._now_s)
            if peer.connection is not None:
                self.on_connected(peer)
            connection = await peer.turn(self._tasks, request.request_id)
            if self._doubt.are_too_many and peer.is_suspect(self._now_s):
                reason = f"{self._doubt.count:d} blocks may still be written by earlier reads"
                raise ReadError(reason, ReadFailure.DOUBT)
            prefetched = request.prefetched
            if prefetched is None:
                return connection, request.receive
            if request.reads.error is None and prefetched.is_of(request.receive, connection):
                return connection, prefetched.rest_of(request.receive)
            self._invalidate(request)
            await request.reads.drained()
            # From the start: what was read ahead is of no use.
            request.count(self._stats)
            request.arrived.clear()
            request.prefetched = request.reads.error = None

    def _add(
        self,
        request_id: RequestId,
        receive: Receive,
        state: ReadState,
    ) -> IncomingRequest:
        """Start the task of a request."""
        assert request_id not in self._requests, f"{quote(request_id)} is being received"
        request = IncomingRequest(
            request_id=request_id,
            receive=receive,
            offered_at_s=self._now_s,
            state=state,
            since_s=self._now_s,
            reads=RequestReads(request_id),
        )
        body = self._read(request)
        request.task = self._tasks.start(body, lambda error: self._leave(request, error))
        request.reads.task = request.task
        self._requests[request_id] = request
        return request

    def _offer(self, request: IncomingRequest, receive: Receive) -> None:
        """Have a request that is read ahead take its turn: it is offered now, or has failed."""
        request.receive, request.offered_at_s = receive, self._now_s
        try:
            self._set_deadline(request)
            self._transfers.promote(request.reads)
            request.count(self._stats)
            request.enter(ReadState.WAITING, self._now_s)
            request.task.wake()
        except Exception as error:
            request.task.cancel(error)

    def _cut(self, wanted: Receive, connection: PeerConnection, *, is_prefetch: bool) -> list[Part]:
        """Return the parts to read some blocks in.

        Raises:
            RemoteLayoutError: The blocks do not exist.
        """
        blocks = RequestBlocks(wanted)
        claim = None if is_prefetch else Claim.of(wanted)
        return [
            part
            for leg in connection.legs
            if not (is_prefetch and leg.leg.per_sequence)
            for part in cut(leg, blocks.select(leg.leg), self._transfers.area, claim)
        ]

    def _prefetch(self, request: IncomingRequest, part: Receive) -> None:
        """Read the computed blocks of a request that can be prefetched and were not read before.

        They wait for the connection, and are read with a later part if too much is in doubt.
        """
        connection = self._peers.get_or_connect(part.source, self._now_s).connection
        if connection is None:
            request.computed = part
            return
        if self._doubt.are_too_many:
            return
        if (prefetched := request.prefetched) is None:
            legs = (each.leg for each in connection.legs)
            groups = FullGroups.of(legs, part.remote_block_ids, self._window_groups)
            prefetched = request.prefetched = Prefetched(groups, connection)
        elif not prefetched.is_of(part, connection):
            self._invalidate(request)
            return
        if (wanted := prefetched.next(part)) is not None:
            parts = self._cut(wanted, connection, is_prefetch=True)
            self._transfers.start(request.reads, parts, connection, is_prefetch=True)
            # Only now: what was not begun must not count as read.
            prefetched.take(part, wanted)

    def _invalidate(self, request: IncomingRequest) -> None:
        """Mark a request's prefetched blocks as of no use, and drop its unposted parts."""
        if request.prefetched is not None and not request.prefetched.is_invalid:
            request.prefetched.is_invalid = True
            self._transfers.give_up(request.reads)

    def _fail(self, request: IncomingRequest, error: Exception) -> None:
        """Fail a request, and report that; its unposted parts are dropped. See `_leave`."""
        failed = as_read_error(error)
        if failed.failure is ReadFailure.UNFORESEEN:
            logger.error(
                "Request %s fails over an unexpected exception",
                quote(request.request_id),
                exc_info=error,
            )
        if request.fault is not None:
            return
        if request.due_at_s == math.inf:
            # Its reads under way must not be waited for without a deadline.
            self._set_deadline(request)
        self._transfers.give_up(request.reads)
        self._endings.fail(request, failed, self._now_s)

    def _set_deadline(self, request: IncomingRequest) -> None:
        request.due_at_s = self._now_s + self._timeout_s
        self._deadlines.append((request.due_at_s, request.request_id))

    @property
    def _next_deadline_s(self) -> float | None:
        """Earliest deadline of a request that is not over; None without one.

        A request that has failed but is not drained counts, too: at its deadline, the wait for its
        peer ends.
        """
        while self._deadlines:
            due_at_s, request_id = self._deadlines[0]
            request = self._requests.get(request_id)
            if request is not None and request.due_at_s == due_at_s:
                return due_at_s
            self._deadlines.popleft()
        return None

    def _time_out(self, request: IncomingRequest, now_s: float) -> None:
        """Fail a request past its deadline, and name what it waited for."""
        source = request.receive.source
        where = f"{quote(source.engine_id)} at {quote(source.host)}:{source.port}"
        if num_parts := len(request.reads.parts):
            waited_for = f"{num_parts} reads from {where}"
            for connection in {each.connection: None for each in request.reads.parts}:
                self._peers.break_off(connection, now_s)
        elif request.connection is None:
            is_connected = request.peer is not None and request.peer.connection is not None
            waited_for = f"its turn at {where}" if is_connected else f"{where} to be connected"
        else:
            # A look that hangs breaks its connection off by itself: see `advance`.
            waited_for = f"its lease to be looked up at {where}"
        reason = f"waited {self._timeout_s:g} s for {waited_for}"
        request.task.cancel(ReadError(reason, ReadFailure.DEADLINE))

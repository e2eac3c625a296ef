# SPDX-License-Identifier: Apache-2.0
"""The requests that a worker reads, from their start until no read can write into their blocks.

An unexpected exception either fails the one request that it concerns, or leaves the work to the
next poll: an item leaves its queue only once it is done.

A request has *failed* as soon as one of its steps fails. It is *received* once it is complete, or
once it has failed and is drained. Only then may its blocks be reused: see `protocol.ledgers`.

All of this belongs to the connector's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from vllm.logger import init_logger

from ...errors import ReshardError
from ...protocol.ids import RequestId
from ...protocol.messages import Receive, RemoteEngineAddress
from ...protocol.quoting import one_line, quote
from ...protocol.request_blocks import RequestBlocks
from ...protocol.states import ReadState
from ...transport.budget import Budget
from ...transport.connection import PeerConnection
from ...transport.lane import Lane
from ...transport.lease_check import CheckResult
from ...transport.remote import LocalCache
from ...transport.transfers import PartDrained, PartEvent, PartFailed, Transfers
from ..connecting.peers import Peer, PeerTable
from ..early.watched_requests import Refusal
from ..queues import taken_once_done
from ..stats import ReadFailure, ReshardStats
from .completions import CompletionHandler, Completions
from .doubt import BlocksInDoubt
from .lease_checks import LeaseChecks
from .notifier import Notifier
from .prefetcher import Prefetcher
from .readings import READ_FAILURES, Reading, Readings

logger = init_logger(__name__)


class ConsumerSide:
    """All requests being read.

    Args:
        peers: The engines to read from.
        transfers: The parts on their way.
        notifier: Notifies the producers of their blocks.
        stats: Its metrics.
        timeout_s: How long a request may take from `start_request` until it is received.
        name: The worker's name, for traces.
    """

    def __init__(
        self,
        peers: PeerTable,
        transfers: Transfers,
        notifier: Notifier,
        stats: ReshardStats,
        timeout_s: float,
        name: str = "",
    ) -> None:
        self._peers = peers
        self._transfers = transfers
        self._notifier = notifier
        self._stats = stats
        self._timeout_s = timeout_s
        self._readings = Readings(transfers, timeout_s, name)
        self._ledger = self._readings.ledger
        # Connected peers with waiting requests, in round-robin order.
        self._ready: dict[RemoteEngineAddress, Peer] = {}
        # Time of the current poll.
        self._now_s = 0.0
        # Events to apply.
        self._events: deque[PartEvent] = deque()
        self._doubt = BlocksInDoubt(peers.lanes, stats)
        self._prefetcher = Prefetcher(self._readings, transfers, stats)
        self._lease_checks = LeaseChecks(peers)
        self._completions = CompletionHandler(self._readings, notifier, stats, self._doubt)

    def __len__(self) -> int:
        """Return the number of requests not yet reported as received."""
        return len(self._readings.by_id)

    @property
    def has_backlog(self) -> bool:
        """True if the last poll's budget ran out before everything queued was posted."""
        return bool(self._ready) or self._transfers.has_backlog

    @property
    def is_moving(self) -> bool:
        """True while a poll soon may have results of requests."""
        is_reading = self.has_backlog or self._transfers.is_moving
        return bool(is_reading or self._lease_checks or self._doubt.hung)

    @property
    def next_due_s(self) -> float | None:
        """Earliest deadline of a request that is not over; None without one."""
        return self._readings.next_due_s

    def set_local_cache(self, local_cache: LocalCache) -> None:
        """Set the cache to read into; called once the caches are registered."""
        self._prefetcher.window_groups = local_cache.window_groups
        self._doubt.num_block_ids = local_cache.cache.num_block_ids

    def start_request(
        self,
        request_id: RequestId,
        receive: Receive,
        now_s: float,
        offered_at_s: float | None = None,
    ) -> None:
        """Read a request once its peer is connected; an exception fails the request.

        Args:
            request_id: The request.
            receive: What to read.
            now_s: The time.
            offered_at_s: Since when it could be read; None for now.
        """
        self._now_s = now_s
        reading = self._readings.by_id.get(request_id)
        if reading is not None and reading.receive is receive:
            # An earlier poll started it, and failed afterwards.
            return
        try:
            self._start(request_id, receive, now_s, now_s if offered_at_s is None else offered_at_s)
        except Exception as error:
            if any(receive.local_block_ids) and request_id not in self._readings.by_id:
                self._readings.add(request_id, receive, None, now_s)
            self._lose(request_id, error)

    def prefetch(
        self, request_id: RequestId, receive: Receive, part: Receive, now_s: float
    ) -> None:
        """Read the computed part of a request that is not offered yet.

        Args:
            request_id: The request.
            receive: What to read once the request is offered.
            part: What can be read now.
            now_s: The time.
        """
        self._now_s = now_s
        connection = self._peers.get_or_connect(part.source, now_s).connection
        if connection is not None and not self._doubt.are_too_many:
            self._prefetcher.read(request_id, receive, part, connection, now_s)

    def refuse(self, refusal: Refusal, now_s: float) -> None:
        """Fail a request that will not be offered."""
        self._now_s = now_s
        request_id, receive = refusal.request_id, refusal.receive
        reading = self._readings.by_id.get(request_id)
        if reading is None or reading.receive is not receive:
            state, since_s = refusal.state, refusal.since_s
            reading = self._readings.add(request_id, receive, None, now_s, state, since_s)
        self._fail(reading, refusal.reason, refusal.failure)

    def _start(
        self, request_id: RequestId, receive: Receive, now_s: float, offered_at_s: float
    ) -> None:
        if receive.fault is not None:
            # Without blocks to fill, no request waits for this read.
            if any(receive.local_block_ids):
                faulty = self._readings.add(request_id, receive, None, now_s)
                self._fail(faulty, receive.fault, ReadFailure.PARAMETERS)
            return
        peer = self._peers.get_or_connect(receive.source, now_s)
        if any(receive.local_block_ids):
            reading = self._readings.by_id.get(request_id)
            if reading is not None and reading.state is ReadState.PREFETCHING:
                self._readings.offer(reading, receive, peer, now_s, offered_at_s)
            else:
                self._readings.add(request_id, receive, peer, now_s, offered_at_s=offered_at_s)
        elif peer.connection is not None:
            # A release need not queue behind other requests' reads.
            self._notifier.release(receive, peer.connection)
            return
        peer.waiting.append((request_id, receive))

    def on_connected(self, peer: Peer) -> None:
        """Queue this peer's waiting requests for posting: it is connected."""
        self._ready[peer.address] = peer

    def trace_handshake(self, address: RemoteEngineAddress, took_s: float, now_s: float) -> None:
        """Export a trace span of the handshake for each request that waited for it."""
        for reading in self._readings.by_id.values():
            if reading.trace is not None and reading.receive.source == address:
                reading.trace.span("handshake", now_s - took_s, now_s)

    def begin(self, now_s: float, budget: Budget) -> None:
        """Post the reads of waiting requests, one request of each peer in turn.

        Args:
            now_s: The time.
            budget: Limit on the work of this call.
        """
        self._now_s = now_s
        self._transfers.post(now_s, budget)
        while self._ready:
            if self._transfers.has_backlog:
                return
            address, peer = next(iter(self._ready.items()))
            del self._ready[address]
            if not peer.waiting or peer.connection is None:
                continue
            request_id, receive = peer.waiting.popleft()
            if peer.waiting:
                self._ready[address] = peer
            try:
                self._begin_next(request_id, receive, peer.connection, now_s)
            except Exception as error:
                self._lose(request_id, error)
            self._transfers.post(now_s, budget)
            if budget.is_spent:
                return

    def fail_waiting(self, peer: Peer, error: Exception) -> list[RequestId]:
        """Fail the requests that wait for a peer that cannot be connected, and return their ids."""
        failed = []
        for request_id, receive in taken_once_done(peer.waiting):
            reading = self._readings.by_id.get(request_id)
            if reading is not None and reading.waits_for(receive):
                reason = f"handshake failed: {one_line(error)}"
                self._fail(reading, reason, ReadFailure.HANDSHAKE)
                failed.append(request_id)
        return failed

    def abandon(self, request_ids: Iterable[RequestId]) -> None:
        """Fail requests that another worker of this engine could not read."""
        for request_id in request_ids:
            if (reading := self._readings.by_id.get(request_id)) is not None:
                self._fail(reading, "another worker could not read it", None)

    def advance(self, now_s: float, budget: Budget) -> None:
        """Poll parts, within the budget, and lease checks; fail requests past their deadlines."""
        self._now_s = now_s
        self._events += self._transfers.advance(now_s, budget)
        for event in taken_once_done(self._events):
            self._apply(event, now_s)
        # Before deadlines: the line of a request that was not offered in time says so.
        for result in self._lease_checks.advance(now_s):
            self._judge(result)
        for reading in self._readings.overdue(now_s):
            self._run_out_of_time(reading, now_s)
        self._doubt.contain(now_s)

    def close_lane(self, lane: Lane) -> None:
        """Close a retired lane, after which everything read over it is drained.

        If a call raises, the next one does the rest.
        """
        for connection in list(lane.connections):
            self._transfers.retire(connection)
            self._lease_checks.give_up(connection)
        for result in self._lease_checks.results(self._now_s):
            self._judge(result)
        lane.close()
        self._transfers.on_lane_closed(lane)

    def take_completions(self) -> Completions:
        """Return what has become of requests since the last call; notify their producers."""
        return self._completions.take(self._now_s)

    def _begin_next(
        self, request_id: RequestId, receive: Receive, connection: PeerConnection, now_s: float
    ) -> None:
        """Begin or release a request just taken from its peer's queue."""
        if not any(receive.local_block_ids):
            self._notifier.release(receive, connection)
            return
        reading = self._readings.by_id.get(request_id)
        # It may have failed while it waited.
        if reading is not None and reading.waits_for(receive):
            self._begin(reading, connection, now_s)

    def _begin(self, reading: Reading, connection: PeerConnection, now_s: float) -> None:
        """Queue the reads of a request."""
        request_id = reading.request_id
        if self._doubt.are_too_many and reading.peer is not None and reading.peer.is_suspect(now_s):
            reason = f"{self._doubt.count:d} blocks may still be written by earlier reads"
            self._fail(reading, reason, ReadFailure.DOUBT)
            return
        rest = self._prefetcher.rest_of(reading, connection)
        if rest is None:
            # It starts once no prefetch writes into its blocks: see `_apply`.
            return
        try:
            blocks = RequestBlocks(rest)
            selected = [(leg, blocks.select(leg.leg)) for leg in connection.legs]
        except ReshardError as error:
            self._fail(reading, str(error), ReadFailure.PARAMETERS)
            return
        parts = [part for each in selected for part in self._transfers.cut(*each)]
        read_from = {part.leg.remote.peer for part in parts}
        connection.lifetime.begin_request()
        reading.connection = connection
        reading.lease_tables = [
            table
            for name, table in connection.lease_tables.items()
            if name in read_from or reading.prefetched is not None
        ]
        keys, num_tables = reading.take_keys(len(parts)), len(reading.lease_tables)
        try:
            self._ledger.post(reading, keys, pending_checks=num_tables)
            reading.tell(self._now_s)
            self._transfers.start(request_id, parts, connection, first_key=keys.start)
            if self._ledger.advance(reading) and num_tables:
                self._look_up(reading)
        except Exception as error:
            self._lose(request_id, error)
            # No part was started.
            for key in keys:
                self._ledger.part_drained(reading, key)

    def _apply(self, event: PartEvent, now_s: float) -> None:
        """Apply an event of a part; applying it twice changes nothing."""
        reading = self._readings.by_id.get(event.request_id)
        if reading is None:
            return
        if isinstance(event, PartDrained):
            self._count(event, reading)
        elif not event.local:
            self._break_off(reading, now_s)
        if reading.state in (ReadState.PREFETCHING, ReadState.WAITING):
            if self._prefetcher.apply(event, reading):
                self._wait_again(reading, now_s)
        elif isinstance(event, PartFailed):
            kind = ReadFailure.COPY if event.local else ReadFailure.TRANSFER
            self._fail(reading, event.fault, kind)
        elif self._ledger.part_drained(reading, event.key):
            try:
                self._look_up(reading)
            except Exception as error:
                self._lose(event.request_id, error)

    def _wait_again(self, reading: Reading, now_s: float) -> None:
        """Queue a request again that could not begin in its turn."""
        peer = self._peers.get_or_connect(reading.receive.source, now_s)
        waiting = reading.request_id, reading.receive
        if waiting not in peer.waiting:
            peer.waiting.append(waiting)
        if peer.connection is not None:
            self.on_connected(peer)

    def _count(self, event: PartDrained, reading: Reading) -> None:
        """Count the bytes of a part."""
        if event.telemetry is not None:
            self._stats.record_transfer(event.telemetry, event.strategy)
            reading.num_bytes += event.telemetry.totalBytes
            reading.strategies.add(event.strategy.value)

    def _look_up(self, reading: Reading) -> None:
        """Check the lease and the fingerprint of a request that was read completely."""
        assert reading.connection is not None
        reading.tell(self._now_s)
        if reading.connection.is_connected:
            self._lease_checks.begin(reading)
        else:
            # Its last parts were copied from the arena after the connection was closed.
            fault = "its connection was given up before its lease could be looked up"
            self._fail(reading, fault, ReadFailure.TRANSFER)

    def _judge(self, result: CheckResult) -> None:
        """Apply the result of a lease check."""
        reading = self._readings.find(result.key)
        if reading is None:
            return
        try:
            if result.failure is not None:
                self._fail(reading, result.fault, READ_FAILURES[result.failure])
            self._ledger.check_done(reading)
        except Exception as error:
            self._lose(reading.request_id, error)

    def _fail(self, reading: Reading, reason: str, failure: ReadFailure | None) -> None:
        self._readings.fail(reading, reason, failure, self._now_s)

    def _lose(self, request_id: RequestId, error: Exception) -> None:
        """Fail the one request that an unexpected exception concerns."""
        logger.exception("Request %s fails over an unexpected exception", quote(request_id))
        if (reading := self._readings.by_id.get(request_id)) is not None:
            self._fail(reading, repr(error), ReadFailure.UNFORESEEN)

    def _break_off(self, reading: Reading, now_s: float) -> None:
        """Break off the connection that a request is read with."""
        connection = reading.connection
        if connection is None and reading.prefetched is not None:
            connection = reading.prefetched.connection
        if connection is not None:
            self._peers.break_off(connection, now_s)

    def _run_out_of_time(self, reading: Reading, now_s: float) -> None:
        """Fail a request past its deadline, and name what it waited for."""
        source = reading.receive.source
        where = f"{quote(source.engine_id)} at {quote(source.host)}:{source.port}"
        if num_parts := len(reading.parts):
            waited_for = f"{num_parts} reads from {where}"
            self._break_off(reading, now_s)
        elif reading.connection is None:
            is_connected = reading.peer is not None and reading.peer.connection is not None
            waited_for = f"its turn at {where}" if is_connected else f"{where} to be connected"
        else:
            # A look that hangs is told of by `LeaseChecks`, which breaks the connection off.
            waited_for = f"its lease to be looked up at {where}"
        reason = f"waited {self._timeout_s:g} s for {waited_for}"
        self._fail(reading, reason, ReadFailure.DEADLINE)

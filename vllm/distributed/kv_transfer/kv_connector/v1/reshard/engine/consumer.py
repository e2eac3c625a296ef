# SPDX-License-Identifier: Apache-2.0
"""The requests that a worker reads: from being asked for until nothing writes for them any more.

Whatever an exception that nobody foresaw comes up with is one request's, which fails, or is done by
the next turn: what is to be done is taken from where it waits once it is done.

A request is *failed* as soon as that is known, and *received* once it is whole, or has failed and
is drained. Its blocks may be used for something else only then: see `protocol.ledgers`.

All of this belongs to the connector's thread.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from vllm.logger import init_logger

from ..errors import ReshardError
from ..protocol.ids import RequestId
from ..protocol.ledgers import ConsumerLedger, Outcome, ReadState
from ..protocol.messages import Receive, RemoteEngineAddress
from ..protocol.quoting import one_line, quote
from ..transport.budget import Budget
from ..transport.connection import PeerConnection
from ..transport.lane import Lane
from ..transport.lease_check import LeaseCheckFailure, Verdict
from ..transport.remote import LocalCache, RequestBlocks
from ..transport.transfers import PartDrained, PartEvent, PartFailed, Transfers
from .completions import CompletionHandler
from .doubt import BlocksInDoubt
from .notifier import Notifier
from .peers import Peer, PeerTable
from .prefetcher import Prefetcher
from .queues import taken_once_done
from .readings import READ_FAILURES, Reading
from .stats import ReadFailure, ReshardStats
from .traces import trace_of_read

logger = init_logger(__name__)

_NO_OFFER = "check that the engine runs, and send the request through prefill again"


class ConsumerSide:
    """All requests being read.

    Args:
        peers: Where they are read from.
        transfers: What is on its way.
        notifier: Notifies the producers of their blocks.
        stats: Where to count.
        timeout_s: How long a request may take from `start_request` until it is received.
        name: The worker's, for traces.
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
        self._name = name
        self._peers = peers
        self._transfers = transfers
        self._stats = stats
        self._timeout_s = timeout_s
        self._ledger: ConsumerLedger[int] = ConsumerLedger()
        # Connected peers for which requests wait, in turns.
        self._ready: dict[RemoteEngineAddress, Peer] = {}
        # Those with which leases are being looked up.
        self._looking: dict[PeerConnection, None] = {}
        self._reading: dict[RequestId, Reading] = {}
        # In the order in which they are due.
        self._deadlines: deque[tuple[float, RequestId, int]] = deque()
        self._num_taken_up = 0
        # The time of the poll that is under way.
        self._now_s = 0.0
        # What is to be taken note of.
        self._events: deque[PartEvent] = deque()
        self._verdicts: deque[tuple[PeerConnection | None, Verdict[tuple[RequestId, int]]]] = (
            deque()
        )
        self._failed: deque[Outcome] = deque()
        self._ended: deque[Outcome] = deque()
        self._doubt = BlocksInDoubt(peers.lanes, stats)
        self._prefetcher = Prefetcher(transfers, self._ledger)
        self._completions = CompletionHandler(notifier, stats, self._doubt)
        self._reader: LocalCache | None = None

    def __len__(self) -> int:
        """Requests that are not quiet."""
        return len(self._reading)

    @property
    def has_backlog(self) -> bool:
        """Whether more can begin than a turn's budget has allowed."""
        return bool(self._ready) or self._transfers.has_backlog

    @property
    def is_moving(self) -> bool:
        """True while a poll soon may have results of requests."""
        return bool(
            self.has_backlog or self._transfers.is_moving or self._looking or self._doubt.hung
        )

    @property
    def next_due_s(self) -> float | None:
        """When the next request fails that is not received before; None without one.

        Also one that has failed before, and is not drained by then: its peer is waited
        for no longer.
        """
        while self._deadlines:
            due_at_s, request_id, number = self._deadlines[0]
            reading = self._reading.get(request_id)
            if reading is not None and reading.number == number:
                return due_at_s
            self._deadlines.popleft()
        return None

    def set_local_cache(self, reader: LocalCache) -> None:
        """Where to read to, known once the caches are registered."""
        self._reader = self._prefetcher.reader = reader
        self._doubt.num_block_ids = reader.cache.num_block_ids

    def start_request(self, request_id: RequestId, receive: Receive, now_s: float) -> None:
        """Read a request once its peer is connected; what goes wrong with that is its failure."""
        self._now_s = now_s
        if (reading := self._reading.get(request_id)) is not None and reading.receive is receive:
            # A turn that has failed has come so far.
            return
        try:
            self._start(request_id, receive, now_s)
        except Exception as error:
            if any(receive.local_block_ids) and request_id not in self._reading:
                self._account(request_id, receive, None, now_s)
            self._lose(request_id, error)

    def prefetch(
        self, request_id: RequestId, receive: Receive, part: Receive, now_s: float
    ) -> None:
        """Read what is computed of a request that is not offered yet.

        Args:
            request_id: The request.
            receive: What is to be read of it then.
            part: What can be read of it now.
            now_s: The time.
        """
        self._now_s = now_s
        reading = self._reading.get(request_id)
        connection = self._peers.get_or_connect(part.source, now_s).connection
        is_another = reading is not None and reading.receive is not receive
        if connection is None or is_another or self._doubt.are_too_many:
            return
        self._prefetcher.read(
            request_id,
            reading,
            part,
            connection,
            lambda: self._account(request_id, receive, None, now_s, ReadState.PREFETCHING),
        )

    def refuse(
        self,
        request_id: RequestId,
        receive: Receive,
        reason: str,
        failure: ReadFailure | None,
        now_s: float,
    ) -> None:
        """Fail a request that is not offered; None for a failure that is told elsewhere."""
        self._now_s = now_s
        reading = self._reading.get(request_id)
        if reading is None or reading.receive is not receive:
            reading = self._account(request_id, receive, None, now_s)
        self._fail(request_id, reading, reason, failure)

    def _start(self, request_id: RequestId, receive: Receive, now_s: float) -> None:
        if receive.fault is not None:
            # Where nothing was to be read, no request waits for it.
            if any(receive.local_block_ids):
                self.refuse(request_id, receive, receive.fault, ReadFailure.PARAMETERS, now_s)
            return
        peer = self._peers.get_or_connect(receive.source, now_s)
        if any(receive.local_block_ids):
            reading = self._reading.get(request_id)
            if reading is not None and reading.state is ReadState.PREFETCHING:
                self._go_on(reading, receive, peer, now_s)
            else:
                self._account(request_id, receive, peer, now_s)
        elif peer.connection is not None:
            # It waits for no read of another request's.
            self._completions.notify_producers(receive, peer.connection)
            return
        peer.waiting.append((request_id, receive))

    def _go_on(self, reading: Reading, receive: Receive, peer: Peer, now_s: float) -> None:
        """A request is offered of which something was read before: its time begins now."""
        self._num_taken_up += 1
        reading.number, reading.receive, reading.peer = self._num_taken_up, receive, peer
        reading.taken_up_at_s = now_s
        self._set_deadline(reading, now_s)
        self._transfers.promote(reading.request_id)
        reading.enter(ReadState.WAITING, now_s)

    def _set_deadline(self, reading: Reading, now_s: float) -> None:
        reading.due_at_s = now_s + self._timeout_s
        self._deadlines.append((reading.due_at_s, reading.request_id, reading.number))

    def on_connected(self, peer: Peer) -> None:
        """What has waited for a peer can begin: it is connected now."""
        self._ready[peer.address] = peer

    def trace_handshake(self, address: RemoteEngineAddress, took_s: float, now_s: float) -> None:
        """Export the handshake that requests have waited for."""
        for reading in self._reading.values():
            if reading.trace is not None and reading.receive.source == address:
                reading.trace.span("handshake", now_s - took_s, now_s)

    def begin(self, now_s: float, budget: Budget) -> None:
        """Post reads of what has waited, one request of each peer in turns.

        Args:
            now_s: The time.
            budget: As far as it goes.
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
        """A peer cannot be connected: fail the requests that waited for it, and return them."""
        failed = []
        for request_id, receive in taken_once_done(peer.waiting):
            reading = self._reading.get(request_id)
            if reading is not None and reading.waits_for(receive):
                reason = f"handshake failed: {one_line(error)}"
                self._fail(request_id, reading, reason, ReadFailure.HANDSHAKE)
                failed.append(request_id)
        return failed

    def abandon(self, request_ids: Iterable[RequestId]) -> None:
        """Another worker of this engine could not read these: fail them here, too."""
        for request_id in request_ids:
            if (reading := self._reading.get(request_id)) is not None:
                self._fail(request_id, reading, "another worker could not read it", None)

    def advance(self, now_s: float, budget: Budget) -> None:
        """Look at what is on its way, as far as the budget goes, and fail what takes too long."""
        self._now_s = now_s
        self._events += self._transfers.advance(now_s, budget)
        for event in taken_once_done(self._events):
            self._apply(event, now_s)
        self._advance_lookups(now_s)
        while (due_at_s := self.next_due_s) is not None and due_at_s <= now_s:
            _, request_id, _ = self._deadlines[0]
            self._run_out_of_time(request_id, self._reading[request_id], now_s)
            self._deadlines.popleft()
        self._doubt.contain(now_s)

    def end(self, lane: Lane) -> None:
        """Close a retired lane: all that its connections could write into is drained then.

        What one call has not done, the next one does.
        """
        for connection in list(lane.connections):
            self._looking.pop(connection, None)
            self._transfers.retire(connection)
            self._verdicts += ((None, each) for each in connection.leases.give_up())
        self._judge_all(self._now_s)
        lane.close()
        self._transfers.end(lane)

    def stood_still(self, for_s: float) -> None:
        """Nothing could be done for so many seconds; leases may have run out meanwhile."""
        for reading in self._reading.values():
            reading.stood_still_s += for_s

    def take_failed(self) -> dict[RequestId, frozenset[int]]:
        """Requests that have failed since the last call, with their blocks."""
        self._failed += self._ledger.take_failed()
        failed = {}
        while self._failed:
            outcome = self._failed.popleft()
            reading = self._reading[outcome.request_id]
            block_ids = frozenset[int]().union(*reading.receive.local_block_ids)
            failed[outcome.request_id] = block_ids
            try:
                in_flight = self._ledger.num_parts_of(outcome.request_id)
                self._completions.failed(outcome, reading, len(block_ids) if in_flight else 0)
            except Exception:
                self._tell_cut_short(outcome)
        return failed

    def take_received(self) -> set[RequestId]:
        """Requests that nothing writes for any more; producers are told of those that were read."""
        self._ended += self._ledger.take_ended()
        received = set()
        while self._ended:
            outcome = self._ended.popleft()
            received.add(outcome.request_id)
            try:
                reading = self._reading.pop(outcome.request_id)
                self._completions.ended(outcome, reading, self._now_s)
                reading.enter(ReadState.ENDED, self._now_s)
            except Exception:
                self._tell_cut_short(outcome)
        return received

    def _tell_cut_short(self, outcome: Outcome) -> None:
        logger.exception(
            "What follows the end of request %s was cut short: its lease may have to run out",
            quote(outcome.request_id),
        )

    def _account(
        self,
        request_id: RequestId,
        receive: Receive,
        peer: Peer | None,
        now_s: float,
        state: ReadState = ReadState.WAITING,
    ) -> Reading:
        """Take a request into account until it is reported; it is due once it is offered."""
        self._num_taken_up += 1
        trace = trace_of_read(self._name, receive)
        reading = Reading(
            request_id,
            self._num_taken_up,
            now_s,
            math.inf,
            receive,
            peer,
            state=state,
            since_s=now_s,
            trace=trace,
        )
        self._ledger.begin(request_id)
        self._reading[request_id] = reading
        if state is ReadState.WAITING:
            self._set_deadline(reading, now_s)
        logger.debug(
            "Request %s: %s at engine %s, to read %d blocks.",
            quote(request_id),
            one_line(reading.state.value),
            quote(receive.source.engine_id),
            sum(map(len, receive.local_block_ids)),
        )
        return reading

    def _begin_next(
        self, request_id: RequestId, receive: Receive, connection: PeerConnection, now_s: float
    ) -> None:
        """Begin the request that has waited longest for a peer."""
        if not any(receive.local_block_ids):
            self._completions.notify_producers(receive, connection)
            return
        reading = self._reading.get(request_id)
        # It may have failed while it waited.
        if reading is not None and reading.waits_for(receive):
            self._begin(request_id, reading, connection, now_s)

    def _begin(
        self,
        request_id: RequestId,
        reading: Reading,
        connection: PeerConnection,
        now_s: float,
    ) -> None:
        """Queue the reads of a request."""
        assert self._reader is not None
        receive, engine = reading.receive, connection.engine
        if self._doubt.are_too_many and reading.peer is not None and reading.peer.is_suspect(now_s):
            reason = f"{self._doubt.count:d} blocks may still be written by earlier reads"
            self._fail(request_id, reading, reason, ReadFailure.DOUBT)
            return
        prefetched = reading.prefetched
        if prefetched is not None and not prefetched.is_of(receive, connection):
            if self._ledger.num_parts_of(request_id):
                # The same blocks are read into once nothing else is. See `_apply`.
                self._prefetcher.spoil(reading)
                return
            prefetched = None
        try:
            rest = receive if prefetched is None else prefetched.rest_of(receive)
            blocks = RequestBlocks(rest, self._reader)
            selected = [(leg, blocks.select(leg.leg)) for leg in engine.legs]
        except ReshardError as error:
            self._fail(request_id, reading, str(error), ReadFailure.PARAMETERS)
            return
        parts = [part for each in selected for part in self._transfers.cut(*each)]
        read_from = {part.leg.remote.peer for part in parts}
        connection.lifetime.begin_request()
        reading.connection = connection
        reading.enter(ReadState.READING, self._now_s)
        reading.lease_tables = [
            table
            for name, table in engine.lease_tables.items()
            if name in read_from or prefetched is not None
        ]
        keys, num_tables = reading.take_keys(len(parts)), len(reading.lease_tables)
        try:
            self._ledger.post(request_id, keys, pending_checks=num_tables)
            self._transfers.start(request_id, parts, connection, first_key=keys.start)
            if num_tables and not self._ledger.num_parts_of(request_id):
                self._look_up(request_id, reading)
        except Exception as error:
            self._lose(request_id, error)
            # None of them is on its way.
            for key in keys:
                self._ledger.part_drained(request_id, key)

    def _apply(self, event: PartEvent, now_s: float) -> None:
        """Take note of what has happened to a part; the same again changes nothing."""
        reading = self._reading.get(event.request_id)
        if reading is None:
            return
        if reading.state in (ReadState.PREFETCHING, ReadState.WAITING):
            self._apply_to_prefetched(event, reading, now_s)
            return
        if isinstance(event, PartFailed):
            if not event.local:
                self._break_off(reading, now_s)
            kind = ReadFailure.COPY if event.local else ReadFailure.TRANSFER
            self._fail(event.request_id, reading, event.fault, kind)
            return
        self._count(event, reading)
        if self._ledger.part_drained(event.request_id, event.key):
            try:
                self._look_up(event.request_id, reading)
            except Exception as error:
                self._lose(event.request_id, error)

    def _apply_to_prefetched(self, event: PartEvent, reading: Reading, now_s: float) -> None:
        """Take note of what has happened to what is read of a request before its turn."""
        request_id, prefetched = event.request_id, reading.prefetched
        assert prefetched is not None
        if isinstance(event, PartFailed):
            if not event.local:
                self._break_off(reading, now_s)
            self._prefetcher.spoil(reading)
            return
        self._count(event, reading)
        if event.telemetry is not None:
            self._stats.record_prefetched(event.telemetry.totalBytes)
        self._ledger.part_drained(request_id, event.key)
        if (
            prefetched.is_spoiled
            and reading.state is ReadState.WAITING
            and not self._ledger.num_parts_of(request_id)
        ):
            peer = self._peers.get_or_connect(reading.receive.source, now_s)
            if (request_id, reading.receive) not in peer.waiting:
                peer.waiting.append((request_id, reading.receive))
            if peer.connection is not None:
                self.on_connected(peer)

    def _count(self, event: PartDrained, reading: Reading) -> None:
        """Count what a part has brought."""
        if event.telemetry is not None:
            self._stats.record_transfer(event.telemetry, event.strategy)
            if reading.trace is not None:
                reading.trace.num_bytes += event.telemetry.totalBytes
                reading.trace.strategies.add(event.strategy.value)

    def _look_up(self, request_id: RequestId, reading: Reading) -> None:
        """All of a request was read: see that it was still held, and was what was wanted."""
        receive, connection = reading.receive, reading.connection
        assert receive.fingerprint is not None and connection is not None
        reading.enter(ReadState.CHECKING, self._now_s)
        if not connection.is_connected:
            # What had landed in the arena was copied from there after its connection was closed.
            fault = "its connection was given up before its lease could be looked up"
            self._fail(request_id, reading, fault, ReadFailure.TRANSFER)
            return
        if reading.lease_tables:
            self._looking[connection] = None
        for table in reading.lease_tables:
            connection.leases.check_later(
                (request_id, reading.number),
                receive.remote_request_id,
                receive.fingerprint,
                table,
                reading.due_at_s,
            )

    def _advance_lookups(self, now_s: float) -> None:
        """Look up the leases of what was read, and hear what was found."""
        for connection in list(self._looking):
            self._verdicts += ((connection, each) for each in connection.leases.advance())
            self._judge_all(now_s)
            if not connection.leases:
                del self._looking[connection]

    def _judge_all(self, now_s: float) -> None:
        """Take note of what was found; where a connection is named, that it cannot be used."""
        for connection, verdict in taken_once_done(self._verdicts):
            if connection is not None and verdict.failure is LeaseCheckFailure.PEER:
                # Also where its request has failed meanwhile: nothing else would tell.
                self._peers.break_off(connection, now_s)
            self._judge(verdict)

    def _judge(self, verdict: Verdict[tuple[RequestId, int]]) -> None:
        request_id, number = verdict.key
        reading = self._reading.get(request_id)
        if reading is None or reading.number != number:
            return
        try:
            if verdict.failure is not None:
                self._fail(request_id, reading, verdict.fault, READ_FAILURES[verdict.failure])
            self._ledger.check_done(request_id)
        except Exception as error:
            self._lose(request_id, error)

    def _fail(
        self, request_id: RequestId, reading: Reading, reason: str, failure: ReadFailure | None
    ) -> None:
        """Fail a request, unless it has failed already; what was not posted of it never is."""
        if request_id in self._ledger and reading.state is not ReadState.FAILED:
            if reading.state is ReadState.PREFETCHING:
                # What is under way of it is not waited for without an end.
                self._set_deadline(reading, self._now_s)
            reading.failed_in = reading.state, self._now_s - reading.since_s
            reading.failure = failure
            self._transfers.give_up(request_id)
            reading.enter(ReadState.FAILED, self._now_s)
            if reading.connection is not None:
                reading.connection.lifetime.end_request()
        self._ledger.fail(request_id, reason)

    def _lose(self, request_id: RequestId, error: Exception) -> None:
        """Fail a request over an exception that nobody foresaw: it is no other's."""
        logger.exception(
            "Request %s fails over an exception that nobody foresaw", quote(request_id)
        )
        if (reading := self._reading.get(request_id)) is not None:
            self._fail(request_id, reading, repr(error), ReadFailure.UNFORESEEN)

    def _break_off(self, reading: Reading, now_s: float) -> None:
        """Read nothing more with the connection that a request is read with."""
        connection = reading.connection
        if connection is None and reading.prefetched is not None:
            connection = reading.prefetched.connection
        if connection is not None:
            self._peers.break_off(connection, now_s)

    def _run_out_of_time(self, request_id: RequestId, reading: Reading, now_s: float) -> None:
        """Fail a request whose time is over, and say what it waited for."""
        source = reading.receive.source
        where = f"{quote(source.engine_id)} at {quote(source.host)}:{source.port}"
        if num_legs := self._ledger.num_parts_of(request_id):
            waited_for = f"{num_legs} reads from {where}"
            self._break_off(reading, now_s)
        elif reading.connection is None:
            waited_for = f"{where} to be connected"
        elif reading.connection.leases.waits_for_offer((request_id, reading.number)):
            fault = f"{where} did not say within {self._timeout_s:g} s what it offers: {_NO_OFFER}"
            self._fail(request_id, reading, fault, ReadFailure.LEASE)
            return
        else:
            waited_for = f"its lease to be looked up at {where}"
            self._break_off(reading, now_s)
        reason = f"waited {self._timeout_s:g} s for {waited_for}"
        self._fail(request_id, reading, reason, ReadFailure.DEADLINE)

# SPDX-License-Identifier: Apache-2.0
"""The requests that a worker reads: from being asked for until nothing writes for them any more.

A request is *failed* as soon as that is known, and *received* once it is whole, or has failed and
is drained. Its blocks may be used for something else only then: see `protocol.ledgers`.

All of this belongs to the connector's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm.logger import init_logger

from ..errors import ReshardError
from ..protocol.ids import RequestId
from ..protocol.ledgers import ConsumerLedger, ReadState
from ..protocol.lifetimes import PEER_GRACE_S
from ..protocol.messages import Receive, RemoteEngineAddress
from ..transport.budget import Budget
from ..transport.connection import PeerConnection
from ..transport.lane import Lane
from ..transport.lease_check import LeaseCheckFailure, PreparedTable, Verdict
from ..transport.remote import LocalCache, RequestBlocks
from ..transport.transfers import PartFailed, Transfers
from .notifier import Notifier
from .peers import Peer, PeerTable
from .stats import ReadFailure, ReshardStats

logger = init_logger(__name__)

_READ_FAILURES = {
    LeaseCheckFailure.PEER: ReadFailure.TRANSFER,
    LeaseCheckFailure.LEASE: ReadFailure.LEASE,
    LeaseCheckFailure.FINGERPRINT: ReadFailure.FINGERPRINT,
}

_MAY_BE_ANOTHERS = frozenset({ReadFailure.FINGERPRINT, ReadFailure.PARAMETERS})
"""Failures after which what is held under a request's name may be another's, whose blocks are not
ours to give back: the lease ends it."""

_REMEDIES = {
    ReadFailure.TRANSFER: ": check that the engine runs and can be reached, and send the request "
    "through prefill again",
    ReadFailure.DEADLINE: ": check that the engine runs and can be reached, or give it longer with "
    "kv_read_timeout_s",
    ReadFailure.DOUBT: ": restart the engines that do not answer, or this one",
}

_NO_OFFER = "check that the engine runs, and send the request through prefill again"

_MOST_IN_DOUBT = 4
"""One in so many blocks of the cache may be in doubt; beyond that, hung peers are cut."""


@dataclass(slots=True)
class _Reading:
    """A request being read, or waiting for that.

    Attributes:
        number: Which of those that had this name.
        due_at_s: When it fails unless it was received.
        receive: What to read.
        peer: From where; None where its parameters name none.
        connection: The connection that it is read with, once it is.
        lease_tables: Where to see, after that, that it was still held.
        state: Where it is.
        since_s: Since when.
        failure: What went wrong first here; None also where it did elsewhere.
        failed_in: The state in which it failed, and how many seconds it had been in it.
        num_in_doubt: Its blocks, since it has failed and while they may be written.
    """

    number: int
    due_at_s: float
    receive: Receive
    peer: Peer | None
    connection: PeerConnection | None = None
    lease_tables: Sequence[PreparedTable] = ()
    state: ReadState = ReadState.WAITING
    since_s: float = 0.0
    failure: ReadFailure | None = None
    failed_in: tuple[ReadState, float] = (ReadState.WAITING, 0.0)
    num_in_doubt: int = 0

    def waits_for(self, receive: Receive) -> bool:
        """Whether it is this request of those that had its name, and waits to be read."""
        return self.receive is receive and self.state is ReadState.WAITING


class ConsumerSide:
    """All requests being read.

    Args:
        peers: Where they are read from.
        transfers: What is on its way.
        notifier: Notifies the producers of their blocks.
        stats: Where to count.
        timeout_s: How long a request may take from `start_request` until it is received.
    """

    def __init__(
        self,
        peers: PeerTable,
        transfers: Transfers,
        notifier: Notifier,
        stats: ReshardStats,
        timeout_s: float,
    ) -> None:
        self._peers = peers
        self._transfers = transfers
        self._notifier = notifier
        self._stats = stats
        self._timeout_s = timeout_s
        self._ledger: ConsumerLedger[int] = ConsumerLedger()
        # Connected peers for which requests wait, in turns.
        self._ready: dict[RemoteEngineAddress, Peer] = {}
        # Those with which leases are being looked up.
        self._looking: dict[PeerConnection, None] = {}
        self._reading: dict[RequestId, _Reading] = {}
        # In the order in which they are due.
        self._deadlines: deque[tuple[float, RequestId, int]] = deque()
        self._num_taken_up = 0
        # The time of the poll that is under way.
        self._now_s = 0.0
        self._num_in_doubt = 0
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
        return bool(self.has_backlog or self._transfers.is_moving or self._looking or self._hung)

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
        self._reader = reader

    def start_request(self, request_id: RequestId, receive: Receive, now_s: float) -> None:
        """Read a request once its peer is connected."""
        self._now_s = now_s
        if receive.fault is not None:
            if not any(receive.local_block_ids):
                # Nothing was to be read, and no request waits for it.
                return
            reading = self._account(request_id, receive, None, now_s)
            self._fail(request_id, reading, receive.fault, ReadFailure.PARAMETERS)
            return
        peer = self._peers.get_or_connect(receive.source, now_s)
        if any(receive.local_block_ids):
            self._account(request_id, receive, peer, now_s)
        elif peer.connection is not None:
            # It waits for no read of another request's.
            self._notify(receive, peer.connection)
            return
        peer.waiting.append((request_id, receive))

    def on_connected(self, peer: Peer) -> None:
        """What has waited for a peer can begin: it is connected now."""
        self._ready[peer.address] = peer

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
            self._begin_next(peer, peer.connection, now_s, budget)
            if peer.waiting:
                self._ready[address] = peer
            if budget.is_spent:
                return

    def fail_waiting(self, peer: Peer, error: Exception) -> list[RequestId]:
        """A peer cannot be connected: fail the requests that waited for it, and return them."""
        failed = []
        for request_id, receive in peer.take_waiting():
            reading = self._reading.get(request_id)
            if (
                reading is not None
                and reading.receive is receive
                and reading.state is ReadState.WAITING
            ):
                reason = f"handshake failed: {error}"
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
        for event in self._transfers.advance(now_s, budget):
            reading = self._reading[event.request_id]
            if isinstance(event, PartFailed):
                if not event.local:
                    self._break_off(reading, now_s)
                kind = ReadFailure.COPY if event.local else ReadFailure.TRANSFER
                self._fail(event.request_id, reading, event.fault, kind)
                continue
            if event.telemetry is not None:
                self._stats.record_transfer(event.telemetry, event.strategy)
            if self._ledger.part_drained(event.request_id, event.key):
                self._look_up(event.request_id, reading)
        self._advance_lookups(now_s)
        while (due_at_s := self.next_due_s) is not None and due_at_s <= now_s:
            _, request_id, _ = self._deadlines.popleft()
            self._run_out_of_time(request_id, self._reading[request_id], now_s)
        self._contain(now_s)

    def end(self, lane: Lane) -> None:
        """Close a retired lane: all that its connections could write into is drained then."""
        connections = list(lane.connections)
        for connection in connections:
            self._looking.pop(connection, None)
            self._transfers.retire(connection)
            for verdict in connection.leases.give_up():
                self._judge(verdict)
        lane.close()
        for connection in connections:
            self._transfers.end(connection)

    def take_failed(self) -> dict[RequestId, frozenset[int]]:
        """Requests that have failed since the last call, with their blocks."""
        failed = {}
        for outcome in self._ledger.take_failed():
            reading = self._reading[outcome.request_id]
            receive, failure = reading.receive, reading.failure
            failed[outcome.request_id] = frozenset[int]().union(*receive.local_block_ids)
            if self._ledger.num_parts_of(outcome.request_id):
                reading.num_in_doubt = len(failed[outcome.request_id])
                self._num_in_doubt += reading.num_in_doubt
                self._stats.record_blocks_in_doubt(self._num_in_doubt)
            if failure is None:
                # The worker that could not read it has told so.
                self._release(reading)
                continue
            self._stats.record_failed_read(failure)
            if failure not in _MAY_BE_ANOTHERS:
                self._release(reading)
            # A failed handshake was told, with the requests that it cost.
            if failure is not ReadFailure.HANDSHAKE:
                state, for_s = reading.failed_in
                logger.error(
                    "KV cache of request %s could not be read from engine %s (%s for %.1f s): %s%s",
                    outcome.request_id,
                    receive.source.engine_id,
                    state.value,
                    for_s,
                    outcome.failure,
                    _REMEDIES.get(failure, ""),
                )
        return failed

    def take_received(self) -> set[RequestId]:
        """Requests that nothing writes for any more; producers are told of those that were read."""
        received = set()
        for outcome in self._ledger.take_ended():
            reading = self._reading.pop(outcome.request_id)
            self._enter(outcome.request_id, reading, ReadState.ENDED)
            if reading.num_in_doubt:
                self._num_in_doubt -= reading.num_in_doubt
                self._stats.record_blocks_in_doubt(self._num_in_doubt)
            if outcome.failure is None:
                assert reading.connection is not None
                reading.connection.lifetime.end_request()
                self._release(reading)
            received.add(outcome.request_id)
        return received

    def _enter(self, request_id: RequestId, reading: _Reading, state: ReadState) -> None:
        """Take note of a request's next state, and tell it in the log."""
        logger.debug(
            "Request %s: %s at engine %s, after %.1f ms of %s.",
            request_id,
            state.value,
            reading.receive.source.engine_id,
            1e3 * (self._now_s - reading.since_s),
            reading.state.value,
        )
        reading.state, reading.since_s = state, self._now_s

    def _account(
        self, request_id: RequestId, receive: Receive, peer: Peer | None, now_s: float
    ) -> _Reading:
        """Take a request into account until it is reported."""
        self._num_taken_up += 1
        due_at_s = now_s + self._timeout_s
        reading = _Reading(self._num_taken_up, due_at_s, receive, peer, since_s=now_s)
        self._reading[request_id] = reading
        self._deadlines.append((reading.due_at_s, request_id, reading.number))
        self._ledger.begin(request_id)
        logger.debug(
            "Request %s: %s at engine %s, to read %d blocks.",
            request_id,
            reading.state.value,
            receive.source.engine_id,
            sum(map(len, receive.local_block_ids)),
        )
        return reading

    def _begin_next(
        self, peer: Peer, connection: PeerConnection, now_s: float, budget: Budget
    ) -> None:
        """Begin the request that has waited longest for a peer."""
        request_id, receive = peer.waiting.popleft()
        if not any(receive.local_block_ids):
            self._notify(receive, connection)
            return
        reading = self._reading.get(request_id)
        # It may have failed while it waited.
        if (
            reading is not None
            and reading.receive is receive
            and reading.state is ReadState.WAITING
        ):
            self._begin(request_id, reading, connection, now_s, budget)

    def _begin(
        self,
        request_id: RequestId,
        reading: _Reading,
        connection: PeerConnection,
        now_s: float,
        budget: Budget,
    ) -> None:
        """Read a request: what of it goes beyond the budget is posted in later turns."""
        assert self._reader is not None
        receive, engine = reading.receive, connection.engine
        if (
            self._has_too_much_in_doubt()
            and reading.peer is not None
            and reading.peer.is_suspect(now_s)
        ):
            reason = f"{self._num_in_doubt} blocks may still be written by earlier reads"
            self._fail(request_id, reading, reason, ReadFailure.DOUBT)
            return
        try:
            blocks = RequestBlocks(receive, self._reader)
            selected = [(leg, blocks.select(leg.leg)) for leg in engine.legs]
        except ReshardError as error:
            self._fail(request_id, reading, str(error), ReadFailure.PARAMETERS)
            return
        parts = [part for each in selected for part in self._transfers.cut(*each)]
        read_from = {part.leg.remote.peer for part in parts}
        reading.connection = connection
        connection.lifetime.begin_request()
        self._enter(request_id, reading, ReadState.READING)
        reading.lease_tables = [
            table for name, table in engine.lease_tables.items() if name in read_from
        ]
        self._ledger.post(request_id, range(len(parts)), pending_checks=len(reading.lease_tables))
        self._transfers.start(request_id, parts, connection, now_s, budget)

    def _look_up(self, request_id: RequestId, reading: _Reading) -> None:
        """All of a request was read: see that it was still held, and was what was wanted."""
        receive, connection = reading.receive, reading.connection
        assert receive.fingerprint is not None and connection is not None
        self._enter(request_id, reading, ReadState.CHECKING)
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
            for verdict in connection.leases.advance():
                self._judge(verdict)
                if verdict.failure is LeaseCheckFailure.PEER:
                    # Also where its request has failed meanwhile: nothing else would tell.
                    self._peers.break_off(connection, now_s)
            if not connection.leases:
                del self._looking[connection]

    def _judge(self, verdict: Verdict[tuple[RequestId, int]]) -> None:
        request_id, number = verdict.key
        reading = self._reading.get(request_id)
        if reading is None or reading.number != number:
            return
        if verdict.failure is not None:
            self._fail(request_id, reading, verdict.fault, _READ_FAILURES[verdict.failure])
        self._ledger.check_done(request_id)

    def _fail(
        self, request_id: RequestId, reading: _Reading, reason: str, failure: ReadFailure | None
    ) -> None:
        """Fail a request, unless it has failed already; what was not posted of it never is."""
        if self._ledger.fail(request_id, reason):
            reading.failed_in = reading.state, self._now_s - reading.since_s
            self._enter(request_id, reading, ReadState.FAILED)
            reading.failure = failure
            if reading.connection is not None:
                reading.connection.lifetime.end_request()
            self._transfers.give_up(request_id)

    def _break_off(self, reading: _Reading, now_s: float) -> None:
        """Read nothing more with the connection that a request is read with."""
        if reading.connection is not None:
            self._peers.break_off(reading.connection, now_s)

    def _run_out_of_time(self, request_id: RequestId, reading: _Reading, now_s: float) -> None:
        """Fail a request whose time is over, and say what it waited for."""
        source = reading.receive.source
        where = f"{source.engine_id} at {source.host}:{source.port}"
        if reading.connection is None:
            waited_for = f"{where} to be connected"
        elif num_legs := self._ledger.num_parts_of(request_id):
            waited_for = f"{num_legs} reads from {where}"
            self._break_off(reading, now_s)
        elif reading.connection.leases.waits_for_offer((request_id, reading.number)):
            fault = f"{where} did not say within {self._timeout_s:g} s what it offers: {_NO_OFFER}"
            self._fail(request_id, reading, fault, ReadFailure.LEASE)
            return
        else:
            waited_for = f"its lease to be looked up at {where}"
            self._break_off(reading, now_s)
        reason = f"waited {self._timeout_s:g} s for {waited_for}"
        self._fail(request_id, reading, reason, ReadFailure.DEADLINE)

    def _has_too_much_in_doubt(self) -> bool:
        assert self._reader is not None
        num_ids = self._reader.cache.num_block_ids
        return self._num_in_doubt * _MOST_IN_DOUBT > num_ids

    @property
    def _hung(self) -> Lane | None:
        """A lane that is not waited for any longer, where too much memory is in doubt."""
        if not self._num_in_doubt or not self._has_too_much_in_doubt():
            return None
        draining = (lane for lane in self._peers.lanes.draining if not lane.is_drained)
        return next(draining, None)

    def _contain(self, now_s: float) -> None:
        """Where too much memory is in doubt, wait for hung peers no longer than for slow ones."""
        if (lane := self._hung) is None:
            return
        assert lane.retired_at_s is not None
        if now_s < lane.retired_at_s + PEER_GRACE_S:
            return
        logger.error(
            "Cutting a connection whose reads do not end: %d blocks of failed requests "
            "may be written by such reads. Its engine may have to be restarted.",
            self._num_in_doubt,
        )
        lane.force()

    def _release(self, reading: _Reading) -> None:
        """Tell the producers of a request's blocks that this worker is through with them."""
        peer = reading.peer
        producers = (peer and peer.connection) or reading.connection
        if producers is None or (producers is reading.connection and not producers.is_connected):
            return
        # A peer that cannot be read from may be gone; that it cannot be notified is no news then.
        known = reading.failure in (ReadFailure.TRANSFER, ReadFailure.DEADLINE)
        self._notify(reading.receive, producers, known_as_broken=known)

    def _notify(
        self, receive: Receive, producers: PeerConnection, *, known_as_broken: bool = False
    ) -> None:
        """Have the producers of a request's blocks told, if this engine can say what they hold."""
        if receive.secret is not None:
            self._notifier.give_up(receive.remote_request_id, receive.secret, producers)
        elif receive.fingerprint is not None:
            self._notifier.release(
                receive.remote_request_id,
                receive.fingerprint,
                producers,
                known_as_broken=known_as_broken,
            )


def named(request_ids: Iterable[RequestId], most: int = 8) -> str:
    """The requests that something was to be done for, fit for one line of a log."""
    ids = list(request_ids)
    if not ids:
        return ""
    more = f" and {len(ids) - most} more" if len(ids) > most else ""
    return f", and with it request{'s' * (len(ids) > 1)} {', '.join(ids[:most])}{more}"

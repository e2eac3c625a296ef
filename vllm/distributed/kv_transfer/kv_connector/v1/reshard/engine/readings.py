# SPDX-License-Identifier: Apache-2.0
"""The requests that a worker reads, and how the log and their traces tell of what they go through.

All of this belongs to the connector's thread.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from vllm.logger import init_logger

from ..protocol.ids import RequestId
from ..protocol.ledgers import ConsumerLedger, Read
from ..protocol.messages import Receive
from ..protocol.quoting import one_line, quote
from ..protocol.states import ReadState
from ..transport.connection import LookupKey, PeerConnection
from ..transport.lease_check import LeaseCheckFailure, PreparedTable
from ..transport.transfers import Transfers
from .peers import Peer
from .prefetch import Prefetched
from .stats import ReadFailure
from .traces import Trace, trace_of_read, what_was_read

logger = init_logger(__name__)

READ_FAILURES = {
    LeaseCheckFailure.PEER: ReadFailure.TRANSFER,
    LeaseCheckFailure.LEASE: ReadFailure.LEASE,
    LeaseCheckFailure.FINGERPRINT: ReadFailure.FINGERPRINT,
}

SPANS = {
    ReadState.AWAITING_PREFILL: "prefill",
    ReadState.IN_PREFILL: "prefill",
    ReadState.IN_LAST_CHUNK: "prefill",
    ReadState.OFFERED: "prefill",
    ReadState.PREFETCHING: "prefetch",
    ReadState.WAITING: "wait",
    ReadState.READING: "read",
    ReadState.CHECKING: "check",
    ReadState.FAILED: "drain",
}
"""What the spans are called that a request's states are in its trace."""


@dataclass(slots=True, kw_only=True)
class Reading(Read):
    """A request being read, or waiting for that.

    Attributes:
        number: Which of those that had this name.
        receive: What to read.
        peer: From where; None where its parameters name none.
        offered_at_s: Since when it could be read, as far as this worker knows.
        since_s: Since when it is in its state.
        told: The state that was told of last.
        due_at_s: When it fails unless it was received.
        connection: The connection that it is read with, once it is.
        lease_tables: Where to see, after that, that it was still held.
        failure: What went wrong first here; None also where it did elsewhere.
        failed_in: The state in which it failed, and how many seconds it had been in it.
        trace: Where what it goes through is exported; None where its client traces nothing.
        num_in_doubt: Its blocks, since it has failed and while they may be written.
        num_parts: How many parts of it were begun.
        prefetched: What of it was read before it was offered; None where nothing was.
        num_bytes: What was read of it, as far as NIXL can tell.
        strategies: How.
    """

    number: int
    receive: Receive
    peer: Peer | None
    offered_at_s: float
    since_s: float
    told: ReadState
    due_at_s: float = math.inf
    connection: PeerConnection | None = None
    lease_tables: Sequence[PreparedTable] = ()
    failure: ReadFailure | None = None
    failed_in: tuple[ReadState, float] = (ReadState.WAITING, 0.0)
    trace: Trace | None = None
    num_in_doubt: int = 0
    num_parts: int = 0
    prefetched: Prefetched | None = None
    num_bytes: int = 0
    strategies: set[str] = field(default_factory=set)

    @property
    def key(self) -> LookupKey:
        """Its name, and which of those that had it."""
        return self.request_id, self.number

    def waits_for(self, receive: Receive) -> bool:
        """Whether it is this request of those that had its name, and waits to be read."""
        return self.receive is receive and self.state is ReadState.WAITING

    def take_keys(self, count: int) -> range:
        """Keys of so many parts that are begun now."""
        first, self.num_parts = self.num_parts, self.num_parts + count
        return range(first, self.num_parts)

    def tell(self, now_s: float) -> None:
        """Tell in the log and in its trace which state it has come to, if it is a new one."""
        told, since_s = self.told, self.since_s
        if self.state is told:
            return
        self.told, self.since_s = self.state, now_s
        was_read = told in (ReadState.PREFETCHING, ReadState.READING)
        logger.debug(
            "Request %s: %s at engine %s, after %.1f ms of %s%s.",
            quote(self.request_id),
            one_line(self.state.value),
            quote(self.receive.source.engine_id),
            1e3 * (now_s - since_s),
            one_line(told.value),
            f", {self.num_bytes} bytes so far" if was_read else "",
        )
        if self.trace is not None:
            is_read = told is ReadState.READING
            read = what_was_read(self.num_bytes, self.strategies) if is_read else {}
            failed = {} if self.failure is None else {"error.type": self.failure.value}
            self.trace.span(SPANS[told], since_s, now_s, {**read, **failed})


class Readings:
    """The requests that a worker reads, until each is reported, and when they are due.

    Args:
        transfers: What is on its way.
        timeout_s: How long a request may take from when it is offered until it is received.
        name: The worker's, for traces.

    Attributes:
        ledger: What each of them waits for.
    """

    def __init__(
        self,
        transfers: Transfers,
        timeout_s: float,
        name: str = "",
    ) -> None:
        self.ledger: ConsumerLedger[Reading] = ConsumerLedger()
        self._transfers = transfers
        self._timeout_s = timeout_s
        self._name = name
        # In the order in which they are due.
        self._deadlines: deque[tuple[float, LookupKey]] = deque()
        self._num_taken_up = 0

    @property
    def by_id(self) -> Mapping[RequestId, Reading]:
        """The requests by their names."""
        return self.ledger.by_id

    def find(self, key: LookupKey) -> Reading | None:
        """A request; None where it is over, though another one have its name."""
        reading = self.by_id.get(key[0])
        return reading if reading is not None and reading.key == key else None

    def add(
        self,
        request_id: RequestId,
        receive: Receive,
        peer: Peer | None,
        now_s: float,
        state: ReadState = ReadState.WAITING,
        since_s: float | None = None,
        offered_at_s: float | None = None,
    ) -> Reading:
        """Take a request into account until it is reported; it is due once it is offered.

        Args:
            request_id: The request.
            receive: What to read of it.
            peer: From where; None where that is not connected for it yet, or never will be.
            now_s: The time.
            state: Where it is.
            since_s: Since when; None for now.
            offered_at_s: Since when it could be read; None for now.
        """
        self._num_taken_up += 1
        reading = Reading(
            request_id,
            state,
            number=self._num_taken_up,
            receive=receive,
            peer=peer,
            offered_at_s=now_s if offered_at_s is None else offered_at_s,
            since_s=now_s if since_s is None else since_s,
            told=state,
            trace=trace_of_read(self._name, receive),
        )
        self.ledger.begin(reading)
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

    def offer(
        self, reading: Reading, receive: Receive, peer: Peer, now_s: float, offered_at_s: float
    ) -> None:
        """A request is offered of which something was read before: its time begins now."""
        self._num_taken_up += 1
        reading.number, reading.receive, reading.peer = self._num_taken_up, receive, peer
        reading.offered_at_s = offered_at_s
        self._set_deadline(reading, now_s)
        self.ledger.offer(reading)
        self._transfers.promote(reading.request_id)
        reading.tell(now_s)

    def fail(
        self, reading: Reading, reason: str, failure: ReadFailure | None, now_s: float
    ) -> None:
        """Fail a request, unless it has failed already; what was not posted of it never is.

        Args:
            reading: The request.
            reason: Why, in words.
            failure: Of what kind that is; None where it is told elsewhere.
            now_s: The time.
        """
        if reading.is_decided:
            return
        if reading.state is ReadState.PREFETCHING:
            # What is under way of it is not waited for without an end.
            self._set_deadline(reading, now_s)
        self._transfers.give_up(reading.request_id)
        reading.failed_in = reading.state, now_s - reading.since_s
        reading.failure = failure
        self.ledger.fail(reading, reason)
        if reading.connection is not None:
            reading.connection.lifetime.end_request()
        reading.tell(now_s)

    @property
    def next_due_s(self) -> float | None:
        """When the next request fails that is not received before; None without one.

        Also one that has failed before, and is not drained by then: its peer is waited
        for no longer.
        """
        while self._deadlines:
            due_at_s, key = self._deadlines[0]
            reading = self.find(key)
            if reading is not None and not reading.is_over:
                return due_at_s
            self._deadlines.popleft()
        return None

    def overdue(self, now_s: float) -> Iterator[Reading]:
        """The requests whose time is over, each of which is told of once."""
        while (due_at_s := self.next_due_s) is not None and due_at_s <= now_s:
            (request_id, _) = self._deadlines[0][1]
            yield self.by_id[request_id]
            self._deadlines.popleft()

    def _set_deadline(self, reading: Reading, now_s: float) -> None:
        reading.due_at_s = now_s + self._timeout_s
        self._deadlines.append((reading.due_at_s, reading.key))


def named(request_ids: Iterable[RequestId], most: int = 8) -> str:
    """The requests that something was to be done for, fit for one line of a log."""
    ids = list(request_ids)
    if not ids:
        return ""
    more = f" and {len(ids) - most} more" if len(ids) > most else ""
    return f", and with it request{'s' * (len(ids) > 1)} {', '.join(map(quote, ids[:most]))}{more}"

# SPDX-License-Identifier: Apache-2.0
"""The requests that a worker reads, and how logs and traces record their states.

All of this belongs to the connector's thread.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from vllm.logger import init_logger

from ...protocol.ids import RequestId
from ...protocol.ledgers import ConsumerLedger, RequestRead
from ...protocol.messages import Receive
from ...protocol.quoting import one_line, quote
from ...protocol.states import ReadState
from ...transport.connection import PeerConnection
from ...transport.lease_check import CheckKey, LeaseCheckFailure, PreparedTable
from ...transport.transfers import Transfers
from ..connecting.peers import Peer
from ..stats import ReadFailure
from ..traces import Trace, trace_of_read, what_was_read
from .prefetch import Prefetched

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
"""Name of the trace span for each state of a request."""


@dataclass(slots=True, kw_only=True)
class Reading(RequestRead):
    """A request that is being read, or waits for that.

    Attributes:
        number: Unique number, which tells requests with the same id apart.
        receive: What to read.
        peer: The engine to read from; None where its parameters name none.
        offered_at_s: Since when it could be read, as far as this worker knows.
        since_s: Since when it is in its state.
        told: The last state that was logged.
        due_at_s: When it fails unless it is received; infinite without a deadline.
        connection: The connection that it is read with; None before that.
        lease_tables: Lease table rows to check once the blocks have been read.
        failure: Kind of its first failure here; None without one, or if it failed elsewhere.
        failed_in: The state in which it failed, and for how many seconds it had been in it.
        trace: Its trace; None where its client traces nothing.
        num_in_doubt: Number of its blocks that may still be written although it has failed.
        num_parts: Number of its parts that were begun.
        prefetched: What was read before it was offered; None for nothing.
        num_bytes: Bytes read, as far as NIXL reports them.
        strategies: How they were read.
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
    def key(self) -> CheckKey:
        """Its id and number."""
        return self.request_id, self.number

    def waits_for(self, receive: Receive) -> bool:
        """Return whether it is the request that `receive` belongs to, and waits to be read."""
        return self.receive is receive and self.state is ReadState.WAITING

    def take_keys(self, count: int) -> range:
        """Return keys for `count` parts that begin now."""
        first, self.num_parts = self.num_parts, self.num_parts + count
        return range(first, self.num_parts)

    def tell(self, now_s: float) -> None:
        """Log and trace its state, if that is a new one."""
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
    """The requests that a worker reads, until each is reported, and their deadlines.

    Args:
        transfers: The parts on their way.
        timeout_s: How long a request may take from its offer until it is received.
        name: The worker's name, for traces.

    Attributes:
        ledger: The state of each request, and the parts and checks that it waits for.
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
        # Ordered by deadline.
        self._deadlines: deque[tuple[float, CheckKey]] = deque()
        self._num_taken_up = 0

    @property
    def by_id(self) -> Mapping[RequestId, Reading]:
        """Requests by id."""
        return self.ledger.by_id

    def find(self, key: CheckKey) -> Reading | None:
        """Return a request; None once it is over, even if another one has its id."""
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
        """Account for a request until it is reported; its deadline is set once it is offered.

        Args:
            request_id: The request.
            receive: What to read.
            peer: The engine to read from; None if it is not connected for this request yet, or
                never will be.
            now_s: The time.
            state: The request's state.
            since_s: Since when it is in that state; None for now.
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
        """Offer a request that was prefetched; its deadline is set now."""
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
        """Fail a request, unless it is decided already; its unposted parts are dropped.

        Args:
            reading: The request.
            reason: Why, in words.
            failure: The kind of failure; None where it is reported elsewhere.
            now_s: The time.
        """
        if reading.is_decided:
            return
        if reading.state is ReadState.PREFETCHING:
            # Its reads under way must not be waited for without a deadline.
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
        """Earliest deadline of a request that is not over; None without one.

        A request that has failed but is not drained counts, too: at its deadline, the wait for its
        peer ends.
        """
        while self._deadlines:
            due_at_s, key = self._deadlines[0]
            reading = self.find(key)
            if reading is not None and not reading.is_over:
                return due_at_s
            self._deadlines.popleft()
        return None

    def overdue(self, now_s: float) -> Iterator[Reading]:
        """Yield the requests whose deadlines have passed, each once."""
        while (due_at_s := self.next_due_s) is not None and due_at_s <= now_s:
            (request_id, _) = self._deadlines[0][1]
            yield self.by_id[request_id]
            self._deadlines.popleft()

    def _set_deadline(self, reading: Reading, now_s: float) -> None:
        reading.due_at_s = now_s + self._timeout_s
        self._deadlines.append((reading.due_at_s, reading.key))


def named(request_ids: Iterable[RequestId], most: int = 8) -> str:
    """Return the requests that a task was for, as the end of one log line."""
    ids = list(request_ids)
    if not ids:
        return ""
    more = f" and {len(ids) - most} more" if len(ids) > most else ""
    return f", and with it request{'s' * (len(ids) > 1)} {', '.join(map(quote, ids[:most]))}{more}"

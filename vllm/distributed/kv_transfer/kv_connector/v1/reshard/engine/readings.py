# SPDX-License-Identifier: Apache-2.0
"""A request that a worker reads, and how the log and its trace tell of what it goes through."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm.logger import init_logger

from ..protocol.ids import RequestId
from ..protocol.ledgers import ReadState
from ..protocol.messages import Receive
from ..protocol.quoting import one_line, quote
from ..transport.connection import PeerConnection
from ..transport.lease_check import LeaseCheckFailure, PreparedTable
from .peers import Peer
from .prefetch import Prefetched
from .stats import ReadFailure
from .traces import Trace

logger = init_logger(__name__)

READ_FAILURES = {
    LeaseCheckFailure.PEER: ReadFailure.TRANSFER,
    LeaseCheckFailure.LEASE: ReadFailure.LEASE,
    LeaseCheckFailure.FINGERPRINT: ReadFailure.FINGERPRINT,
}

_SPANS = {
    ReadState.PREFETCHING: "prefetch",
    ReadState.WAITING: "wait",
    ReadState.READING: "read",
    ReadState.CHECKING: "check",
    ReadState.FAILED: "drain",
}
"""What the spans are called that a request's states are in its trace."""


@dataclass(slots=True)
class Reading:
    """A request being read, or waiting for that.

    Attributes:
        request_id: Its name.
        number: Which of those that had this name.
        taken_up_at_s: When this worker was told to read it.
        due_at_s: When it fails unless it was received.
        receive: What to read.
        peer: From where; None where its parameters name none.
        connection: The connection that it is read with, once it is.
        lease_tables: Where to see, after that, that it was still held.
        state: Where it is.
        since_s: Since when.
        failure: What went wrong first here; None also where it did elsewhere.
        failed_in: The state in which it failed, and how many seconds it had been in it.
        stood_still_s: For how long nothing was done for it, as its worker stood still.
        trace: Where what it goes through is exported; None where its client traces nothing.
        num_in_doubt: Its blocks, since it has failed and while they may be written.
        num_parts: How many parts of it were begun.
        prefetched: What of it was read before it was offered; None where nothing was.
    """

    request_id: RequestId
    number: int
    taken_up_at_s: float
    due_at_s: float
    receive: Receive
    peer: Peer | None
    connection: PeerConnection | None = None
    lease_tables: Sequence[PreparedTable] = ()
    state: ReadState = ReadState.WAITING
    since_s: float = 0.0
    failure: ReadFailure | None = None
    failed_in: tuple[ReadState, float] = (ReadState.WAITING, 0.0)
    stood_still_s: float = 0.0
    trace: Trace | None = None
    num_in_doubt: int = 0
    num_parts: int = 0
    prefetched: Prefetched | None = None

    def waits_for(self, receive: Receive) -> bool:
        """Whether it is this request of those that had its name, and waits to be read."""
        return self.receive is receive and self.state is ReadState.WAITING

    def take_keys(self, count: int) -> range:
        """Keys of so many parts that are begun now."""
        first, self.num_parts = self.num_parts, self.num_parts + count
        return range(first, self.num_parts)

    def enter(self, state: ReadState, now_s: float) -> None:
        """Take note of its next state, and tell it in the log and in its trace."""
        logger.debug(
            "Request %s: %s at engine %s, after %.1f ms of %s.",
            quote(self.request_id),
            state.value,
            quote(self.receive.source.engine_id),
            1e3 * (now_s - self.since_s),
            one_line(self.state.value),
        )
        if self.trace is not None:
            read = self.trace.what_was_read() if self.state is ReadState.READING else {}
            failed = {} if self.failure is None else {"error.type": self.failure.value}
            self.trace.span(_SPANS[self.state], self.since_s, now_s, {**read, **failed})
        self.state, self.since_s = state, now_s


def named(request_ids: Iterable[RequestId], most: int = 8) -> str:
    """The requests that something was to be done for, fit for one line of a log."""
    ids = list(request_ids)
    if not ids:
        return ""
    more = f" and {len(ids) - most} more" if len(ids) > most else ""
    return f", and with it request{'s' * (len(ids) > 1)} {', '.join(map(quote, ids[:most]))}{more}"

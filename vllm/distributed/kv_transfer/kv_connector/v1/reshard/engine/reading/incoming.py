# SPDX-License-Identifier: Apache-2.0
"""A request that a worker reads, how logs and traces record its states, and why it fails.

All of this belongs to the connector's thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

from vllm.logger import init_logger

from ...errors import ReshardError, one_line, quote
from ...protocol.ids import RequestId
from ...protocol.messages import Receive
from ...protocol.states import ReadState, expect_transition
from ...protocol.tasks import Task
from ...transport.connection import PeerConnection
from ...transport.lease_check import LeaseCheckFailure, LeaseError
from ...transport.parts import Arrived, PartError, RequestReads
from ..connecting.peers import Peer
from ..stats import ReadFailure, ReshardStats
from ..traces import Trace, what_was_read
from .prefetch import Prefetched

logger = init_logger(__name__)

SPANS = {
    ReadState.PREFETCHING: "prefetch",
    ReadState.WAITING: "wait",
    ReadState.READING: "read",
    ReadState.CHECKING: "check",
    ReadState.FAILED: "drain",
}
"""Name of the trace span for each state of a request."""

_OF_LEASES = {
    LeaseCheckFailure.PEER: ReadFailure.TRANSFER,
    LeaseCheckFailure.LEASE: ReadFailure.LEASE,
    LeaseCheckFailure.FINGERPRINT: ReadFailure.FINGERPRINT,
}


class ReadError(ReshardError):
    """A request cannot be read; the message says why.

    Args:
        reason: Why.
        failure: The kind of failure; None where it is reported elsewhere.
    """

    def __init__(self, reason: str, failure: ReadFailure | None) -> None:
        super().__init__(reason)
        self.failure = failure


def as_read_error(error: Exception) -> ReadError:
    """Return an exception that has ended a request as the failure that it is counted as."""
    if isinstance(error, ReadError):
        return error
    if isinstance(error, PartError):
        return ReadError(str(error), ReadFailure.COPY if error.is_local else ReadFailure.TRANSFER)
    if isinstance(error, LeaseError):
        return ReadError(str(error), _OF_LEASES[error.failure])
    if isinstance(error, ReshardError):
        return ReadError(str(error), ReadFailure.PARAMETERS)
    return ReadError(repr(error), ReadFailure.UNFORESEEN)


@dataclass(slots=True, kw_only=True, eq=False)
class IncomingRequest:
    """A request that is being read, or waits for that. See `ConsumerSide` for its life.

    Attributes:
        request_id: Its id.
        receive: What to read.
        offered_at_s: Since when it could be read, as far as this worker knows.
        state: Its state.
        since_s: Since when it is in that state.
        reads: Its parts.
        task: What happens to it.
        due_at_s: When it fails unless it is received; infinite without a deadline.
        peer: The engine to read from; None before it is connected for this request.
        connection: The connection that it is read with; None before that.
        computed: A part of it that can be read before it is offered, and was not looked at yet.
        prefetched: What was read before it was offered; None for nothing.
        arrived: Its parts that have arrived, and were counted.
        fault: Why its blocks are invalid; None unless it has failed.
        failure: Kind of its failure here; None without one, or if it failed elsewhere.
        failed_in: The state in which it failed, and for how many seconds it had been in it.
        num_in_doubt: Number of its blocks that may still be written although it has failed.
        trace: Its trace; None where its client traces nothing.
        num_bytes: Bytes read, as far as NIXL reports them.
        strategies: How they were read.
    """

    request_id: RequestId
    receive: Receive
    offered_at_s: float
    state: ReadState
    since_s: float
    reads: RequestReads
    task: Task = field(init=False)
    due_at_s: float = math.inf
    peer: Peer | None = None
    connection: PeerConnection | None = None
    computed: Receive | None = None
    prefetched: Prefetched | None = None
    arrived: list[Arrived] = field(default_factory=list)
    fault: str | None = None
    failure: ReadFailure | None = None
    failed_in: tuple[ReadState, float] = (ReadState.WAITING, 0.0)
    num_in_doubt: int = 0
    trace: Trace | None = None
    num_bytes: int = 0
    strategies: set[str] = field(default_factory=set)

    @property
    def blocks(self) -> frozenset[int]:
        """The local blocks to fill, of all KV-cache groups."""
        return frozenset(chain(*self.receive.local_block_ids))

    @property
    def is_early(self) -> bool:
        """Whether it is not offered yet."""
        return self.state is ReadState.PREFETCHING

    def count(self, stats: ReshardStats) -> None:
        """Count the bytes of the parts that have arrived since the last call."""
        arrived, self.reads.arrived = self.reads.arrived, []
        self.arrived += arrived
        for _, strategy, telemetry in arrived:
            if telemetry is not None:
                stats.record_transfer(telemetry, strategy)
                self.num_bytes += telemetry.totalBytes
                self.strategies.add(strategy.value)
                if self.state in (ReadState.PREFETCHING, ReadState.WAITING):
                    stats.record_prefetched(telemetry.totalBytes)

    def enter(self, state: ReadState, now_s: float) -> None:
        """Enter a state, and log and trace that."""
        before, since_s = self.state, self.since_s
        expect_transition(before, state)
        self.state, self.since_s = state, now_s
        was_read = before in (ReadState.PREFETCHING, ReadState.READING)
        logger.debug(
            "Request %s: %s at engine %s, after %.1f ms of %s%s.",
            quote(self.request_id),
            one_line(state.value),
            quote(self.receive.source.engine_id),
            1e3 * (now_s - since_s),
            one_line(before.value),
            f", {self.num_bytes} bytes so far" if was_read else "",
        )
        if self.trace is not None:
            is_read = before is ReadState.READING
            read = what_was_read(self.num_bytes, self.strategies) if is_read else {}
            failed = {} if self.failure is None else {"error.type": self.failure.value}
            self.trace.span(SPANS[before], since_s, now_s, {**read, **failed})


def named(request_ids: Iterable[RequestId], most: int = 8) -> str:
    """Return the requests that a task was for, as the end of one log line."""
    ids = list(request_ids)
    if not ids:
        return ""
    more = f" and {len(ids) - most} more" if len(ids) > most else ""
    return f", and with it request{'s' * (len(ids) > 1)} {', '.join(map(quote, ids[:most]))}{more}"

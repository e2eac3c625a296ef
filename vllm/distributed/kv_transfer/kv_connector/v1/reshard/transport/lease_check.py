# SPDX-License-Identifier: Apache-2.0
"""Checks after a read that the lease still held and covered the expected tokens and blocks.

Each request is one check; one small read of a worker's lease table, a look, serves many of them. A
producer's worker enters an offer a step after its engine has answered; a reader that is faster
looks again. Everything here belongs to the connector's thread of the reading worker.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from ..errors import TransferError
from ..memory.leg import side_by_side
from ..protocol.fingerprint import OfferFingerprint
from ..protocol.ids import RequestId
from ..protocol.leases import (
    BUCKET_BYTES,
    WORDS_PER_BUCKET,
    Held,
    LeaseTableAddress,
    entry_of,
    look_up,
)
from ..protocol.lifetimes import PEER_GRACE_S
from ..protocol.quoting import one_line, quote
from .agent import NixlAgent, Prepared, TransferState
from .row_buffer import RowBuffer, RowRead

if TYPE_CHECKING:
    from .connection import PeerConnection

_NUM_CHECKS = 1 << 10
"""Requests that are looked up at the same time; further ones wait."""

_LOOK_AGAIN_S = 0.002
"""Wait before the second look."""

#: limit lease check: the request fails, as the lease table still has another fingerprint. That is
#: after half a second in all.
_MOST_LOOKS = 9
"""Looks at an entry with another fingerprint before it counts as a mismatch. Each wait is twice the
last. A producer may answer before its worker's thread has entered the request, which it does when
its step begins."""

CheckKey: TypeAlias = tuple[RequestId, int]
"""A request's id, and a number that tells requests with the same id apart."""


class LeaseCheckFailure(Enum):
    """Why blocks that were read cannot be used."""

    PEER = "peer"
    """The look itself failed."""

    LEASE = "lease"
    """The producer no longer holds the request, or never offered it."""

    FINGERPRINT = "fingerprint"
    """The producer holds other tokens or blocks under the request's id."""


@dataclass(frozen=True, slots=True)
class PreparedTable:
    """A peer's lease table, prepared to be read.

    Attributes:
        buckets: Descriptor list of its buckets.
        num_buckets: Number of buckets.
    """

    buckets: Prepared
    num_buckets: int


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check.

    Attributes:
        key: Key of the check.
        failure: Kind of fault; None if the lease held and its fingerprint matched.
        fault: Why the bytes read cannot be trusted, in words; empty if they can.
    """

    key: CheckKey
    failure: LeaseCheckFailure | None = None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One request to check.

    Attributes:
        key: Key of the check.
        remote_request_id: The producer's id of the request.
        fingerprint: Fingerprint that its entry should have.
        table: Table to look it up in.
        due_at_s: Deadline of the check.
        look_at_s: When to look again, if it was not offered yet or had another fingerprint.
        num_looks: Number of looks that found no entry, or another fingerprint.
    """

    key: CheckKey
    remote_request_id: RequestId
    fingerprint: OfferFingerprint
    table: PreparedTable
    due_at_s: float
    look_at_s: float = 0.0
    num_looks: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Look:
    """One read of buckets of a peer's table, one bucket for each request.

    Attributes:
        wanted: The requests.
        names: Their names in the table.
        read: The read.
        hangs_at_s: When it counts as hung: once the first request is due, but not before it has
            taken `PEER_GRACE_S`. One that was posted just before says nothing of its peer.
    """

    wanted: list[_Wanted]
    names: list[int]
    read: RowRead
    hangs_at_s: float


def prepare_table(agent: NixlAgent, table: LeaseTableAddress, peer: str) -> PreparedTable:
    """Prepare a peer's table to be read.

    Raises:
        TransferError: NIXL does not know the peer, or this memory of the peer.
    """
    rows = side_by_side(table.address, BUCKET_BYTES, 0, table.num_buckets)
    return PreparedTable(agent.prepare(rows, peer, "DRAM"), table.num_buckets)


def check_buffer(agent: NixlAgent) -> RowBuffer:
    """Return a buffer for the buckets that are read with an agent.

    Raises:
        TransferError: The memory cannot be registered.
    """
    return RowBuffer(agent, _NUM_CHECKS, WORDS_PER_BUCKET)


class LeaseChecker:
    """Looks up leases in the tables of one engine's workers.

    Args:
        buffer: Buffer that the buckets are read into.
        reads: Connection with that engine.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self, buffer: RowBuffer, reads: PeerConnection, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._buffer = buffer
        self._reads = reads
        self._clock = clock
        self._wanted: dict[PreparedTable, list[_Wanted]] = defaultdict(list)
        # Requests to look up again.
        self._again: deque[_Wanted] = deque()
        self._looks: list[_Look] = []
        self._results: list[CheckResult] = []

    def __len__(self) -> int:
        """Return the number of checks without a result."""
        waiting = sum(map(len, self._wanted.values())) + len(self._again)
        return waiting + sum(len(look.wanted) for look in self._looks)

    def check_later(
        self,
        key: CheckKey,
        remote_request_id: RequestId,
        fingerprint: OfferFingerprint,
        at: PreparedTable,
        due_at_s: float,
    ) -> None:
        """Queue a check, which will get one result.

        Args:
            key: Key of the check.
            remote_request_id: The producer's id of the request.
            fingerprint: Fingerprint that the producer should offer under that id.
            at: Table of a worker that the request's blocks were read from.
            due_at_s: Deadline of the check.
        """
        wanted = _Wanted(key, remote_request_id, fingerprint, at, due_at_s)
        self._wanted[at].append(wanted)

    def advance(self) -> list[CheckResult]:
        """Post queued checks, and return new results.

        An unexpected exception leaves its look unchanged for the next call.
        """
        now_s = self._clock()
        for wanted in list(self._again):
            if now_s >= wanted.due_at_s:
                self._results.append(_not_offered(wanted))
            elif now_s >= wanted.look_at_s:
                self._wanted[wanted.table].append(wanted)
            else:
                self._again.append(wanted)
            self._again.popleft()
        for table in list(self._wanted):
            self._post(table, now_s)
        for look in list(self._looks):
            state = self._reads.poll(look.read.transfer)
            if state is TransferState.IN_FLIGHT and now_s < look.hangs_at_s:
                continue
            done = state is TransferState.DONE
            results, again = self._judge(look, now_s, done=done)
            self._looks.remove(look)
            self._results += results
            self._again += again
            if done:
                self._buffer.free(self._reads, look.read)
        return self._take_results()

    def give_up(self) -> list[CheckResult]:
        """Fail all checks without a result: their connection is given up."""
        fault = "its connection was given up before its lease could be looked up"
        unanswered = [each for wanted in self._wanted.values() for each in wanted]
        unanswered += self._again
        unanswered += [wanted for look in self._looks for wanted in look.wanted]
        self._wanted.clear()
        self._again.clear()
        self._looks.clear()
        self._results += _unanswered(unanswered, fault)
        return self._take_results()

    def _take_results(self) -> list[CheckResult]:
        results, self._results = self._results, []
        return results

    def _post(self, table: PreparedTable, now_s: float) -> None:
        """Post one read for a table's queued checks, as many as the buffer has room for."""
        wanted = self._wanted[table][: self._buffer.num_free]
        if not wanted:
            return
        entries = [entry_of(each.remote_request_id, table.num_buckets) for each in wanted]
        buckets = [entry.bucket for entry in entries]
        try:
            read = self._buffer.post(self._reads, table.buckets, buckets)
        except TransferError as error:
            self._results += _unanswered(wanted, str(error))
        else:
            names = [entry.name for entry in entries]
            due_at_s = min(each.due_at_s for each in wanted)
            hangs_at_s = max(due_at_s, now_s + PEER_GRACE_S)
            self._looks.append(_Look(wanted, names, read, hangs_at_s))
        if rest := self._wanted[table][len(wanted) :]:
            self._wanted[table] = rest
        else:
            del self._wanted[table]

    def _judge(
        self, look: _Look, now_s: float, *, done: bool
    ) -> tuple[list[CheckResult], list[_Wanted]]:
        """Return the results of a look, and the requests to look up again."""
        peer = look.read.transfer.peer
        if not done:
            fault = f"the lease at {quote(peer)} could not be looked up"
            return _unanswered(look.wanted, fault), []
        results, later = [], []
        for wanted, name, row in zip(
            look.wanted, look.names, self._buffer.landed(look.read), strict=True
        ):
            held = look_up(row, name)
            num_looks, rest_s = wanted.num_looks, _LOOK_AGAIN_S
            if not held.entered or held.fingerprint is not None:
                # Not every transport reads a cache line atomically: part of the entry may be old.
                num_looks, rest_s = num_looks + 1, rest_s * 2**num_looks
                if held.fingerprint == wanted.fingerprint or num_looks >= _MOST_LOOKS:
                    results.append(_result(wanted, held, peer))
                    continue
            if now_s < wanted.due_at_s:
                later.append(replace(wanted, look_at_s=now_s + rest_s, num_looks=num_looks))
            else:
                results.append(_not_offered(wanted))
        return results, later


def _unanswered(wanted: Iterable[_Wanted], fault: str) -> list[CheckResult]:
    """Return the results on requests whose look failed."""
    return [CheckResult(each.key, LeaseCheckFailure.PEER, fault) for each in wanted]


def _not_offered(wanted: _Wanted) -> CheckResult:
    """Return the result on a request that was not offered by its deadline.

    Its failure is then the missing offer, and not the deadline: its table could be read.
    """
    fault = (
        f"{quote(wanted.table.buckets.peer)} did not say in time what it offers: check that "
        "the engine runs, and send the request through prefill again"
    )
    return CheckResult(wanted.key, LeaseCheckFailure.LEASE, fault)


def _result(wanted: _Wanted, held: Held, peer: str) -> CheckResult:
    """Return the result that follows from a producer's entry."""
    if not held.entered:
        return CheckResult(
            wanted.key,
            LeaseCheckFailure.LEASE,
            f"its lease at {quote(peer)} had run out when all was read: give readers longer there "
            "with kv_lease_duration",
        )
    assert held.fingerprint is not None
    if (difference := held.fingerprint.difference(wanted.fingerprint)) is not None:
        return CheckResult(
            wanted.key,
            LeaseCheckFailure.FINGERPRINT,
            f"what {quote(peer)} holds under its name {one_line(difference)}: send the decode "
            "engine the very prompt that was prefilled, and pass kv_transfer_params on unchanged",
        )
    return CheckResult(wanted.key)

# SPDX-License-Identifier: Apache-2.0
"""Checks after a read that the lease still held and covered the expected tokens and blocks.

Each request is one check in the table of each worker that it was read from; one small read of a
table, a look, serves many requests. A producer's worker enters an offer a step after its engine has
answered; a reader that is faster looks again. Everything here belongs to the connector's thread of
the reading worker.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..errors import InDoubtError, TransferError, one_line, quote
from ..memory.leg import Indices, side_by_side
from ..protocol.fingerprint import OfferFingerprint
from ..protocol.ids import RequestId
from ..protocol.leases import (
    BUCKET_BYTES,
    WORDS_PER_BUCKET,
    Entry,
    Held,
    LeaseTableAddress,
    entry_of,
    look_up,
)
from ..protocol.lifetimes import PEER_GRACE_S
from ..protocol.tasks import Task, Tasks, suspended
from .agent import NixlAgent, Prepared, Transfer, TransferState

_WORD_BYTES = 8


class Reads(Protocol):
    """What rows are read over: a connection, which counts its reads."""

    def read(
        self,
        local: Prepared,
        local_indices: Indices,
        remote: Prepared,
        remote_indices: Indices,
    ) -> Transfer:
        """Post a read; raises TransferError."""

    def poll(self, transfer: Transfer) -> TransferState:
        """Return a posted read's state."""

    def release(self, transfer: Transfer) -> None:
        """Release a completed read."""


@dataclass(frozen=True, slots=True, eq=False)
class RowRead:
    """Rows that are being read.

    Attributes:
        landed_in: Rows of the buffer that it reads into, in the order requested.
        transfer: The read.
    """

    landed_in: npt.NDArray[np.int32]
    transfer: Transfer


class RowBuffer:
    """A registered buffer for small reads: rows of tables of another engine's worker.

    A row is used by one read at a time. A read that failed, or was refused after it had begun, may
    still write, so its rows are not used again until the agent is closed.

    Args:
        agent: Agent to register the buffer with.
        num_rows: Number of rows that can be read at the same time.
        words_per_row: Size of a row, in words of 8 bytes.

    Attributes:
        rows: The buffer; shape (num_rows, words_per_row).

    Raises:
        TransferError: The memory cannot be registered.
    """

    def __init__(self, agent: NixlAgent, num_rows: int, words_per_row: int) -> None:
        self.rows = np.zeros((num_rows, words_per_row), dtype=np.uint64)
        address, row_bytes = self.rows.ctypes.data, words_per_row * _WORD_BYTES
        agent.register([(address, self.rows.nbytes, 0)], "DRAM")
        self._local = agent.prepare(side_by_side(address, row_bytes, 0, num_rows), memory="DRAM")
        self._free = deque(range(num_rows))

    @property
    def num_free(self) -> int:
        """Number of rows that can be read now."""
        return len(self._free)

    def post(self, reads: Reads, table: Prepared, rows: Sequence[int]) -> RowRead:
        """Post a read of some rows of a table, at most `num_free`.

        Raises:
            TransferError: NIXL refused the read.
        """
        # If the read may have begun, these rows are not freed.
        landed_in = np.array([self._free.popleft() for _ in rows], dtype=np.int32)
        wanted = np.array(rows, dtype=np.int32)
        try:
            transfer = reads.read(self._local, landed_in, table, wanted)
        except TransferError as error:
            if not isinstance(error, InDoubtError):
                self._free.extend(landed_in.tolist())
            raise
        return RowRead(landed_in, transfer)

    def landed(self, read: RowRead) -> npt.NDArray[np.uint64]:
        """Return a copy of the rows of a completed read; shape (rows, words_per_row)."""
        return self.rows[read.landed_in]

    def free(self, reads: Reads, read: RowRead) -> None:
        """Free the rows of a completed read, and release it."""
        self._free.extend(read.landed_in.tolist())
        reads.release(read.transfer)


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


class LeaseError(Exception):
    """Blocks that were read cannot be used; the message says why.

    Args:
        failure: The kind of fault.
        fault: The fault, in words.
    """

    def __init__(self, failure: LeaseCheckFailure, fault: str) -> None:
        super().__init__(fault)
        self.failure = failure


@dataclass(slots=True, eq=False)
class _Lookup:
    """One request to look up in one table.

    Attributes:
        entry: Its key in the table.
        due_at_s: Deadline of its check.
        task: Task to wake once it is answered.
        held: What the table has; None before the look, or if that has failed.
        fault: Why the look has failed; None before it, or if it has not.
    """

    entry: Entry
    due_at_s: float
    task: Task
    held: Held | None = None
    fault: str | None = None

    @property
    def is_answered(self) -> bool:
        return self.held is not None or self.fault is not None


@dataclass(frozen=True, slots=True, eq=False)
class _Look:
    """One read of buckets of a peer's table, one bucket for each request.

    Attributes:
        lookups: The requests; none once it counts as hung.
        read: The read.
        hangs_at_s: When it counts as hung: once the first request is due, but not before it has
            taken `PEER_GRACE_S`. One that was posted just before says nothing of its peer.
    """

    lookups: list[_Lookup]
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

    Attributes:
        is_broken: Whether a look has failed, or hangs; who takes the connection out resets it.
    """

    def __init__(
        self, buffer: RowBuffer, reads: Reads, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._buffer = buffer
        self._reads = reads
        self._clock = clock
        # Lookups that are not posted yet.
        self._asked: dict[PreparedTable, list[_Lookup]] = defaultdict(list)
        self._looks: list[_Look] = []
        self._num_checks = 0
        self._is_given_up = False
        self.is_broken = False

    def __len__(self) -> int:
        """Return the number of lookups without an answer."""
        return sum(map(len, self._asked.values())) + sum(len(each.lookups) for each in self._looks)

    @property
    def is_busy(self) -> bool:
        """True while a check is under way, or a look, hung ones included."""
        return bool(self._num_checks or self._asked or self._looks)

    async def confirm(
        self,
        tasks: Tasks,
        remote_request_id: RequestId,
        fingerprint: OfferFingerprint,
        tables: Iterable[PreparedTable],
        due_at_s: float,
    ) -> None:
        """Wait until all tables are seen to hold a request, under its fingerprint.

        `advance` posts the looks and wakes the calling task.

        Args:
            tasks: What runs the calling task.
            remote_request_id: The producer's id of the request.
            fingerprint: Fingerprint that the producer should offer under that id.
            tables: Tables of the workers that the request's blocks were read from.
            due_at_s: Deadline of the check.

        Raises:
            LeaseError: They do not hold it, or cannot be looked up.
        """
        num_looks = dict.fromkeys(tables, 0)
        self._num_checks += 1
        try:
            while num_looks:
                lookups = await self._look_up(tasks, num_looks, remote_request_id, due_at_s)
                rests_s = [
                    _judge(table, lookup, fingerprint, num_looks)
                    for table, lookup in lookups.items()
                ]
                look_at_s = min(self._clock() + min(rests_s), due_at_s)
                while num_looks and self._clock() < look_at_s:
                    await suspended(look_at_s)
                if num_looks and self._clock() >= due_at_s:
                    raise _not_offered(next(iter(num_looks)))
        finally:
            self._num_checks -= 1

    async def reach(self, tasks: Tasks, tables: Iterable[PreparedTable]) -> None:
        """Wait until a read of each table has completed, whatever the table holds.

        Raises:
            LeaseError: One cannot be read.
        """
        lookups = await self._look_up(tasks, tables, "", self._clock())
        for each in lookups.values():
            if each.fault is not None:
                raise LeaseError(LeaseCheckFailure.PEER, each.fault)

    async def _look_up(
        self,
        tasks: Tasks,
        tables: Iterable[PreparedTable],
        remote_request_id: RequestId,
        due_at_s: float,
    ) -> dict[PreparedTable, _Lookup]:
        """Look up a request in some tables; return the lookups once all are answered."""
        lookups = {each: self._ask(tasks, each, remote_request_id, due_at_s) for each in tables}
        while not all(each.is_answered for each in lookups.values()):
            await suspended()
        return lookups

    def advance(self) -> None:
        """Post lookups, and answer those that were looked up.

        An unexpected exception leaves its look unchanged for the next call.
        """
        now_s = self._clock()
        for table in list(self._asked):
            self._post(table, now_s)
        for look in list(self._looks):
            state = self._reads.poll(look.read.transfer)
            if state is TransferState.DONE:
                # Nobody waits any more for one that counted as hung.
                rows = self._buffer.landed(look.read)[: len(look.lookups)]
                for lookup, row in zip(look.lookups, rows, strict=True):
                    lookup.held = look_up(row, lookup.entry.name)
                    lookup.task.wake()
                self._looks.remove(look)
                self._buffer.free(self._reads, look.read)
            elif state is TransferState.FAILED or (look.lookups and now_s >= look.hangs_at_s):
                peer = look.read.transfer.peer
                _fail(look.lookups, f"the lease at {quote(peer)} could not be looked up")
                # One that hangs is polled on: its lane closes once it ends.
                look.lookups.clear()
                self.is_broken = True
                if state is TransferState.FAILED:
                    self._looks.remove(look)

    def give_up(self) -> None:
        """Fail all lookups, now and later: the connection is given up."""
        self._is_given_up = True
        for lookups in (*self._asked.values(), *(each.lookups for each in self._looks)):
            _fail(lookups, _GIVEN_UP)
        self._asked.clear()
        self._looks.clear()

    def _ask(
        self, tasks: Tasks, table: PreparedTable, remote_request_id: RequestId, due_at_s: float
    ) -> _Lookup:
        """Queue a lookup for `advance` to post."""
        assert tasks.current is not None
        lookup = _Lookup(entry_of(remote_request_id, table.num_buckets), due_at_s, tasks.current)
        if self._is_given_up:
            lookup.fault = _GIVEN_UP
        else:
            self._asked[table].append(lookup)
        return lookup

    def _post(self, table: PreparedTable, now_s: float) -> None:
        """Post one read for a table's lookups, as many as the buffer has room for."""
        lookups = self._asked[table][: self._buffer.num_free]
        if not lookups:
            return
        try:
            buckets = [each.entry.bucket for each in lookups]
            read = self._buffer.post(self._reads, table.buckets, buckets)
        except TransferError as error:
            self.is_broken = True
            _fail(lookups, str(error))
        else:
            due_at_s = min(each.due_at_s for each in lookups)
            self._looks.append(_Look(lookups, read, max(due_at_s, now_s + PEER_GRACE_S)))
        if rest := self._asked[table][len(lookups) :]:
            self._asked[table] = rest
        else:
            del self._asked[table]


_GIVEN_UP = "its connection was given up before its lease could be looked up"


def _judge(
    table: PreparedTable,
    lookup: _Lookup,
    fingerprint: OfferFingerprint,
    num_looks: dict[PreparedTable, int],
) -> float:
    """Judge what a look has found, and take a table that holds the request out of `num_looks`.

    Args:
        table: The table.
        lookup: The lookup, which is answered.
        fingerprint: Fingerprint that the request's entry should have.
        num_looks: Looks so far that found no entry, or another fingerprint, by table.

    Returns:
        Seconds until the next look; infinite without one.

    Raises:
        LeaseError: The table does not hold the request, or could not be looked up.
    """
    held = lookup.held
    if held is None:
        raise LeaseError(LeaseCheckFailure.PEER, lookup.fault or "")
    if held.entered and held.fingerprint is None:
        return _LOOK_AGAIN_S
    if held.fingerprint == fingerprint:
        del num_looks[table]
        return math.inf
    # Not every transport reads a cache line atomically: part of the entry may be old.
    num_looks[table] += 1
    if num_looks[table] >= _MOST_LOOKS:
        raise _refused(held, fingerprint, table)
    return _LOOK_AGAIN_S * 2.0 ** (num_looks[table] - 1)


def _fail(lookups: Iterable[_Lookup], fault: str) -> None:
    """Answer lookups whose look has failed."""
    for lookup in lookups:
        lookup.fault = fault
        lookup.task.wake()


def _not_offered(table: PreparedTable) -> LeaseError:
    """Return the error of a request that was not offered by its deadline.

    Its failure is then the missing offer, and not the deadline: its table could be read.
    """
    return LeaseError(
        LeaseCheckFailure.LEASE,
        f"{quote(table.buckets.peer)} did not say in time what it offers: check that the engine "
        "runs, and send the request through prefill again",
    )


def _refused(held: Held, fingerprint: OfferFingerprint, table: PreparedTable) -> LeaseError:
    """Return the error that follows from a producer's entry."""
    peer = quote(table.buckets.peer)
    if held.fingerprint is None:
        return LeaseError(
            LeaseCheckFailure.LEASE,
            f"its lease at {peer} had run out when all was read: give readers longer there with "
            "kv_lease_duration",
        )
    return LeaseError(
        LeaseCheckFailure.FINGERPRINT,
        f"what {peer} holds under its name {one_line(held.fingerprint.difference(fingerprint))}: "
        "send the decode engine the very prompt that was prefilled, and pass kv_transfer_params "
        "on unchanged",
    )

# SPDX-License-Identifier: Apache-2.0
"""Whether leases still held, and bound what was wanted, once the blocks under them had been read.

All requests that have just been read from one worker are looked up in its table at once, with one
small read. A producer's worker learns what it offers a step after it has answered: a reader that is
faster looks again. Everything here belongs to the connector's thread of the worker that reads.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
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
from ..protocol.quoting import one_line, quote
from .agent import NixlAgent, Prepared, TransferState
from .row_buffer import RowBuffer, RowRead

if TYPE_CHECKING:
    from .connection import PeerConnection

_NUM_LOOKUPS = 1 << 10
"""Requests that are looked up at the same time; more wait for their turn."""

_LOOK_AGAIN_S = 0.002
"""How long to wait before looking again."""

_MOST_LOOKS = 9
"""So often a table is looked at that says something else, each time twice as long after the last:
half a second in all. A producer's answer may be faster than its worker's thread, which enters a
request when its step begins."""

LookupKey: TypeAlias = tuple[RequestId, int]
"""A request, and which of those that had this name."""


class LeaseCheckFailure(Enum):
    """Why what was read cannot be used."""

    PEER = "peer"
    """The lookup itself has failed."""

    LEASE = "lease"
    """Nothing is held under the request's name any more, or it was never offered."""

    FINGERPRINT = "fingerprint"
    """Something else is held under that name."""


@dataclass(frozen=True, slots=True)
class PreparedTable:
    """A peer's table.

    Attributes:
        buckets: The list of its buckets.
        num_buckets: How many there are.
    """

    buckets: Prepared
    num_buckets: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one lookup.

    Attributes:
        key: Names the lookup.
        failure: Of what kind the fault is; None where the lease held and bound what was wanted.
        fault: Why its bytes cannot be trusted, in words; empty where they can.
    """

    key: LookupKey
    failure: LeaseCheckFailure | None = None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One request to look up.

    Attributes:
        key: Names the lookup.
        remote_request_id: The request, as its producer calls it.
        fingerprint: What should stand under that name.
        due_at_s: Until then its request waits for it.
        num_looks: How often something else stood there when it was looked at.
    """

    key: LookupKey
    remote_request_id: RequestId
    fingerprint: OfferFingerprint
    due_at_s: float
    num_looks: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Lookup:
    """One read of some buckets of a peer's table, one bucket for each request."""

    table: PreparedTable
    wanted: list[_Wanted]
    names: list[int]
    read: RowRead


def prepare_table(agent: NixlAgent, table: LeaseTableAddress, peer: str) -> PreparedTable:
    """Prepare a peer's table to be read.

    Raises:
        TransferError: NIXL does not know the peer, or not this memory of its.
    """
    rows = side_by_side(table.address, BUCKET_BYTES, 0, table.num_buckets)
    return PreparedTable(agent.prepare(rows, peer, "DRAM"), table.num_buckets)


def lookup_buffer(agent: NixlAgent) -> RowBuffer:
    """Where the buckets land that are looked up with an agent.

    Raises:
        TransferError: The memory cannot be registered.
    """
    return RowBuffer(agent, _NUM_LOOKUPS, WORDS_PER_BUCKET)


class LeaseChecker:
    """Reads buckets of the tables of one engine's workers.

    Args:
        buffer: Where they land.
        reads: The connection with that engine.
        clock: Seconds that only grow.
    """

    def __init__(
        self, buffer: RowBuffer, reads: PeerConnection, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._buffer = buffer
        self._reads = reads
        self._clock = clock
        self._wanted: dict[PreparedTable, list[_Wanted]] = defaultdict(list)
        # Not offered yet, or not as wanted: when to look again, and where.
        self._again: list[tuple[float, PreparedTable, _Wanted]] = []
        self._lookups: list[_Lookup] = []
        self._verdicts: list[Verdict] = []

    def __len__(self) -> int:
        """Lookups without a verdict."""
        waiting = sum(map(len, self._wanted.values())) + len(self._again)
        return waiting + sum(len(lookup.wanted) for lookup in self._lookups)

    def check_later(
        self,
        key: LookupKey,
        remote_request_id: RequestId,
        fingerprint: OfferFingerprint,
        at: PreparedTable,
        due_at_s: float,
    ) -> None:
        """Look a request up; there will be one verdict.

        Args:
            key: Names the lookup.
            remote_request_id: The request, as its producer calls it.
            fingerprint: What its producer should offer under that name.
            at: The table of a worker that its blocks were read from.
            due_at_s: Until then its request waits for it.
        """
        wanted = _Wanted(key, remote_request_id, fingerprint, due_at_s)
        self._wanted[at].append(wanted)

    def advance(self) -> list[Verdict]:
        """Post what is wanted, and see what was found.

        What an unexpected exception comes up with is as it was, for the next call.
        """
        now_s = self._clock()
        again, self._again = self._again, []
        for look_at_s, table, wanted in again:
            if look_at_s <= now_s < wanted.due_at_s:
                self._wanted[table].append(wanted)
            else:
                self._again.append((look_at_s, table, wanted))
        for table in list(self._wanted):
            self._post(table)
        for lookup in list(self._lookups):
            state = self._reads.poll(lookup.read.transfer)
            hangs = now_s >= max(wanted.due_at_s for wanted in lookup.wanted)
            if state is TransferState.IN_FLIGHT and not hangs:
                continue
            done = state is TransferState.DONE
            verdicts, again = self._judge(lookup, now_s, done=done)
            self._lookups.remove(lookup)
            self._verdicts += verdicts
            self._again += again
            if done:
                self._buffer.free(self._reads, lookup.read)
        self._fail_overdue(now_s)
        return self._take_verdicts()

    def give_up(self) -> list[Verdict]:
        """Judge everything that has no verdict yet: no peer is to be heard any more."""
        fault = "its connection was given up before its lease could be looked up"
        unanswered = [each for wanted in self._wanted.values() for each in wanted]
        unanswered += [wanted for _, _, wanted in self._again]
        unanswered += [wanted for lookup in self._lookups for wanted in lookup.wanted]
        self._wanted.clear()
        self._again.clear()
        self._lookups.clear()
        self._verdicts += [Verdict(each.key, LeaseCheckFailure.PEER, fault) for each in unanswered]
        return self._take_verdicts()

    def _fail_overdue(self, now_s: float) -> None:
        """Fail what was not offered by the time that it is due.

        The producer answers, so that its connection is sound. A request without a verdict would
        run out of time, and have the connection broken off.
        """
        overdue = [each for each in self._again if each[2].due_at_s <= now_s]
        self._again = [each for each in self._again if each[2].due_at_s > now_s]
        for _, table, wanted in overdue:
            self._verdicts.append(
                Verdict(
                    wanted.key,
                    LeaseCheckFailure.LEASE,
                    f"{quote(table.buckets.peer)} did not say in time what it offers: check that "
                    "the engine runs, and send the request through prefill again",
                )
            )

    def _take_verdicts(self) -> list[Verdict]:
        verdicts, self._verdicts = self._verdicts, []
        return verdicts

    def _post(self, table: PreparedTable) -> None:
        """Look up what is wanted at a table, as far as there is room."""
        wanted = self._wanted[table][: self._buffer.num_free]
        if not wanted:
            return
        entries = [entry_of(each.remote_request_id, table.num_buckets) for each in wanted]
        buckets = [entry.bucket for entry in entries]
        try:
            read = self._buffer.post(self._reads, table.buckets, buckets)
        except TransferError as error:
            fault = str(error)
            self._verdicts += [Verdict(each.key, LeaseCheckFailure.PEER, fault) for each in wanted]
        else:
            names = [entry.name for entry in entries]
            self._lookups.append(_Lookup(table, wanted, names, read))
        if rest := self._wanted[table][len(wanted) :]:
            self._wanted[table] = rest
        else:
            del self._wanted[table]

    def _judge(
        self, lookup: _Lookup, now_s: float, *, done: bool
    ) -> tuple[list[Verdict], list[tuple[float, PreparedTable, _Wanted]]]:
        """What was found, and when to look again for what."""
        peer = lookup.read.transfer.peer
        if not done:
            fault = f"the lease at {quote(peer)} could not be looked up"
            failed = [Verdict(each.key, LeaseCheckFailure.PEER, fault) for each in lookup.wanted]
            return failed, []
        verdicts, later = [], []
        for wanted, name, row in zip(
            lookup.wanted, lookup.names, self._buffer.landed(lookup.read), strict=True
        ):
            held = look_up(row, name)
            if held.entered and held.fingerprint is None:
                later.append((now_s + _LOOK_AGAIN_S, lookup.table, wanted))
                continue
            # Not every transport reads a line in one piece: part of it may be from before.
            num_looks = wanted.num_looks + 1
            if held.fingerprint == wanted.fingerprint or num_looks >= _MOST_LOOKS:
                verdicts.append(_verdict(wanted, held, peer))
            else:
                look_at_s = now_s + _LOOK_AGAIN_S * 2**wanted.num_looks
                again = replace(wanted, num_looks=num_looks)
                later.append((look_at_s, lookup.table, again))
        return verdicts, later


def _verdict(wanted: _Wanted, held: Held, peer: str) -> Verdict:
    """What a producer's entry means for what was read from it."""
    if not held.entered:
        return Verdict(
            wanted.key,
            LeaseCheckFailure.LEASE,
            f"its lease at {quote(peer)} had run out when all was read: give readers longer there "
            "with kv_lease_duration",
        )
    assert held.fingerprint is not None
    if (difference := held.fingerprint.difference(wanted.fingerprint)) is not None:
        return Verdict(
            wanted.key,
            LeaseCheckFailure.FINGERPRINT,
            f"what {quote(peer)} holds under its name {one_line(difference)}: send the decode "
            "engine the very prompt that was prefilled, and pass kv_transfer_params on unchanged",
        )
    return Verdict(wanted.key)

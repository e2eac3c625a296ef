# SPDX-License-Identifier: Apache-2.0
"""What each side of a transfer knows of its requests, without sockets, threads or clocks.

`ProducerLedger` keeps a prefill worker's promise to hold blocks until they were read or their lease
ran out. `ConsumerLedger` keeps account of a decode worker's reads. Time is passed in, in seconds of
any monotonic clock; what is to be done comes back as values. Both belong to the thread that drives
them, the connector's.

A producer's request goes through these states:

                     admit                 offer                all notifiers heard
    (unknown)  --------------->  ADMITTED ------->  OFFERED  ------------------------>  released
                                    |                  |       lease ran out
                                    | withdraw         +----------------------------->  expired
                                    v
                                (unknown)

The decode side may be faster than the producer's own scheduler: notifications are kept from
admission on. But a request that is still being computed is not released, whatever says that it
was read: one that all readers were through with before is released when it is offered.

A notification counts only where it is bound to what is offered: the same tokens in the same
blocks, or the secret that went with them. A reader that knows a request's id alone has neither, and
releases nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, NamedTuple, TypeVar

from .fingerprint import OfferFingerprint, OfferSecret
from .ids import RequestId
from .quoting import one_line, quote
from .states import ReadState

AnyRead = TypeVar("AnyRead", bound="Read")

MAX_EARLY_NOTIFICATIONS = 1 << 10
"""As many are kept for a request that is not offered yet: more than any engine has workers."""


class Receipt(Enum):
    """What a producer makes of a notification."""

    EARLY = "early"
    """The request is not offered yet; the notification is kept until it is."""

    COUNTED = "counted"
    """One of several notifiers was heard for the first time."""

    RELEASED = "released"
    """The last notifier of an offered request was heard: its blocks may be freed."""

    REPEATED = "repeated"
    """The notifier had been heard before; nothing changed."""

    MISBOUND = "misbound"
    """It is bound to something else than what is offered; nothing changed."""

    UNKNOWN = "unknown"
    """No such request is held: it expired, was withdrawn, or never was. A reader that says so may
    have read blocks that were in use for something else."""


class Notice(NamedTuple):
    """What a reader says when it is through with a request's blocks.

    Attributes:
        notifier: Names the reader, the same in every notification of its.
        num_notifiers: How many readers there are in all, itself included; at least 1.
        proof: What it has read, or would have read; or the secret of what it gives up.
    """

    notifier: str
    num_notifiers: int
    proof: OfferFingerprint | OfferSecret


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A notification that is bound to something else than what is offered.

    Attributes:
        request_id: The request that it names.
        notifier: Its sender.
    """

    request_id: RequestId
    notifier: str


@dataclass(frozen=True, slots=True)
class Expiry:
    """A request whose lease ran out.

    Attributes:
        request_id: The request.
        heard: Notifiers that were heard.
        awaited: Notifiers that should have been heard; None when none was heard to say so.
    """

    request_id: RequestId
    heard: int
    awaited: int | None


@dataclass(slots=True)
class _Held:
    """A request that a producer holds blocks for.

    Attributes:
        early: What was heard before the request was offered.
        fingerprint: What is offered; None as long as nothing is.
        secret: What gives it up; None where nothing does.
        expires_at_s: When the lease runs out; infinite as long as there is none.
        heard: The notifiers that were counted.
        awaited: How many there should be.
        mismatch_reported: Whether a notification that does not fit was told of.
    """

    early: set[Notice] = field(default_factory=set)
    fingerprint: OfferFingerprint | None = None
    secret: OfferSecret | None = None
    expires_at_s: float = float("inf")
    heard: set[str] = field(default_factory=set)
    awaited: int | None = None
    mismatch_reported: bool = False

    @property
    def complete(self) -> bool:
        return self.awaited is not None and len(self.heard) >= self.awaited


class ProducerLedger:
    """The requests whose blocks a prefill worker holds for remote readers.

    Nothing that is done in every step grows with the number of requests that are held: leases are
    in a heap, which learns of a renewal or of a release when it comes to the lease.
    """

    def __init__(self) -> None:
        self._held: dict[RequestId, _Held] = {}
        self._released_by_offer: list[RequestId] = []
        self._mismatches: list[Mismatch] = []
        self._expired: list[tuple[float, RequestId, _Held]] = []
        # When a lease runs out at the earliest; the number tells two leases under one name apart.
        self._leases: list[tuple[float, int, RequestId, _Held]] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._held)

    def admit(self, request_ids: Iterable[RequestId]) -> None:
        """Begin to keep notifications for requests that are being computed."""
        for request_id in request_ids:
            if request_id not in self._held:
                self._held[request_id] = _Held()

    def withdraw(self, request_ids: Iterable[RequestId]) -> None:
        """Forget requests that will not be offered, such as aborted ones."""
        for request_id in request_ids:
            if request_id in self._held:
                self._forget(request_id)

    def offer(
        self,
        request_id: RequestId,
        expires_at_s: float,
        fingerprint: OfferFingerprint,
        secret: OfferSecret | None = None,
    ) -> bool:
        """Hold a request's blocks until its readers were heard, or until its lease runs out.

        Args:
            request_id: The request.
            expires_at_s: When the lease runs out.
            fingerprint: What is offered.
            secret: What gives it up without knowing that; None where nothing does.

        Returns:
            Whether the request is held. False means that its readers are through already, which
            `take_released` tells, or that it was withdrawn.
        """
        held = self._held.get(request_id)
        if held is None:
            return False
        held.fingerprint, held.secret = fingerprint, secret
        early, held.early = held.early, set()
        # In an order that does not depend on hashes of strings, for logs that can be compared.
        for notice in sorted(early, key=lambda notice: notice[:2]):
            self._count(request_id, held, notice)
        if held.complete:
            self._forget(request_id)
            self._released_by_offer.append(request_id)
            return False
        held.expires_at_s = expires_at_s
        heappush(self._leases, (expires_at_s, next(self._numbers), request_id, held))
        self._tidy()
        return True

    def take_released(self) -> list[RequestId]:
        """The requests offered since the last call that all readers were through with already."""
        released, self._released_by_offer = self._released_by_offer, []
        return released

    def take_mismatches(self) -> list[Mismatch]:
        """The first notification of each request that was misbound, since the last call."""
        mismatches, self._mismatches = self._mismatches, []
        return mismatches

    def renew(self, request_ids: Iterable[RequestId], expires_at_s: float) -> int:
        """Move the leases of offered requests to a later time; never to an earlier one.

        Returns:
            How many of the requests are held and were offered.
        """
        renewed = 0
        for request_id in request_ids:
            held = self._held.get(request_id)
            if held is not None and held.fingerprint is not None:
                held.expires_at_s = max(held.expires_at_s, expires_at_s)
                renewed += 1
        return renewed

    def extend(self, for_s: float) -> None:
        """Let all leases last so many seconds longer, in which no renewal could be heard."""
        for held in self._held.values():
            held.expires_at_s += for_s

    def hear(self, request_id: RequestId, notice: Notice) -> Receipt:
        """Take note that a reader is through with a request's blocks.

        Readers that disagree on how many they are, as they may after one of them restarted with
        another layout, are answered with the larger number: the lease bounds the wait.
        """
        held = self._held.get(request_id)
        if held is None:
            return Receipt.UNKNOWN
        if held.fingerprint is None:
            if len(held.early) < MAX_EARLY_NOTIFICATIONS:
                held.early.add(notice)
            return Receipt.EARLY
        receipt = self._count(request_id, held, notice)
        if receipt is Receipt.COUNTED and held.complete:
            self._forget(request_id)
            return Receipt.RELEASED
        return receipt

    def expire(self, now_s: float) -> list[Expiry]:
        """Let go of the requests whose leases ran out, the oldest first."""
        while self._leases and self._leases[0][0] <= now_s:
            _, number, request_id, held = heappop(self._leases)
            if self._held.get(request_id) is not held:
                continue
            if held.expires_at_s > now_s:
                heappush(self._leases, (held.expires_at_s, number, request_id, held))
                continue
            del self._held[request_id]
            self._expired.append((held.expires_at_s, request_id, held))
        self._tidy()
        expiries, self._expired = self._expired, []
        # A renewed lease comes up at the time that it was renewed from.
        expiries.sort(key=lambda expiry: expiry[:2])
        return [
            Expiry(request_id, len(held.heard), held.awaited) for _, request_id, held in expiries
        ]

    def _count(self, request_id: RequestId, held: _Held, notice: Notice) -> Receipt:
        """Count a reader of an offered request, if it knows what is offered, or its secret."""
        if notice.proof not in (held.fingerprint, held.secret):
            if not held.mismatch_reported:
                held.mismatch_reported = True
                self._mismatches.append(Mismatch(request_id, notice.notifier))
            return Receipt.MISBOUND
        if notice.notifier in held.heard:
            return Receipt.REPEATED
        held.heard.add(notice.notifier)
        held.awaited = max(notice.num_notifiers, held.awaited or 1)
        return Receipt.COUNTED

    def _forget(self, request_id: RequestId) -> None:
        """Let go of a request that is held; of nothing where this fails."""
        self._tidy(self._held[request_id])
        del self._held[request_id]

    def _tidy(self, gone: _Held | None = None) -> None:
        """Take leases out of the heap that nothing is held by, unless they are few.

        Args:
            gone: What is held no more after this.
        """
        if len(self._leases) > 2 * (len(self._held) - (gone is not None)):
            self._leases = [
                lease
                for lease in self._leases
                if self._held.get(lease[2]) is lease[3] and lease[3] is not gone
            ]
            heapify(self._leases)


@dataclass(slots=True)
class Read:
    """A request that a consumer reads. Its ledger changes all of it.

    Attributes:
        request_id: Its name.
        state: Where it is.
        parts: The keys of its parts that are not drained, each unique within the request.
        checks_left: How many checks are to follow the parts, or are under way.
        fault: Why its blocks must be taken as invalid; None as long as it has not failed.
        is_over: Nothing writes into its blocks any more, and nothing else is waited for.
    """

    request_id: RequestId
    state: ReadState = ReadState.WAITING
    parts: set[int] = field(default_factory=set)
    checks_left: int = 0
    fault: str | None = None
    is_over: bool = False

    @property
    def is_decided(self) -> bool:
        """Whether it was received, or has failed: neither turns into the other."""
        return self.is_over or self.state is ReadState.FAILED


class ConsumerLedger(Generic[AnyRead]):
    """The requests that a decode worker reads blocks for.

                  offer          post           last part drained        last check done
    PREFETCHING  ------> WAITING -----> READING -----------------> CHECKING ------> over, received
       | fail             | fail          | fail                     | fail
       v                  v               v     last part drained    v
     FAILED --------------------------------------------------------------> over

    Parts may be prefetched before a request is offered. They end nothing when they are drained,
    unless the request has failed.

    A request fails at once, and for good: one fault is enough, and nothing turns a failed request
    into a received one. It is *over* exactly once, and only after everything that could still write
    into its blocks is drained: all of its parts, also those of a failed request. The checks
    that follow the parts, such as looking its lease up, write nothing there, and are not waited for
    once it has failed.

    Attributes:
        by_id: The requests, until `take_ended` has told of them.
    """

    def __init__(self) -> None:
        self.by_id: dict[RequestId, AnyRead] = {}
        self._failed: list[AnyRead] = []
        self._ended: list[AnyRead] = []

    def __len__(self) -> int:
        return len(self.by_id)

    def begin(self, read: AnyRead) -> None:
        """Account for a request in whichever state it is before it is posted; for one of a name."""
        assert read.request_id not in self.by_id, f"{quote(read.request_id)} is being received"
        self.by_id[read.request_id] = read

    def prefetch(self, read: AnyRead, parts: Iterable[int]) -> None:
        """Account for parts of a request that is not offered yet."""
        _expect(read, ReadState.PREFETCHING)
        read.parts.update(parts)

    def offer(self, read: AnyRead) -> None:
        """A request is offered of which something was prefetched."""
        _expect(read, ReadState.PREFETCHING)
        read.state = ReadState.WAITING

    def post(self, read: AnyRead, parts: Iterable[int], *, pending_checks: int = 0) -> None:
        """Account for the parts of a request that waits, beside those that were prefetched.

        Args:
            read: The request.
            parts: The parts in flight. Where there are none, `advance` goes on.
            pending_checks: How often `check_done` is called once all parts are drained.
        """
        _expect(read, ReadState.WAITING)
        read.state = ReadState.READING
        read.parts.update(parts)
        read.checks_left = pending_checks

    def part_drained(self, read: AnyRead, part: int) -> bool:
        """Take note that nothing writes for a part any more; returns what `advance` does."""
        read.parts.discard(part)
        return self.advance(read)

    def advance(self, read: AnyRead) -> bool:
        """Go on with a request whose parts are drained.

        Returns:
            Whether it was posted and has not failed, so that the checks that follow may begin. The
            same again is answered alike.
        """
        if not read.parts and not read.is_over:
            if read.state is ReadState.READING:
                read.state = ReadState.CHECKING
            is_checked = read.state is ReadState.CHECKING and not read.checks_left
            if is_checked or read.state is ReadState.FAILED:
                read.is_over = True
                self._ended.append(read)
        return not read.parts and read.state is ReadState.CHECKING

    def fail(self, read: AnyRead, fault: str) -> bool:
        """Fail a request.

        Returns:
            Whether it was being received, and had not failed before.
        """
        if read.is_decided:
            return False
        read.state, read.fault = ReadState.FAILED, fault
        self._failed.append(read)
        # Not by a call, which may raise: what has failed is not failed again, and would never end.
        if not read.parts:
            read.is_over = True
            self._ended.append(read)
        return True

    def check_done(self, read: AnyRead) -> None:
        """Take note that one of the checks that follow the parts has ended."""
        if read.state is ReadState.CHECKING and not read.is_over:
            read.checks_left -= 1
            self.advance(read)

    def take_failed(self) -> list[AnyRead]:
        """The requests that have failed since the last call, in the order in which they did."""
        failed, self._failed = self._failed, []
        return failed

    def take_ended(self) -> list[AnyRead]:
        """Forget the requests that are over, and return them in the order in which they were."""
        ended, self._ended = self._ended, []
        for read in ended:
            read.state = ReadState.ENDED
            del self.by_id[read.request_id]
        return ended


def _expect(read: Read, state: ReadState) -> None:
    assert read.state is state, f"{quote(read.request_id)} is {one_line(read.state.value)}"

# SPDX-License-Identifier: Apache-2.0
"""The requests whose blocks a prefill worker holds, without sockets, threads or clocks.

They are held until all readers have notified the worker or the lease expires. Callers pass the
time, in seconds of any monotonic clock, and act on the returned values. A ledger belongs to the
thread that drives it, the connector's.

A producer's request goes through these states:

                     admit                 offer                all readers notified
    (unknown)  --------------->  ADMITTED ------->  OFFERED  ------------------------>  released
                                    |                  |       lease expired
                                    | withdraw         +----------------------------->  expired
                                    v
                                (unknown)

Readers may be faster than the producer's own scheduler, so notifications are kept from admission
on. But they never release a request that is still being computed: if all readers notified early, it
is released when it is offered.

A notification counts only if it proves knowledge of the offer: by the fingerprint of the same
tokens in the same blocks, or by the offer's secret. A reader that knows only a request's id
releases nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from heapq import heapify, heappop, heappush
from itertools import count
from typing import NamedTuple

from .fingerprint import OfferFingerprint, OfferSecret
from .ids import RequestId

MAX_EARLY_NOTIFICATIONS = 1 << 10
"""Notifications kept for a request before its offer: more than any engine has workers."""


class Receipt(Enum):
    """How a producer took a notification."""

    EARLY = "early"
    """The request is not offered yet; the notification is kept until it is."""

    COUNTED = "counted"
    """It is the first of its reader, and other readers are still awaited."""

    RELEASED = "released"
    """It is the last reader's, and the request is offered: its blocks may be freed."""

    REPEATED = "repeated"
    """Its reader had notified before; nothing changed."""

    MISBOUND = "misbound"
    """Its proof does not match the offer; nothing changed."""

    UNKNOWN = "unknown"
    """No such request is held: it was released or withdrawn, expired, or never existed. The reader
    may have read blocks that were already reused."""


class Notice(NamedTuple):
    """A reader's notification that it no longer needs a request's blocks.

    Attributes:
        notifier: Name of the reader, the same in all its notifications.
        num_notifiers: Number of readers in all, this one included; at least 1.
        proof: Fingerprint of what it read or would have read, or secret of the offer it gives up.
    """

    notifier: str
    num_notifiers: int
    proof: OfferFingerprint | OfferSecret


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A notification whose proof does not match the offer.

    Attributes:
        request_id: The request that it names.
        notifier: Its sender.
    """

    request_id: RequestId
    notifier: str


@dataclass(frozen=True, slots=True)
class Expiry:
    """A request whose lease expired.

    Attributes:
        request_id: The request.
        heard: Number of readers that notified.
        awaited: Number of readers in all; None if none notified, so that it is not known.
    """

    request_id: RequestId
    heard: int
    awaited: int | None


@dataclass(slots=True)
class _Held:
    """A request that a producer holds blocks for.

    Attributes:
        early: Notifications received before the offer.
        fingerprint: Fingerprint of the offer; None before the offer.
        secret: Secret that also releases the offer; None if it has none.
        expires_at_s: When the lease expires; infinite before the offer.
        heard: Readers whose notification was counted.
        awaited: Number of readers in all; None before the first counted notification.
        mismatch_reported: Whether a mismatch was reported.
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

    Work done in every step does not grow with the number of requests held: leases are in a heap,
    and a renewal or a release takes effect there only when the lease comes up.
    """

    def __init__(self) -> None:
        self._held: dict[RequestId, _Held] = {}
        self._released_by_offer: list[RequestId] = []
        self._mismatches: list[Mismatch] = []
        self._expired: list[tuple[float, RequestId, _Held]] = []
        # By earliest expiry; the number tells two leases of the same request id apart.
        self._leases: list[tuple[float, int, RequestId, _Held]] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._held)

    def admit(self, request_ids: Iterable[RequestId]) -> None:
        """Start to keep notifications for requests that are being computed."""
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
        """Hold a request's blocks until all readers have notified, or until its lease expires.

        Args:
            request_id: The request.
            expires_at_s: When the lease expires.
            fingerprint: Fingerprint of the offer.
            secret: Secret that releases the offer without the fingerprint; None if it has none.

        Returns:
            True if the request is held; False if all readers have already notified, so that
            `take_released` returns it, or if it was withdrawn.
        """
        held = self._held.get(request_id)
        if held is None:
            return False
        held.fingerprint, held.secret = fingerprint, secret
        early, held.early = held.early, set()
        # Sorted, so that logs can be compared: string hashes differ between runs.
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
        """Return requests offered since the last call whose readers had all notified before."""
        released, self._released_by_offer = self._released_by_offer, []
        return released

    def take_mismatches(self) -> list[Mismatch]:
        """Return mismatches since the last call, only the first one of each request."""
        mismatches, self._mismatches = self._mismatches, []
        return mismatches

    def renew(self, request_ids: Iterable[RequestId], expires_at_s: float) -> int:
        """Extend the leases of offered requests to a time; never shorten one.

        Returns:
            The number of these requests that are held and offered.
        """
        renewed = 0
        for request_id in request_ids:
            held = self._held.get(request_id)
            if held is not None and held.fingerprint is not None:
                held.expires_at_s = max(held.expires_at_s, expires_at_s)
                renewed += 1
        return renewed

    def extend(self, for_s: float) -> None:
        """Extend all leases by a time in which no renewal could be received."""
        for held in self._held.values():
            held.expires_at_s += for_s

    def hear(self, request_id: RequestId, notice: Notice) -> Receipt:
        """Record a reader's notification.

        If readers disagree on their number, for example after one restarted with another layout,
        the larger number counts; the lease bounds the wait.
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
        """Forget requests whose leases expired, and return them, earliest expiry first."""
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
        # A renewed lease comes up at its old time, so the heap's order is not that of expiry.
        expiries.sort(key=lambda expiry: expiry[:2])
        return [
            Expiry(request_id, len(held.heard), held.awaited) for _, request_id, held in expiries
        ]

    def _count(self, request_id: RequestId, held: _Held, notice: Notice) -> Receipt:
        """Count a reader of an offered request if its proof matches the fingerprint or secret."""
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
        """Forget a held request; changes nothing if it raises."""
        self._tidy(self._held[request_id])
        del self._held[request_id]

    def _tidy(self, gone: _Held | None = None) -> None:
        """Remove stale leases from the heap once they outnumber the held requests.

        Args:
            gone: A request that the caller is about to forget; None without one.
        """
        if len(self._leases) > 2 * (len(self._held) - (gone is not None)):
            self._leases = [
                lease
                for lease in self._leases
                if self._held.get(lease[2]) is lease[3] and lease[3] is not gone
            ]
            heapify(self._leases)

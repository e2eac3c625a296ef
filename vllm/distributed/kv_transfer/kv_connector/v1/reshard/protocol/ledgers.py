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

The decode side may be faster than the producer's own scheduler: notifications are counted from
admission on. But a request that is still being computed is nobody's to release, whoever says that
he has read it: one that everybody was through with before is released when it is offered.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

RequestId = str

LegKey = TypeVar("LegKey", bound=Hashable)


class Receipt(Enum):
    """What a producer makes of a notification."""

    COUNTED = "counted"
    """One of several notifiers was heard for the first time."""

    RELEASED = "released"
    """The last notifier of an offered request was heard: its blocks may be freed."""

    REPEATED = "repeated"
    """The notifier had been heard before; nothing changed."""

    UNKNOWN = "unknown"
    """No such request is held: it expired, was withdrawn, or never was. A reader that says so may
    have read blocks that were in use for something else."""


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
    """A request that a producer holds blocks for."""

    heard: set[str] = field(default_factory=set)
    awaited: int | None = None
    expires_at_s: float | None = None

    @property
    def complete(self) -> bool:
        return self.awaited is not None and len(self.heard) >= self.awaited


class ProducerLedger:
    """The requests whose blocks a prefill worker holds for remote readers."""

    def __init__(self) -> None:
        self._held: dict[RequestId, _Held] = {}
        self._released_by_offer: list[RequestId] = []

    def __len__(self) -> int:
        return len(self._held)

    def admit(self, request_ids: Iterable[RequestId]) -> None:
        """Begin to count notifications for requests that are being computed."""
        for request_id in request_ids:
            self._held.setdefault(request_id, _Held())

    def withdraw(self, request_ids: Iterable[RequestId]) -> None:
        """Forget requests that will not be offered, such as aborted ones."""
        for request_id in request_ids:
            self._held.pop(request_id, None)

    def offer(self, request_id: RequestId, expires_at_s: float) -> bool:
        """Hold a request's blocks until its readers were heard, or until its lease runs out.

        Args:
            request_id: The request.
            expires_at_s: When the lease runs out.

        Returns:
            Whether the request is held. False means that its readers are through already, which
            `take_released` tells, or that it was withdrawn.
        """
        held = self._held.get(request_id)
        if held is None:
            return False
        if held.complete:
            del self._held[request_id]
            self._released_by_offer.append(request_id)
            return False
        held.expires_at_s = expires_at_s
        return True

    def take_released(self) -> list[RequestId]:
        """The requests offered since the last call that all readers were through with already."""
        released, self._released_by_offer = self._released_by_offer, []
        return released

    def renew(self, request_ids: Iterable[RequestId], expires_at_s: float) -> int:
        """Move the leases of offered requests to a later time; never to an earlier one.

        Returns:
            How many of the requests are held and were offered.
        """
        renewed = 0
        for request_id in request_ids:
            held = self._held.get(request_id)
            if held is not None and held.expires_at_s is not None:
                held.expires_at_s = max(held.expires_at_s, expires_at_s)
                renewed += 1
        return renewed

    def hear(self, request_id: RequestId, notifier: str, num_notifiers: int) -> Receipt:
        """Take note that a reader is through with a request's blocks.

        Readers that disagree on how many they are, as they may after one of them restarted with
        another layout, are answered with the larger number: the lease bounds the wait.

        Args:
            request_id: The request.
            notifier: Names the reader, the same in every notification of its.
            num_notifiers: How many readers there are in all, itself included; at least 1.
        """
        held = self._held.get(request_id)
        if held is None:
            return Receipt.UNKNOWN
        if notifier in held.heard:
            return Receipt.REPEATED
        held.heard.add(notifier)
        held.awaited = max(num_notifiers, held.awaited or 1)
        if held.expires_at_s is None or not held.complete:
            return Receipt.COUNTED
        del self._held[request_id]
        return Receipt.RELEASED

    def expire(self, now_s: float) -> list[Expiry]:
        """Let go of the requests whose leases ran out, the oldest first."""
        expired = sorted(
            (held.expires_at_s, request_id)
            for request_id, held in self._held.items()
            if held.expires_at_s is not None and held.expires_at_s <= now_s
        )
        expiries = []
        for _, request_id in expired:
            held = self._held.pop(request_id)
            expiries.append(Expiry(request_id, len(held.heard), held.awaited))
        return expiries


@dataclass(frozen=True, slots=True)
class Outcome:
    """A request that a consumer is through with.

    Attributes:
        request_id: The request.
        failure: Why its blocks must be taken as invalid; None where all of them arrived.
    """

    request_id: RequestId
    failure: str | None


@dataclass(slots=True)
class _Receiving(Generic[LegKey]):
    """A request that a consumer reads blocks for."""

    legs: set[LegKey] = field(default_factory=set)
    steps_left: int = 0
    posted: bool = False
    failure: str | None = None

    @property
    def ended(self) -> bool:
        if self.legs:
            return False
        return self.failure is not None or (self.posted and not self.steps_left)


class ConsumerLedger(Generic[LegKey]):
    """The requests that a decode worker reads blocks for.

              post            last leg quiet           last step done
    WAITING  ------>  READING  ------------>  FOLLOWED  ------------>  ended, received
       | fail            | fail                  | fail
       v                 v     last leg quiet    v
     ended            FAILED  ------------>    ended

    A request fails at once, and for good: one fault is enough, and nothing turns a failed request
    into a received one. It *ends* exactly once, and only after everything that could still write
    into its blocks is quiet: all of its legs, also those that nobody wants any more. The steps that
    follow the legs, such as looking its lease up, write nothing there, and are not waited for once
    it has failed.

    Legs are named by the caller with any hashable key, unique within a request.
    """

    def __init__(self) -> None:
        self._receiving: dict[RequestId, _Receiving[LegKey]] = {}
        self._failed: list[Outcome] = []
        self._ended: list[Outcome] = []

    def __len__(self) -> int:
        return len(self._receiving)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._receiving

    def num_legs_of(self, request_id: RequestId) -> int:
        """Legs of a request that are not quiet; 0 for one that has ended."""
        receiving = self._receiving.get(request_id)
        return 0 if receiving is None else len(receiving.legs)

    def begin(self, request_id: RequestId) -> None:
        """Account for a request, not one that is being received; it waits for its peer."""
        assert request_id not in self._receiving, f"{request_id} is being received"
        self._receiving[request_id] = _Receiving()

    def post(
        self, request_id: RequestId, legs: Iterable[LegKey], *, following_steps: int = 0
    ) -> None:
        """Account for the legs of a request that waits.

        Args:
            request_id: The request.
            legs: The legs in flight. Without any, and without steps, the request ends at once.
            following_steps: How often `step_done` is called once all legs are quiet.
        """
        receiving = self._receiving[request_id]
        assert not receiving.posted, f"{request_id} is being read"
        receiving.posted = True
        receiving.legs = set(legs)
        receiving.steps_left = following_steps
        self._end_if_over(request_id, receiving)

    def leg_quiet(self, request_id: RequestId, leg: LegKey) -> bool:
        """Take note that nothing writes for a leg any more.

        Returns:
            Whether this was the last leg of a request without failure, so that the steps that
            follow may begin.
        """
        receiving = self._receiving[request_id]
        receiving.legs.remove(leg)
        self._end_if_over(request_id, receiving)
        return not receiving.legs and receiving.failure is None

    def fail(self, request_id: RequestId, reason: str) -> bool:
        """Fail a request.

        Returns:
            Whether it was being received, and had not failed before.
        """
        receiving = self._receiving.get(request_id)
        if receiving is None or receiving.failure is not None:
            return False
        receiving.failure = reason
        self._failed.append(Outcome(request_id, reason))
        self._end_if_over(request_id, receiving)
        return True

    def step_done(self, request_id: RequestId) -> None:
        """Take note that one of the steps that follow the legs has ended, if anybody cares."""
        receiving = self._receiving.get(request_id)
        if receiving is None or receiving.failure is not None:
            return
        assert not receiving.legs, f"{request_id} has legs in flight"
        receiving.steps_left -= 1
        self._end_if_over(request_id, receiving)

    def take_failed(self) -> list[Outcome]:
        """The requests that have failed since the last call, in the order in which they did."""
        failed, self._failed = self._failed, []
        return failed

    def take_ended(self) -> list[Outcome]:
        """The requests that have ended since the last call, in the order in which they did."""
        ended, self._ended = self._ended, []
        return ended

    def _end_if_over(self, request_id: RequestId, receiving: _Receiving[LegKey]) -> None:
        if receiving.ended:
            del self._receiving[request_id]
            self._ended.append(Outcome(request_id, receiving.failure))

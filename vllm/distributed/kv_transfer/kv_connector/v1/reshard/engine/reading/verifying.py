# SPDX-License-Identifier: Apache-2.0
"""Verified requests: what has arrived is read once more, another way, and compared.

    compared, equal     it goes on
    compared, differs   it is read anew and compared again, and fails if that differs, too
    not compared        it goes on, and a later request is verified instead

A wrong stride differs each time. A step that was in flight at the holder when it made the offer may
write behind the offered tokens once, which is no mistake.

The parts that verify write into the arena only. The request does not wait for those that are left
when it goes on, nor do they fail it. All of this belongs to the connector's thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.logger import init_logger

from ...protocol.quoting import one_line, quote
from ...protocol.tasks import Tasks, suspended
from ...transport.connection import PeerConnection
from ...transport.packed_windows import Claim
from ...transport.parts import DiffersError, PartError, RequestReads, cut_again
from ...transport.transfers import Transfers
from ..stats import ReshardStats
from .incoming import IncomingRequest

logger = init_logger(__name__)

#: interval verify: a request goes on although not all of it was compared; at the latest halfway to
#: its deadline.
_WITHIN_S = 5.0
"""Longer than any holder takes that packs in time; what is compared is bounded."""

_MOST_ANEW = 2
"""How often a request is read anew: as many steps may be in flight with async scheduling."""

_MOST_IN_VAIN = 3
"""After so many requests of a connection that could not be compared, no other one is tried."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a comparison has found.

    Attributes:
        num_equal: Windows that are equal.
        num_wanted: Windows that were to be compared.
        error: Why it ended early; None if it did not, or ran out of time.
    """

    num_equal: int
    num_wanted: int
    error: PartError | None

    @property
    def differs(self) -> DiffersError | None:
        """What differs; None for nothing."""
        return self.error if isinstance(self.error, DiffersError) else None

    @property
    def is_equal(self) -> bool:
        """Whether everything was compared, and is equal."""
        return self.num_equal == self.num_wanted > 0


class Verifier:
    """Verifies the first requests of each connection.

    Args:
        transfers: The parts on their way.
        stats: The worker's metrics.
        tasks: The tasks of its thread.
        num_wanted: Requests of each connection to verify.
    """

    def __init__(
        self, transfers: Transfers, stats: ReshardStats, tasks: Tasks, num_wanted: int
    ) -> None:
        self._transfers = transfers
        self._stats = stats
        self._tasks = tasks
        self._num_wanted = num_wanted

    async def verify(
        self, request: IncomingRequest, connection: PeerConnection
    ) -> DiffersError | None:
        """Verify a request that has arrived, if it is one of the first.

        Returns:
            What differs; None for nothing.

        Raises:
            PartError: It differs, and could not be read anew.
        """
        is_wanted = connection.num_verified < self._num_wanted
        claim = Claim.of(request.receive)
        if claim is None or not is_wanted or connection.num_in_vain >= _MOST_IN_VAIN:
            return None
        until_s = self._tasks.now_s + _WITHIN_S
        until_s = min(until_s, (self._tasks.now_s + request.due_at_s) / 2)
        differs, found = None, _Outcome(0, 0, None)
        # Now: those that arrive meanwhile go on.
        connection.num_verified += 1
        try:
            for num_anew in range(1 + _MOST_ANEW):
                if num_anew:
                    await self._read_anew(request, connection)
                found = await self._compare(request, connection, claim, until_s)
                differs = found.differs or differs
                if found.differs is None:
                    break
        finally:
            if not found.is_equal:
                connection.num_verified -= 1
        if found.is_equal:
            _say_equal(request, found, differs)
            return None
        if differs is None:
            connection.num_in_vain += 1 if found.num_wanted else _MOST_IN_VAIN
            _say_unverified(request, found)
        return differs

    async def _compare(
        self,
        request: IncomingRequest,
        connection: PeerConnection,
        claim: Claim,
        until_s: float,
    ) -> _Outcome:
        """Compare what has arrived with what is held, until a time."""
        area = self._transfers.area
        parts = [part for each in request.arrived for part in cut_again(each, area, claim)]
        checks = RequestReads(request.request_id, request.task)
        try:
            self._transfers.start(checks, parts, connection)
            while checks.parts and checks.error is None and self._tasks.now_s < until_s:
                await suspended(until_s)
        finally:
            self._transfers.give_up(checks)
        return _Outcome(len(checks.arrived), len(parts), checks.error)

    async def _read_anew(self, request: IncomingRequest, connection: PeerConnection) -> None:
        """Read all that has arrived of a request once more, as before.

        Raises:
            PartError: A part has failed.
        """
        parts = [each.part for each in request.arrived]
        request.arrived.clear()
        self._transfers.start(request.reads, parts, connection)
        await request.reads.landed()
        request.count(self._stats)


def _say_equal(request: IncomingRequest, found: _Outcome, differed: DiffersError | None) -> None:
    source, name = quote(request.receive.source.engine_id), quote(request.request_id)
    if differed is not None:
        logger.warning(
            "From engine %s, request %s was read anew: at first, %s. That is no mistake if its "
            "prefill generates more than one token.",
            source,
            name,
            one_line(differed),
        )
    logger.info(
        "From engine %s, %d of %d windows of request %s were read again and compared, and are "
        "equal.",
        source,
        found.num_equal,
        found.num_wanted,
        name,
    )


def _say_unverified(request: IncomingRequest, found: _Outcome) -> None:
    source, name = quote(request.receive.source.engine_id), quote(request.request_id)
    if not found.num_wanted:
        logger.info(
            "From engine %s, nothing is verified: an end has no arena for that.",
            source,
        )
        return
    why = "not all were packed in time" if found.error is None else one_line(found.error)
    logger.info(
        "From engine %s, %d of %d windows of request %s were compared: %s.",
        source,
        found.num_equal,
        found.num_wanted,
        name,
        why,
    )

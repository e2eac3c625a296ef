# SPDX-License-Identifier: Apache-2.0
"""Verified requests: what has arrived is read once more, another way, and compared.

    compared, equal     it goes on, and so do all after it
    compared, differs   it is read anew and compared again, and fails unless that is equal
    not compared        it goes on, and the next one is verified instead, for a few times

A wrong stride differs each time. A step that was in flight at the holder when it made the offer may
write behind the offered tokens, which is no mistake and is over when the step is.

Requests of one connection are verified one after the other, and others that arrive wait meanwhile:
none is believed before one was equal. The parts that verify write into the arena only: the request
does not wait for those that are left when it goes on, nor do they fail it. All of this belongs to
the connector's thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from vllm.logger import init_logger

from ...errors import one_line, quote
from ...protocol.tasks import Task, Tasks, suspended
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
"""Longer than holders take that pack in time."""

_PAUSES_S = (0.2, 2.0)
"""Pauses before a request that differs is read anew: steps in flight may last as long."""

_MOST_IN_VAIN = 3
"""After so many requests of a connection that could not be compared, no other one is tried."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a comparison has found.

    Attributes:
        num_equal: Windows that are equal.
        num_wanted: Windows that were to be compared; 0 if none can be.
        error: Why it ended early; None if it did not, or ran out of time.
    """

    num_equal: int
    num_wanted: int
    error: PartError | None

    @property
    def differs(self) -> str | None:
        """What differs; None for nothing."""
        return str(self.error) if isinstance(self.error, DiffersError) else None

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
        # Connections of which a request is being verified, each with the tasks that wait for that.
        self._waiting: dict[PeerConnection, dict[Task, None]] = {}

    async def verify(self, request: IncomingRequest, connection: PeerConnection) -> str | None:
        """Verify a request that has arrived, if it is one of the first.

        Returns:
            What differs; None for nothing.

        Raises:
            PartError: It differs, and could not be read anew.
        """
        claim, until_s = Claim.of(request.receive), self._until_s(request)
        while claim is not None and self._is_wanted(connection):
            if connection not in self._waiting:
                return await self._verify(request, connection, claim)
            if self._tasks.now_s >= until_s:
                return None
            self._waiting[connection][request.task] = None
            await suspended(until_s)
        return connection.mistake

    def _is_wanted(self, connection: PeerConnection) -> bool:
        """Return whether a request of a connection is still to be verified."""
        return (
            connection.num_verified < self._num_wanted
            and connection.num_in_vain < _MOST_IN_VAIN
            and connection.mistake is None
        )

    def _until_s(self, request: IncomingRequest) -> float:
        """Return until when a request may be compared from now on."""
        now_s = self._tasks.now_s
        return min(now_s + _WITHIN_S, (now_s + request.due_at_s) / 2)

    async def _verify(
        self, request: IncomingRequest, connection: PeerConnection, claim: Claim
    ) -> str | None:
        """Verify a request while others wait; as `verify`."""
        differs: str | None = None
        self._waiting[connection] = {}
        try:
            found = await self._compare(request, connection, claim)
            for pause_s in _PAUSES_S:
                if found.differs is None:
                    break
                differs, anew_at_s = found.differs, self._tasks.now_s + pause_s
                while self._tasks.now_s < anew_at_s:
                    await suspended(anew_at_s)
                await self._read_anew(request, connection)
                found = await self._compare(request, connection, claim)
            if found.is_equal:
                connection.num_verified += 1
                _say_equal(request, found, differs)
                return None
            # What has differed is not believed because it could not be compared again.
            connection.mistake = found.differs or differs
            if connection.mistake is None:
                connection.num_in_vain += 1 if found.num_wanted else _MOST_IN_VAIN
                _say_unverified(request, found)
            return connection.mistake
        finally:
            for each in self._waiting.pop(connection):
                each.wake()

    async def _compare(
        self, request: IncomingRequest, connection: PeerConnection, claim: Claim
    ) -> _Outcome:
        """Compare what has arrived with what is held."""
        area, until_s = self._transfers.area, self._until_s(request)
        cut = [list(cut_again(each, area, claim)) for each in request.arrived]
        if not any(cut):
            return _Outcome(0, 0, None)
        checks = RequestReads(request.request_id, request.task)
        try:
            self._transfers.start(checks, chain(*cut), connection)
            while checks.parts and checks.error is None and self._tasks.now_s < until_s:
                await suspended(until_s)
        finally:
            self._transfers.give_up(checks)
        # What cannot be compared counts as a window.
        return _Outcome(len(checks.arrived), sum(len(each) or 1 for each in cut), checks.error)

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


def _say_equal(request: IncomingRequest, found: _Outcome, differed: str | None) -> None:
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
            "From engine %s, nothing is verified: an end has no arena, or none that fits.",
            source,
        )
        return
    why = "not all were there in time" if found.error is None else one_line(found.error)
    logger.info(
        "From engine %s, %d of %d windows of request %s were compared: %s.",
        source,
        found.num_equal,
        found.num_wanted,
        name,
        why,
    )

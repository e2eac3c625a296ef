# SPDX-License-Identifier: Apache-2.0
"""Reads the computed parts of requests that are not offered yet.

A failure here fails no request: its prefetched blocks are *invalidated*, and the whole request is
read once it is offered and none of its prefetch reads is under way.

All of this belongs to the connector's thread.
"""

from __future__ import annotations

from collections.abc import Set

from vllm.logger import init_logger

from ...errors import ReshardError
from ...protocol.ids import RequestId
from ...protocol.messages import Receive
from ...protocol.quoting import one_line, quote
from ...protocol.request_blocks import RequestBlocks
from ...protocol.states import ReadState
from ...transport.connection import PeerConnection
from ...transport.transfers import Part, PartDrained, PartEvent, Transfers
from ..stats import ReshardStats
from .prefetch import FullGroups, Prefetched
from .readings import Reading, Readings

logger = init_logger(__name__)


class Prefetcher:
    """Reads prompts while they are computed.

    Args:
        readings: All requests that are read.
        transfers: The parts on their way.
        stats: Its metrics.

    Attributes:
        window_groups: The local KV-cache groups that keep the last tokens of a sequence only; None
            until the caches are registered.
    """

    def __init__(
        self,
        readings: Readings,
        transfers: Transfers,
        stats: ReshardStats,
    ) -> None:
        self._readings = readings
        self._transfers = transfers
        self._stats = stats
        self.window_groups: Set[int] | None = None

    def read(
        self,
        request_id: RequestId,
        receive: Receive,
        part: Receive,
        connection: PeerConnection,
        now_s: float,
    ) -> None:
        """Read the computed blocks of a request that can be prefetched and were not read before.

        Args:
            request_id: The request.
            receive: What to read once the request is offered.
            part: The part that is computed.
            connection: The connection to read with.
            now_s: The time.
        """
        reading = self._readings.by_id.get(request_id)
        if reading is not None and (
            reading.receive is not receive or reading.state is not ReadState.PREFETCHING
        ):
            return
        try:
            self._read(request_id, receive, part, connection, now_s)
        except Exception as error:
            if isinstance(error, ReshardError):
                # The source may name anything before its offer, which is checked on its own.
                logger.debug("Request %s is not prefetched: %s", quote(request_id), one_line(error))
            else:
                logger.exception(
                    "Request %s is not prefetched, over an unexpected exception",
                    quote(request_id),
                )
            if reading is not None:
                self._invalidate(reading)

    def apply(self, event: PartEvent, reading: Reading) -> bool:
        """Apply an event of a part that was prefetched.

        Returns:
            True if the whole request can be read now: it is offered, its prefetch is invalid, and
            no read writes into its blocks.
        """
        prefetched = reading.prefetched
        assert prefetched is not None
        if not isinstance(event, PartDrained):
            self._invalidate(reading)
            return False
        if event.telemetry is not None:
            self._stats.record_prefetched(event.telemetry.totalBytes)
        self._readings.ledger.part_drained(reading, event.key)
        has_had_its_turn = prefetched.is_invalid and reading.state is ReadState.WAITING
        return has_had_its_turn and not reading.parts

    def rest_of(self, reading: Reading, connection: PeerConnection) -> Receive | None:
        """Return the rest of an offered request, or all of it if its prefetch is of no use.

        Returns:
            The rest; None while prefetch reads of no use are under way. See `apply`.
        """
        prefetched, receive = reading.prefetched, reading.receive
        if prefetched is None:
            return receive
        if prefetched.is_of(receive, connection):
            return prefetched.rest_of(receive)
        if reading.parts:
            self._invalidate(reading)
            return None
        reading.prefetched = None
        return receive

    def _invalidate(self, reading: Reading) -> None:
        """Mark a request's prefetched blocks as of no use, and drop its unposted parts."""
        if reading.prefetched is not None and not reading.prefetched.is_invalid:
            reading.prefetched.is_invalid = True
            self._transfers.give_up(reading.request_id)

    def _read(
        self,
        request_id: RequestId,
        receive: Receive,
        part: Receive,
        connection: PeerConnection,
        now_s: float,
    ) -> None:
        reading = self._readings.by_id.get(request_id)
        if reading is None or reading.prefetched is None:
            assert self.window_groups is not None
            legs = (each.leg for each in connection.legs)
            groups = FullGroups.of(legs, part.remote_block_ids, self.window_groups)
            prefetched = Prefetched(groups, connection)
        else:
            prefetched = reading.prefetched
            if not prefetched.is_of(part, connection):
                self._invalidate(reading)
                return
        wanted = prefetched.next(part)
        if wanted is None:
            return
        parts = self._parts_of(wanted, connection)
        if reading is None:
            reading = self._readings.add(request_id, receive, None, now_s, ReadState.PREFETCHING)
        reading.prefetched = prefetched
        keys = reading.take_keys(len(parts))
        self._readings.ledger.prefetch(reading, keys)
        try:
            self._transfers.start(
                request_id, parts, connection, first_key=keys.start, is_prefetch=True
            )
        except Exception:
            self._invalidate(reading)
            # No part was started.
            for key in keys:
                self._readings.ledger.part_drained(reading, key)
            raise
        # Only now: what was not begun must not count as read.
        prefetched.take(part, wanted)

    def _parts_of(self, wanted: Receive, connection: PeerConnection) -> list[Part]:
        """Return the parts to read some blocks in; raises RemoteLayoutError if they don't exist."""
        blocks = RequestBlocks(wanted)
        return [
            part
            for leg in connection.legs
            if not leg.leg.per_sequence
            for part in self._transfers.cut(leg, blocks.select(leg.leg))
        ]

# SPDX-License-Identifier: Apache-2.0
"""Metrics, log lines and notifications once a request has failed or has been received.

All of this belongs to the connector's thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from vllm.logger import init_logger

from ...protocol.ids import RequestId
from ...protocol.quoting import one_line, quote
from ..stats import ReadFailure, ReshardStats
from .doubt import BlocksInDoubt
from .notifier import Notifier
from .readings import Reading, Readings

logger = init_logger(__name__)

_MAY_BE_ANOTHERS = frozenset({ReadFailure.FINGERPRINT, ReadFailure.PARAMETERS})
"""Failures after which the producer is not notified: the request held under this id may be another
one, whose blocks this worker must not release. The lease frees them."""

_REMEDIES = {
    ReadFailure.TRANSFER: ": check that the engine runs and can be reached, and send the request "
    "through prefill again",
    ReadFailure.DEADLINE: ": check that the engine runs and can be reached, or give it longer with "
    "kv_read_timeout_s",
    ReadFailure.DOUBT: ": restart the engines that do not answer, or this one",
    ReadFailure.UNFORESEEN: ": report this, with the traceback above",
}


@dataclass(frozen=True, slots=True)
class Completions:
    """What has become of requests.

    Attributes:
        failed: Requests that have failed, each with its blocks, which may still be written.
        received: Requests that are over: received, or failed and drained.
        offered_at_s: Since when each successfully received request could be read.
    """

    failed: dict[RequestId, frozenset[int]]
    received: set[RequestId]
    offered_at_s: dict[RequestId, float]


class CompletionHandler:
    """Counts requests that are over, logs failures, and notifies producers.

    Args:
        readings: All requests that are read.
        notifier: Notifies the producers of their blocks.
        stats: Its metrics.
        doubt: Counts blocks that may still be written.
    """

    def __init__(
        self,
        readings: Readings,
        notifier: Notifier,
        stats: ReshardStats,
        doubt: BlocksInDoubt,
    ) -> None:
        self._readings = readings
        self._notifier = notifier
        self._stats = stats
        self._doubt = doubt

    def take(self, now_s: float) -> Completions:
        """Return what has become of requests since the last call; count, log and notify it."""
        failed, ended = self._readings.ledger.take()
        completions = Completions(
            {each.request_id: frozenset(chain(*each.receive.local_block_ids)) for each in failed},
            {each.request_id for each in ended},
            {each.request_id: each.offered_at_s for each in ended if each.fault is None},
        )
        for reading in failed:
            num_blocks = len(completions.failed[reading.request_id])
            try:
                self._conclude_failed(reading, num_blocks if reading.parts else 0)
            except Exception:
                _tell_cut_short(reading)
        for reading in ended:
            try:
                self._conclude(reading, now_s)
                reading.tell(now_s)
            except Exception:
                _tell_cut_short(reading)
        return completions

    def _conclude_failed(self, reading: Reading, num_in_doubt: int) -> None:
        """Record, log and release a failed request.

        Args:
            reading: The request.
            num_in_doubt: Number of its blocks, if they may still be written; otherwise 0.
        """
        receive, failure = reading.receive, reading.failure
        if num_in_doubt:
            reading.num_in_doubt = num_in_doubt
            self._doubt.add(num_in_doubt)
        if failure is None:
            # The worker where the read failed has logged it.
            self._release(reading)
            return
        self._stats.record_failed_read(failure)
        if failure not in _MAY_BE_ANOTHERS:
            self._release(reading)
        # A failed handshake is logged once for all its requests.
        if failure is not ReadFailure.HANDSHAKE:
            state, for_s = reading.failed_in
            logger.error(
                "KV cache of request %s could not be read from engine %s (%s for %.1f s): %s%s",
                quote(reading.request_id),
                quote(receive.source.engine_id),
                state.value,
                for_s,
                one_line(reading.fault),
                one_line(_REMEDIES.get(failure, "")),
            )

    def _conclude(self, reading: Reading, now_s: float) -> None:
        """Conclude a request that is over: received, or failed and drained."""
        if reading.num_in_doubt:
            self._doubt.add(-reading.num_in_doubt)
        if reading.fault is None:
            assert reading.connection is not None
            reading.connection.lifetime.end_request()
            self._stats.record_exposed_transfer(now_s - reading.offered_at_s)
            # Without lease tables, no read or check has proven the peer.
            if reading.peer is not None and reading.lease_tables:
                reading.peer.is_proven = True
            self._release(reading)

    def _release(self, reading: Reading) -> None:
        """Notify a request's producers, if connected, that its blocks are released."""
        peer = reading.peer
        producers = (peer and peer.connection) or reading.connection
        if producers is None or (producers is reading.connection and not producers.is_connected):
            return
        self._notifier.release(reading.receive, producers)


def _tell_cut_short(reading: Reading) -> None:
    logger.exception(
        "What follows the end of request %s was cut short: its lease may have to run out",
        quote(reading.request_id),
    )

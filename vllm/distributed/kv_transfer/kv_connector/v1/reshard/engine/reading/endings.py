# SPDX-License-Identifier: Apache-2.0
"""How requests end: what is reported and released, and the blocks that may still be written."""

from __future__ import annotations

from vllm.logger import init_logger

from ...errors import one_line, quote
from ...protocol.lifetimes import PEER_GRACE_S
from ...protocol.states import ReadState
from ...transport.lane import Lane, Lanes
from ..compat import FAILED_READS_ARE_NAMED
from ..metadata import WorkerReport
from ..stats import ReadFailure, ReshardStats
from .incoming import IncomingRequest, ReadError
from .notifier import Notifier

logger = init_logger(__name__)

_MOST_IN_DOUBT = 4
"""One in this many blocks of the cache may be in doubt; beyond that, hung peers are cut."""

_MAY_BE_ANOTHERS = frozenset({ReadFailure.FINGERPRINT, ReadFailure.PARAMETERS})
"""Failures after which the producer is not notified: the request held under this id may be another
one, whose blocks this worker must not release. The lease frees them."""

_REMEDIES = {
    ReadFailure.CONTENT: ": no request is read from this engine until one arrives as it is held. "
    "Report this line; other backends, or another attention backend, may do",
    ReadFailure.TRANSFER: ": check that the engine runs and can be reached, and send the request "
    "through prefill again",
    ReadFailure.DEADLINE: ": check that the engine runs and can be reached, or give it longer with "
    "kv_read_timeout_s",
    ReadFailure.DOUBT: ": restart the engines that do not answer, or this one",
    ReadFailure.UNFORESEEN: ": report this, with the traceback above",
}


class BlocksInDoubt:
    """Counts the blocks in doubt. Belongs to the connector's thread.

    Args:
        lanes: The lanes whose reads may write into them.
        stats: The worker's metrics, which get the number on 0.22.1; elsewhere the scheduler's do.

    Attributes:
        num_block_ids: Number of blocks in the cache; 0 until the caches are registered.
        count: Number of blocks in doubt.
    """

    def __init__(self, lanes: Lanes, stats: ReshardStats) -> None:
        self._lanes = lanes
        self._stats = stats
        self.num_block_ids = 0
        self.count = 0

    def add(self, num_blocks: int) -> None:
        """Add to the number of blocks in doubt; a negative number subtracts."""
        self.count += num_blocks
        if not FAILED_READS_ARE_NAMED:
            # Otherwise the scheduler counts them, over all workers.
            self._stats.record_blocks_in_doubt(self.count)

    @property
    def are_too_many(self) -> bool:
        """True if more blocks are in doubt than allowed."""
        return self.count * _MOST_IN_DOUBT > self.num_block_ids

    @property
    def hung(self) -> Lane | None:
        """The first draining lane to cut if too many blocks are in doubt; None without one."""
        if not self.count or not self.are_too_many:
            return None
        return next((lane for lane in self._lanes.draining if not lane.is_drained), None)

    def contain(self, now_s: float) -> None:
        """If too many are in doubt, cut a hung lane `PEER_GRACE_S` after its retirement."""
        if (lane := self.hung) is None:
            return
        assert lane.retired_at_s is not None
        if now_s < lane.retired_at_s + PEER_GRACE_S:
            return
        logger.error(
            "Cutting a connection whose reads do not end: %d blocks of failed requests "
            "may be written by such reads. %s Its engine may have to be restarted.",
            self.count,
            one_line(lane.summary(now_s)),
        )
        lane.force()


class Endings:
    """Reports the requests that have ended. Belongs to the connector's thread.

    An exception on the way loses no report: what follows it is left out, and logged.

    Args:
        doubt: Counts the blocks of failed requests.
        notifier: Notifies the producers of their blocks.
        stats: The worker's metrics.
    """

    def __init__(self, doubt: BlocksInDoubt, notifier: Notifier, stats: ReshardStats) -> None:
        self._doubt = doubt
        self._notifier = notifier
        self._stats = stats
        # What was not reported yet.
        self._report = WorkerReport()

    def report_to(self, report: WorkerReport) -> None:
        """Add what has ended since the last call to a report."""
        # In this order, so that an exception loses nothing.
        report.add(self._report)
        self._report = WorkerReport()

    def fail(self, request: IncomingRequest, error: ReadError, now_s: float) -> None:
        """Fail a request that has not failed before; its unposted parts were dropped."""
        if request.state is not ReadState.FAILED:
            request.failed_in = request.state, now_s - request.since_s
            request.failure = error.failure
            request.enter(ReadState.FAILED, now_s)
        blocks = request.blocks
        request.fault = str(error)
        self._report.failed[request.request_id] = blocks
        try:
            self._conclude_failed(request)
        except Exception:
            _log_cut_short(request)

    def receive(self, request: IncomingRequest, now_s: float) -> None:
        """Report a request as received: it is complete, or has failed and is drained."""
        try:
            self._conclude(request, now_s)
        except Exception:
            _log_cut_short(request)
        self._report.received.add(request.request_id)

    def _conclude_failed(self, request: IncomingRequest) -> None:
        """Record, log and release a request that has just failed."""
        if request.connection is not None:
            request.connection.lifetime.end_request()
        if request.reads.parts:
            request.num_in_doubt = len(request.blocks)
            self._doubt.add(request.num_in_doubt)
        failure = request.failure
        if failure is None:
            # The worker where the read failed has logged it.
            self._release(request)
            return
        self._stats.record_failed_read(failure)
        if failure not in _MAY_BE_ANOTHERS:
            self._release(request)
        # A failed handshake is logged once for all its requests.
        if failure is not ReadFailure.HANDSHAKE:
            state, for_s = request.failed_in
            logger.error(
                "KV cache of request %s could not be read from engine %s (%s for %.1f s): %s%s",
                quote(request.request_id),
                quote(request.receive.source.engine_id),
                state.value,
                for_s,
                one_line(request.fault),
                one_line(_REMEDIES.get(failure, "")),
            )

    def _conclude(self, request: IncomingRequest, now_s: float) -> None:
        """Conclude a request that is over: received, or failed and drained."""
        if request.num_in_doubt:
            self._doubt.add(-request.num_in_doubt)
        if request.fault is None:
            assert request.connection is not None
            request.connection.lifetime.end_request()
            self._stats.record_exposed_transfer(now_s - request.offered_at_s)
            self._release(request)

    def _release(self, request: IncomingRequest) -> None:
        """Notify a request's producers, if connected, that its blocks are released."""
        peer = request.peer
        producers = (peer and peer.connection) or request.connection
        if producers is None or (producers is request.connection and not producers.is_connected):
            return
        self._notifier.release(request.receive, producers)


def _log_cut_short(request: IncomingRequest) -> None:
    logger.exception(
        "What follows the end of request %s was cut short: its lease may have to run out",
        quote(request.request_id),
    )

# SPDX-License-Identifier: Apache-2.0
"""Everything that a worker exchanges with other engines, poll by poll: its reads and its offers.

    the engine's steps  ->  poll  ->  report  ->  tell_producers

It has no thread and never blocks: `connector_thread` runs its polls. All of this belongs to that
thread.

If an unexpected exception ends a poll, nothing is lost: the next poll does the rest. If the
exception concerns a single request, that request fails.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from vllm.logger import init_logger

from ..errors import one_line, quote
from ..protocol.messages import Announcement
from ..protocol.tasks import taken_once_done
from ..transport.agent import NixlAgent
from ..transport.budget import Budget
from ..transport.lane import Lane
from ..transport.limits import FileWatch
from ..transport.transfers import Transfers
from .connecting.peers import Peer, PeerTable
from .metadata import ReshardConnectorMetadata, WorkerReport
from .producer import ProducerSide
from .reading.consumer import ConsumerSide
from .reading.incoming import named
from .reading.notifier import Notifier, Renewals
from .stats import ReshardStats

logger = init_logger(__name__)

BUDGET_S = 0.25e-3
"""Seconds that a poll may spend on polling transfers, and again on posting queued ones."""

_LINGER_S = 0.05
"""Interval between polls of reads that nobody waits for, which are polled until they end."""


class Event(Protocol):
    """A point in a device's stream."""

    def query(self) -> bool:
        """Return whether all work queued before it is complete."""


@dataclass(slots=True)
class SchedulerStep:
    """One step's handover from the engine's thread.

    Attributes:
        metadata: The scheduler's metadata; None if the step only requests a report.
        before: Earlier device work, which may write into the blocks to fill; None without any.
    """

    metadata: ReshardConnectorMetadata | None = None
    before: Event | None = None


Incoming = SchedulerStep | Announcement
"""Input of a poll. The last is ahead of the step that carries it, and comes from a thread other
than the engine's."""


def _budget() -> Budget:
    return Budget(BUDGET_S)


class TransferEngine:
    """One worker's part in moving KV caches.

    Args:
        agent: The worker's agent that others read from.
        producer: The requests that it holds for them.
        peers: The engines that it reads from.
        transfers: The parts on their way.
        consumer: The requests that it reads.
        notifier: Notifies the producers of the blocks that it reads.
        renewals: The leases that it renews.
        stats: Its metrics.
        budget: Makes a budget for posting or polling, which begins when it is called.

    Attributes:
        files: Watch on what this process has open.
    """

    def __init__(
        self,
        agent: NixlAgent,
        producer: ProducerSide,
        peers: PeerTable,
        transfers: Transfers,
        consumer: ConsumerSide,
        notifier: Notifier,
        renewals: Renewals,
        stats: ReshardStats,
        budget: Callable[[], Budget] = _budget,
    ) -> None:
        self.agent = agent
        self.producer = producer
        self.peers = peers
        self.transfers = transfers
        self.consumer = consumer
        self._notifier = notifier
        self._renewals = renewals
        self._stats = stats
        self._budget = budget
        self.files = FileWatch(stats.record_open_files)
        # Input that was not applied yet, in order.
        self._incoming: deque[Incoming] = deque()
        # Whether the engine has requested a report.
        self._is_asked = False
        # Peers newly connected, or with the error of their handshake.
        self._news: deque[tuple[Peer, Exception | None]] = deque()
        # Lanes to close.
        self._ending: deque[Lane] = deque()
        # Results of a poll that was cut short, for the next one to report.
        self._report = WorkerReport()
        # Lanes were closed: the next poll reports the requests that this has ended.
        self._has_ended = False
        # The last poll has packed a window for a reader.
        self._has_packed = False
        self._closed = False

    def poll(self, incoming: list[Incoming], now_s: float) -> WorkerReport:
        """Apply new input, advance all transfers, and return the requests that have ended.

        Work beyond the budget is left to the next poll: see `has_backlog`.

        Args:
            incoming: The new input; this call empties the list.
            now_s: The time.
        """
        self._is_asked = self._is_asked or bool(incoming)
        self._incoming += incoming
        incoming.clear()
        # Before new requests: a handshake that failed while the engine was idle must not fail them.
        self._advance_peers(now_s)
        for each in taken_once_done(self._incoming):
            if not _may_begin(each):
                break
            self._apply(each, now_s)
        self._advance_peers(now_s)
        for address, request_ids in self._renewals.take_due(now_s).items():
            self._notifier.renew(address, request_ids)
        self.consumer.begin(now_s, self._budget())
        self.consumer.advance(now_s, self._budget())
        for connection in taken_once_done(self.peers.broken):
            self.transfers.retire(connection)
        self._has_packed = self.producer.pack(now_s, self._budget())
        report = self._report
        self.consumer.report_to(report)
        self._renewals.stop((*report.failed, *report.received))
        if self._is_asked:
            report.sent |= self.producer.collect_released(now_s)
            if self.files.look(now_s):
                report.shortages[self.agent.name] = self.files.shortage
        # Metrics alone are no reason to have the engine's thread collect a report.
        if (report or not self.is_moving) and not self._stats.is_empty():
            report.stats = self._stats.take()
        self._is_asked, self._report = False, WorkerReport()
        return report

    def extend_deadlines(self, for_s: float) -> None:
        """Extend deadlines by seconds for which a poll was delayed."""
        self.producer.extend_deadlines(for_s)

    def tell_producers(self, now_s: float) -> None:
        """Send the queued notifications, and close drained connections and lanes.

        Call it after each poll's report, so that the engine need not wait for it.
        """
        # Before closing connections, over which the notifications are sent.
        self._notifier.flush()
        for connection in self.peers.take_drained():
            try:
                connection.close()
            except Exception:
                # NIXL may keep some of its resources until its lane is closed.
                logger.exception("A connection was not closed as it should be")
        self._ending += self.peers.lanes.take_due(now_s)
        self._has_ended = bool(self._ending)
        for lane in taken_once_done(self._ending):
            self.consumer.close_lane(lane)

    @property
    def has_backlog(self) -> bool:
        """True if the last poll left work to the next one."""
        return self.consumer.has_backlog or self.peers.is_connecting

    @property
    def has_moved(self) -> bool:
        """True if the last poll saw a read arrive, or packed for a reader: more will soon."""
        return self.transfers.has_moved or self._has_packed

    @property
    def is_packing(self) -> bool:
        """True while a reader waits for windows to be packed, or reads them."""
        return self.producer.is_packing

    @property
    def is_moving(self) -> bool:
        """True while a poll soon may have results of requests."""
        return bool(self._incoming or self._has_ended or self.consumer.is_moving)

    def next_due_s(self, now_s: float) -> float | None:
        """Return when the next poll is due if nothing happens before; None for never."""
        due_s = [
            self.peers.next_due_s,
            self._renewals.next_due_s,
            self.producer.hears_again_s(now_s),
        ]
        if (reads_due_s := self.consumer.next_due_s) is not None:
            due_s.append(reads_due_s)
        if self.transfers.is_lingering or self.peers.looking:
            due_s.append(now_s + _LINGER_S)
        return min(due_s) if min(due_s) < math.inf else None

    def drain(self, now_s: float) -> bool:
        """Advance the reads under way, and begin none; return whether there are any."""
        return not self._closed and self.consumer.drain(now_s)

    def close(self, now_s: float) -> None:
        """Close everything; no read can write into local memory after this."""
        if self._closed:
            return
        self._closed = True
        for lane in (*self.peers.close(now_s), *self._ending):
            lane.close()
        self.transfers.close()
        if self.producer.packs is not None:
            self.producer.packs.close()
        self.agent.close()

    def _apply(self, incoming: Incoming, now_s: float) -> None:
        if not isinstance(incoming, SchedulerStep):
            self.producer.apply_announcement(incoming)
            return
        metadata = incoming.metadata
        if metadata is None:
            return
        self.producer.apply_metadata(metadata, now_s)
        for request_id, part in metadata.prefetch.items():
            self.consumer.prefetch(request_id, part, now_s)
        for request_id, receive in metadata.receive.items():
            self.consumer.start_request(request_id, receive, now_s)
        for receive in metadata.given_up:
            self.consumer.start_request("given up", receive, now_s)
        self.consumer.abandon(metadata.failed)
        self._renewals.stop(metadata.ended)
        self._renewals.begin(metadata.awaited)
        self._renewals.stop(
            request_id
            for request_id, receive in metadata.receive.items()
            if not any(receive.local_block_ids)
        )

    def _advance_peers(self, now_s: float) -> None:
        """Advance handshakes; queue or fail the requests that waited for them."""
        self._news += self.peers.advance(now_s)
        for address, lowered, duration_s in self.peers.take_handshakes():
            self._stats.record_handshake(duration_s)
            self.consumer.note_handshake(address, duration_s, now_s)
            logger.info(
                "From engine %s of %d ranks, rank %s %s. The handshake took %.1f ms.",
                quote(address.engine_id),
                lowered.num_ranks,
                lowered.rank,
                one_line(lowered.summary),
                1e3 * duration_s,
            )
        for peer, error in taken_once_done(self._news):
            self._apply_news(peer, error)

    def _apply_news(self, peer: Peer, error: Exception | None) -> None:
        """Queue a connected peer's requests; fail them if its handshake failed."""
        if error is None:
            self.consumer.on_connected(peer)
            return
        address = peer.address
        self._stats.record_handshake_failure(error)
        failed = self.consumer.fail_waiting(peer, error)
        # One line for all of them, as the remedy is the same. If only renewals requested the
        # connection, often those of a request that had just failed, nothing is lost.
        log = logger.error if failed else logger.info
        log(
            "Handshake with engine %s at %s:%d failed%s: %s",
            quote(address.engine_id),
            quote(address.host),
            address.port,
            one_line(named(failed)),
            one_line(error),
        )


def _may_begin(incoming: Incoming) -> bool:
    """Return whether no earlier device work can write into the blocks that a step fills."""
    if not isinstance(incoming, SchedulerStep):
        return True
    return incoming.before is None or incoming.before.query()

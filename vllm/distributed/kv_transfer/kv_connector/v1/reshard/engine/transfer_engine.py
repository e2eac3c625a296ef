# SPDX-License-Identifier: Apache-2.0
"""All that a worker exchanges with other engines, poll by poll: what it reads, and what it holds.

    the engine's steps  ->  poll  ->  what has ended  ->  tell_producers

It has no thread and waits for nothing: `connector_thread` runs its polls. All of it belongs to the
thread that does.

A poll that an unexpected exception ends has lost nothing: what it has not done is done by the
next one. Where the exception is a request's own, that request fails.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from vllm.logger import init_logger

from ..protocol.board import BoardUpdate
from ..protocol.ids import RequestId
from ..protocol.messages import Announcement, RemoteEngineAddress
from ..protocol.quoting import one_line, quote
from ..transport.agent import NixlAgent
from ..transport.budget import Budget
from ..transport.lane import Lane
from ..transport.transfers import Transfers
from .connecting.peers import Peer, PeerTable
from .early.requests import EarlyRequests
from .metadata import ReshardConnectorMetadata, WorkerNews
from .producer import ProducerSide
from .queues import taken_once_done
from .reading.consumer import ConsumerSide
from .reading.notifier import Notifier
from .reading.readings import named
from .reading.renewals import Renewals
from .stats import ReshardStats

logger = init_logger(__name__)

BUDGET_S = 0.25e-3
"""For how long a poll looks at what is on its way, and for how long again it posts what waits."""

_LINGER_S = 0.05
"""Between two looks at reads whose requests have failed. They are polled until they end."""


class Event(Protocol):
    """A point in a device's stream."""

    def query(self) -> bool:
        """Whether everything before it is over."""


@dataclass(slots=True)
class SchedulerStep:
    """What the engine's thread hands over.

    Attributes:
        metadata: What the scheduler asks for; None where it only asks what has ended.
        before: What the device computes before: it may write into the blocks that are to be read
            into. None where nothing is under way.
    """

    metadata: ReshardConnectorMetadata | None = None
    before: Event | None = None


Incoming = SchedulerStep | Announcement | BoardUpdate
"""What a poll takes up. The last two are of what a later step has; another thread than the engine's
hears of them."""


@dataclass(slots=True)
class Report:
    """What has ended, as the engine's thread hears it.

    Attributes:
        sent: Requests that other engines are through with.
        received: Requests that were received, and those that failed and are drained.
        offered_at_s: Since when each of these that was received well could have been read.
        failed: Requests that could not be read, each with its blocks. They may still be written
            until the request is received.
        stats: What was measured; None for nothing.
        news: What was seen of requests that are not offered yet.
    """

    sent: set[RequestId] = field(default_factory=set)
    received: set[RequestId] = field(default_factory=set)
    offered_at_s: dict[RequestId, float] = field(default_factory=dict)
    failed: dict[RequestId, frozenset[int]] = field(default_factory=dict)
    stats: ReshardStats | None = None
    news: WorkerNews = field(default_factory=WorkerNews)

    def __bool__(self) -> bool:
        return self.is_awaited or self.stats is not None

    @property
    def is_awaited(self) -> bool:
        """True if it has request results, not only metrics."""
        return bool(self.sent or self.received or self.failed or self.news)

    def add(self, later: Report) -> None:
        """Take in what has ended since."""
        self.sent |= later.sent
        self.received |= later.received
        self.offered_at_s |= later.offered_at_s
        self.failed |= later.failed
        self.news.add(later.news)
        if self.stats is None:
            self.stats = later.stats
        elif later.stats is not None:
            self.stats.aggregate(later.stats)


def _budget() -> Budget:
    return Budget(BUDGET_S)


class TransferEngine:
    """One worker's part in moving KV caches.

    Args:
        agent: The worker's agent that others read from.
        producer: What it holds for them.
        peers: The engines that it reads from.
        transfers: What is on its way.
        consumer: The requests that it reads.
        notifier: What it tells others.
        renewals: The leases that it renews.
        stats: What is counted.
        budget: What a poll may take for each of looking and posting, beginning when it is called.
        early: The requests that are not offered yet; None where there are none.
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
        early: EarlyRequests | None = None,
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
        self._early = early
        # What was not taken up yet, in order.
        self._incoming: deque[Incoming] = deque()
        # The engine asks what has ended.
        self._is_asked = False
        # What is to be taken note of.
        self._news: deque[tuple[Peer, Exception | None]] = deque()
        # Lanes that are to be closed.
        self._ending: deque[Lane] = deque()
        # What has ended in a poll that has failed is told by the next one.
        self._report = Report()
        # Connections were closed: what that has ended is told by the next poll.
        self._has_ended = False
        self._closed = False

    def poll(self, incoming: list[Incoming], now_s: float) -> Report:
        """Take up what is asked for, look at what is on its way, and say what has ended.

        What goes beyond the budget is for the next poll: see `has_backlog`.

        Args:
            incoming: What is asked for, which is taken out.
            now_s: The time.
        """
        self._is_asked = self._is_asked or bool(incoming)
        self._incoming += incoming
        incoming.clear()
        # An idle engine takes no steps: a handshake that has failed since the last one, however
        # long ago, fails no request that comes now.
        self._advance_peers(now_s)
        for each in taken_once_done(self._incoming):
            if not _may_begin(each):
                break
            self._apply(each, now_s)
        self._advance_peers(now_s)
        if self._early is not None:
            self._advance_early(self._early, now_s)
        for address, request_ids in self._renewals.take_due(now_s).items():
            try:
                self._renew(address, request_ids, now_s)
            except Exception:
                # It is tried again before the lease runs out.
                logger.exception("Leases at %s are not renewed this time", quote(address.engine_id))
        self.consumer.begin(now_s, self._budget())
        self.consumer.advance(now_s, self._budget())
        for connection in taken_once_done(self.peers.broken):
            self.transfers.retire(connection)
        report = self._report
        report.failed |= self.consumer.take_failed()
        report.received |= self.consumer.take_received()
        report.offered_at_s |= self.consumer.take_offered()
        self._renewals.end((*report.failed, *report.received))
        if self._is_asked:
            report.sent |= self.producer.collect_released(now_s)
        # Figures alone are no reason to have the engine's thread collect them.
        if (report or not self.is_moving) and not self._stats.is_empty():
            report.stats = self._stats.take()
        self._is_asked, self._report = False, Report()
        return report

    def stood_still(self, for_s: float) -> None:
        """No poll was taken for so many seconds longer than was meant."""
        self.producer.stood_still(for_s)
        if self._early is not None:
            self._early.stood_still(for_s)

    def tell_producers(self, now_s: float) -> None:
        """Notify the producers of what was read, and close connections that nothing is read with.

        To be called after each poll: the engine need not wait for it.
        """
        # Before a connection is closed that the producers are told over.
        self._notifier.flush()
        self._notifier.advance(now_s)
        for connection in self.peers.take_drained():
            try:
                connection.close()
            except Exception:
                # NIXL may keep something of it until its lane is closed.
                logger.exception("A connection was not closed as it should be")
        self._ending += self.peers.lanes.take_due(now_s)
        self._has_ended = bool(self._ending)
        for lane in taken_once_done(self._ending):
            self.consumer.end(lane)

    @property
    def has_backlog(self) -> bool:
        """Whether there was more to do than fits a poll."""
        return self.consumer.has_backlog or self.peers.is_connecting

    @property
    def has_moved(self) -> bool:
        """Whether something has arrived after which more does soon: a lease, or a record."""
        return self.transfers.has_moved or (self._early is not None and self._early.has_moved)

    @property
    def is_moving(self) -> bool:
        """True while a poll soon may have results of requests."""
        is_looking = self._early is not None and self._early.is_looking
        return bool(self._incoming or self._has_ended or is_looking or self.consumer.is_moving)

    @property
    def is_talking(self) -> bool:
        """Whether something that was sent needs a look now and then to get on its way."""
        return self._notifier.is_talking

    def next_due_s(self, now_s: float) -> float | None:
        """When the next poll is due though nothing is handed over or moves; None for never."""
        due_s = [self.peers.next_due_s, self._renewals.next_due_s]
        if self._early is not None:
            due_s.append(self._early.next_due_s)
        if (reads_due_s := self.consumer.next_due_s) is not None:
            due_s.append(reads_due_s)
        if self.transfers.is_lingering:
            due_s.append(now_s + _LINGER_S)
        return min(due_s) if min(due_s) < math.inf else None

    def close(self, now_s: float) -> None:
        """End everything. Nothing that was read writes any more after this."""
        if self._closed:
            return
        self._closed = True
        for lane in (*self.peers.close(now_s), *self._ending):
            lane.close()
        self.transfers.close()
        self.agent.close()

    def _apply(self, incoming: Incoming, now_s: float) -> None:
        if not isinstance(incoming, SchedulerStep):
            self.producer.apply_announcement(incoming)
            return
        metadata = incoming.metadata
        if metadata is None:
            return
        self.producer.apply_metadata(metadata, now_s)
        early = self._early
        if early is not None:
            early.begin(metadata.early, now_s)
        for request_id, receive in metadata.receive.items():
            if early is not None and receive.is_early:
                early.take_over(request_id, receive)
            else:
                self.consumer.start_request(request_id, receive, now_s)
        for receive in metadata.given_up:
            self.consumer.start_request("given up", receive, now_s)
        self.consumer.abandon(metadata.failed)
        if early is not None:
            early.give_up(metadata.failed, "another worker could not read it")
            early.give_up(metadata.ended, "its client has left")
        self._renewals.end(metadata.ended)
        self._renewals.begin(metadata.awaited)
        self._renewals.end(
            request_id
            for request_id, receive in metadata.receive.items()
            if not any(receive.local_block_ids)
        )

    def _advance_peers(self, now_s: float) -> None:
        """Read what waited for an engine that is connected now; fail it where it cannot be."""
        self._news += self.peers.advance(now_s)
        for address, lowered, duration_s in self.peers.take_handshakes():
            self._stats.record_handshake(duration_s)
            self.consumer.trace_handshake(address, duration_s, now_s)
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
        """A peer is connected, or its handshake has failed."""
        if error is None:
            self.consumer.on_connected(peer)
            return
        address = peer.address
        if self._early is not None:
            self._early.on_handshake_failed(peer, error)
        self._stats.record_handshake_failure(error)
        failed = self.consumer.fail_waiting(peer, error)
        # One line for all of them, which have one remedy. Where heartbeats alone have asked, often
        # those of a request that had just failed, nothing is lost.
        log = logger.error if failed else logger.info
        log(
            "Handshake with engine %s at %s:%d failed%s: %s",
            quote(address.engine_id),
            quote(address.host),
            address.port,
            one_line(named(failed)),
            one_line(error),
        )

    def _advance_early(self, early: EarlyRequests, now_s: float) -> None:
        """See how far other engines are, and read what they offer."""
        early.advance(now_s)
        self._renewals.begin(early.take_renewed())
        for computed in taken_once_done(early.computed):
            self.consumer.prefetch(*computed, now_s)
        if early.ready:
            for request_id, receive, offered_at_s in taken_once_done(early.ready):
                self.consumer.start_request(request_id, receive, now_s, offered_at_s)
            # They begin in this poll: their engine is connected.
            self._advance_peers(now_s)
        for refusal in taken_once_done(early.refused):
            self.consumer.refuse(refusal, now_s)
        self._report.news.add(early.take_news())

    def _renew(
        self, address: RemoteEngineAddress, request_ids: set[RequestId], now_s: float
    ) -> None:
        """Renew leases; an engine that is not connected yet is by the next time."""
        peer = self.peers.get_or_connect(address, now_s)
        if peer.connection is None or self._notifier.renew(request_ids, peer.connection):
            return
        # As one that has died while it was idle. What waits is read with the next one.
        logger.info("The connection with engine %s is broken.", quote(address.engine_id))
        self.peers.break_off(peer.connection, now_s)


def _may_begin(incoming: Incoming) -> bool:
    """Whether nothing writes into the blocks that a step reads into."""
    if not isinstance(incoming, SchedulerStep):
        return True
    return incoming.before is None or incoming.before.query()

# SPDX-License-Identifier: Apache-2.0
"""All that a worker exchanges with other engines, turn by turn: what it reads, and what it holds.

    the engine's steps  ->  turn  ->  what has ended

It has no thread and waits for nothing: `loop` runs its turns. All of it belongs to the thread that
does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vllm.logger import init_logger

from ..protocol.ledgers import RequestId
from ..protocol.messages import Heartbeats
from ..transport.agent import NixlAgent
from ..transport.transfers import Transfers
from .envelopes import ReshardConnectorMetadata
from .holder import Holder
from .notifier import Notifier
from .peers import PeerTable
from .reads import RequestReads, named
from .stats import ReshardStats

logger = init_logger(__name__)


class Event(Protocol):
    """A point in a device's stream."""

    def query(self) -> bool:
        """Whether everything before it is over."""


@dataclass(slots=True)
class Step:
    """What the engine's thread hands over.

    Attributes:
        metadata: What the scheduler asks for; None where it only asks what has ended.
        before: What the device computes before: it may write into the blocks that are to be read
            into. None where nothing is under way.
    """

    metadata: ReshardConnectorMetadata | None = None
    before: Event | None = None


@dataclass(slots=True)
class Report:
    """What has ended, as the engine's thread hears it.

    Attributes:
        sent: Requests that other engines are through with.
        received: Requests that were received, and those that failed and are quiet.
        failed: Requests that could not be read, each with its blocks. They may still be written
            until the request is received.
        stats: What was measured; None for nothing.
    """

    sent: set[RequestId] = field(default_factory=set)
    received: set[RequestId] = field(default_factory=set)
    failed: dict[RequestId, frozenset[int]] = field(default_factory=dict)
    stats: ReshardStats | None = None

    def __bool__(self) -> bool:
        return bool(self.sent or self.received or self.failed or self.stats is not None)

    def add(self, later: Report) -> None:
        """Take in what has ended since."""
        self.sent |= later.sent
        self.received |= later.received
        self.failed |= later.failed
        if self.stats is None:
            self.stats = later.stats
        elif later.stats is not None:
            self.stats.aggregate(later.stats)


class Exchange:
    """One worker's part in moving KV caches.

    Args:
        agent: The worker's agent that others read from.
        holder: What it holds for them.
        peers: Whom it reads from.
        transfers: What is on its way.
        reads: The requests that it reads.
        notifier: What it tells others.
        stats: What is counted.
    """

    def __init__(
        self,
        agent: NixlAgent,
        holder: Holder,
        peers: PeerTable,
        transfers: Transfers,
        reads: RequestReads,
        notifier: Notifier,
        stats: ReshardStats,
    ) -> None:
        self.agent = agent
        self.holder = holder
        self.peers = peers
        self.transfers = transfers
        self.reads = reads
        self._notifier = notifier
        self._stats = stats
        self._steps: list[Step] = []
        self._closed = False

    def turn(self, steps: Sequence[Step], now_s: float) -> Report:
        """Take up what is asked for, look at everything on its way, and say what has ended."""
        self._steps += steps
        # An idle engine takes no steps: a handshake that has failed since the last one, however
        # long ago, fails nobody who asks now.
        self._advance_peers(now_s)
        while self._steps and _may_begin(self._steps[0]):
            self._take_up(self._steps.pop(0), now_s)
        self._advance_peers(now_s)
        self.reads.advance(now_s)
        for generation in self.peers.take_just_retired():
            self.transfers.retire(generation)
        report = Report(failed=self.reads.take_failed())
        report.received = self.reads.take_received()
        # Before a connection is closed that the holders are told over.
        self._notifier.flush()
        for generation in self.peers.generations():
            if now_s < generation.talks_until_s:
                generation.advance()
        for generation in self.peers.take_due(now_s):
            self.reads.end(generation)
        if steps:
            report.sent = self.holder.let_go(now_s)
        if not self._stats.is_empty():
            report.stats = self._stats.clone_and_reset()
        return report

    def is_moving(self, now_s: float) -> bool:
        """Whether another turn soon may tell something that somebody waits for."""
        if self._steps or self.transfers.is_moving:
            return True
        return any(
            generation.leases or now_s < generation.talks_until_s
            for generation in self.peers.generations()
        )

    @property
    def is_waiting(self) -> bool:
        """Whether another turn may have something to do, sooner or later."""
        return bool(self.reads or len(self.peers) or self.peers.retired)

    def close(self, now_s: float) -> None:
        """End everything. Nothing that was read writes any more after this."""
        if self._closed:
            return
        self._closed = True
        for generation in self.peers.close(now_s):
            generation.close()
        self.transfers.close()
        self.agent.close()

    def _take_up(self, step: Step, now_s: float) -> None:
        metadata = step.metadata
        if metadata is None:
            return
        self.holder.take_up(metadata, now_s)
        for request_id, receive in metadata.receive.items():
            self.reads.take_up(request_id, receive, now_s)
        self.reads.abandon(metadata.failed)
        for heartbeats in metadata.heartbeats:
            self._send_heartbeats(heartbeats, now_s)

    def _advance_peers(self, now_s: float) -> None:
        """Read what waited for an engine that is connected now; fail it where it cannot be."""
        news = self.peers.advance(now_s)
        for duration_s in self.peers.take_handshakes_s():
            self._stats.record_handshake(duration_s)
        for peer, error in news:
            address = peer.address
            if error is None:
                self.reads.begin(peer, now_s)
                continue
            self._stats.record_handshake_failure(error)
            failed = self.reads.fail_waiting(peer, error)
            # One line for all of them, which have one remedy. Where heartbeats alone have asked,
            # often those of a request that had just failed, nothing is lost.
            log = logger.error if failed else logger.info
            log(
                "Handshake with engine %s at %s:%d failed%s: %s",
                address.engine_id,
                address.host,
                address.port,
                named(failed),
                error,
            )

    def _send_heartbeats(self, heartbeats: Heartbeats, now_s: float) -> None:
        """Renew leases; an engine that is not connected yet is by the next time."""
        peer = self.peers.want(heartbeats.source, now_s)
        if peer.generation is not None:
            self._notifier.renew(heartbeats.request_ids, peer.generation)


def _may_begin(step: Step) -> bool:
    """Whether nobody writes into the blocks that a step reads into."""
    return step.before is None or step.before.query()

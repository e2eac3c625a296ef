# SPDX-License-Identifier: Apache-2.0
"""What a worker tells the producers of the blocks that it reads. Belongs to the connector's thread.

A notification is sent once a read of that producer has completed: before, it might leave only after
a later read. So each release and each renewal is a task, which waits for the connection and, if
nothing was read over it yet, for a look at each producer's lease table.

A release that cannot be sent is sent once more, over the next connection. After that, and where no
renewal comes, the lease decides.

The scheduler reports once that a request waits, and which engine holds its blocks. After that, no
lease expires because of long steps or a stuck rank. The address comes from a client, so leases are
renewed per address: a wrong one affects only its own request.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from typing import NamedTuple

from vllm.logger import init_logger

from ...errors import TransferError, one_line, quote
from ...protocol.ids import RequestId
from ...protocol.messages import (
    DoneEntry,
    GaveUpEntry,
    Receive,
    RemoteEngineAddress,
    RemoteRequest,
    encode_done,
    encode_gave_up,
    encode_renewals,
)
from ...protocol.tasks import Tasks
from ...transport.connection import PeerConnection
from ...transport.lease_check import LeaseError
from ..connecting.peers import PeerTable
from ..settings import DEFAULT_LEASE_S
from ..stats import ReshardStats
from .incoming import ReadError

logger = init_logger(__name__)

RENEWALS_PER_LEASE = 6
"""The same as for upstream's heartbeats: several can be lost before a lease expires."""

LONGEST_INTERVAL_S = DEFAULT_LEASE_S / RENEWALS_PER_LEASE
"""Maximum interval: other engines' leases may be shorter than this engine's."""


class Renewals:
    """The requests whose leases at other engines are renewed. Belongs to the connector's thread.

    Args:
        lease_s: This engine's own lease, in seconds. If it is longer than vLLM's default, leases
            are renewed as often as with the default.
    """

    def __init__(self, lease_s: float) -> None:
        self._interval_s = min(lease_s / RENEWALS_PER_LEASE, LONGEST_INTERVAL_S)
        self._waiting: dict[RequestId, RemoteRequest] = {}
        self._next_s = -math.inf

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def next_due_s(self) -> float:
        """Time of the next renewal; infinity if no request waits."""
        return self._next_s if self._waiting else math.inf

    def begin(self, requests: Mapping[RequestId, RemoteRequest]) -> None:
        """Add waiting requests, each with its holder's address and id for it."""
        self._waiting.update(requests)

    def stop(self, request_ids: Iterable[RequestId]) -> None:
        """Remove requests; ignore those that do not wait."""
        for request_id in request_ids:
            self._waiting.pop(request_id, None)

    @property
    def sources(self) -> set[RemoteEngineAddress]:
        """The engines that hold blocks for waiting requests."""
        return {request.source for request in self._waiting.values()}

    def take_due(self, now_s: float) -> dict[RemoteEngineAddress, set[RequestId]]:
        """Return the requests to renew now, by engine; empty until the next renewal is due."""
        due: dict[RemoteEngineAddress, set[RequestId]] = defaultdict(set)
        if self._waiting and now_s >= self._next_s:
            self._next_s = now_s + self._interval_s
            for request in self._waiting.values():
                due[request.source].add(request.request_id)
        return due


class _Release(NamedTuple):
    """A release to send to a producer.

    Attributes:
        receive: The request.
        entry: What the producer is told of it.
        is_second: Whether it could not be sent before.
    """

    receive: Receive
    entry: DoneEntry | GaveUpEntry
    is_second: bool


class Notifier:
    """Sends notifications to the workers of other engines.

    Releases are collected until `flush`, so that many requests cost each producer one notification.

    Args:
        name: This worker's name at the producers.
        stats: Its metrics.
        peers: The engines that it reads from.
        tasks: The tasks of its thread.
    """

    def __init__(self, name: str, stats: ReshardStats, peers: PeerTable, tasks: Tasks) -> None:
        self._name = name
        self._stats = stats
        self._peers = peers
        self._tasks = tasks
        # Releases to send to each producer at the end of a poll.
        self._outgoing: dict[tuple[PeerConnection, str], list[_Release]] = {}

    def release(self, receive: Receive, producers: PeerConnection | None = None) -> None:
        """Tell a request's producers that they need not hold its blocks.

        Args:
            receive: The request.
            producers: The connection with the producers' engine; None to wait for one.
        """
        if producers is None or producers.unreached:
            self._tasks.start(self._release(receive, is_second=False), _leave_release)
        else:
            self._queue(receive, producers, is_second=False)

    def renew(self, source: RemoteEngineAddress, request_ids: Iterable[RequestId]) -> None:
        """Renew the leases of some requests at an engine."""
        self._tasks.start(self._renew(source, request_ids), _leave_renewal)

    def flush(self) -> None:
        """Send the queued releases: one notification to each producer, or a few long ones."""
        # Once for a request, however many of its producers could not be told.
        unsent: dict[PeerConnection, dict[RequestId, Receive]] = {}
        while self._outgoing:
            producers, peer = to = next(iter(self._outgoing))
            releases = self._outgoing.pop(to)
            try:
                entries = [each.entry for each in releases]
                done = [entry for entry in entries if isinstance(entry, DoneEntry)]
                gave_up = [entry for entry in entries if isinstance(entry, GaveUpEntry)]
                messages = encode_done(self._name, done) + encode_gave_up(self._name, gave_up)
                if error := self._notify(producers, peer, messages):
                    again = [each.receive for each in releases if not each.is_second]
                    lost = unsent.setdefault(producers, {})
                    lost.update((each.remote_request_id, each) for each in again)
                    if len(again) < len(releases):
                        logger.warning(
                            "%s: its blocks are freed when their lease runs out", one_line(error)
                        )
            except Exception:
                logger.exception(
                    "%s is not told: blocks are freed when their lease runs out", quote(peer)
                )
        for producers, receives in unsent.items():
            if not producers.lifetime.is_retired:
                self._peers.break_off(producers, self._tasks.now_s)
            for receive in receives.values():
                self._tasks.start(self._release(receive, is_second=True), _leave_release)

    async def _release(self, receive: Receive, *, is_second: bool) -> None:
        """Queue a release once its producers can be told.

        Raises:
            LeaseError: One of them cannot be read from, over the next connection neither.
        """
        try:
            producers = await self._reached(receive.source)
        except LeaseError:
            if is_second:
                raise
            await self._release(receive, is_second=True)
        else:
            self._queue(receive, producers, is_second=is_second)

    def _queue(self, receive: Receive, producers: PeerConnection, *, is_second: bool) -> None:
        """Queue a release, if this worker has the secret or the fingerprint of the offer."""
        request_id = receive.remote_request_id
        for peer, num_notifiers in producers.releases:
            entry: DoneEntry | GaveUpEntry
            if receive.secret is not None:
                entry = GaveUpEntry(request_id, num_notifiers, receive.secret)
            elif receive.fingerprint is not None:
                entry = DoneEntry.of(request_id, num_notifiers, receive.fingerprint)
            else:
                return
            release = _Release(receive, entry, is_second)
            self._outgoing.setdefault((producers, peer), []).append(release)

    async def _renew(self, source: RemoteEngineAddress, request_ids: Iterable[RequestId]) -> None:
        """Send renewals to all producers once they can be told."""
        producers = await self._reached(source)
        messages = encode_renewals(request_ids)
        errors = [self._notify(producers, peer, messages) for peer, _ in producers.releases]
        if any(errors):
            logger.info("The connection with engine %s is broken.", quote(source.engine_id))
            self._peers.break_off(producers, self._tasks.now_s)

    async def _reached(self, source: RemoteEngineAddress) -> PeerConnection:
        """Wait until notifications to all producers of an engine leave when they are sent.

        Raises:
            LeaseError: One of them cannot be read from.
        """
        peer = self._peers.get_or_connect(source, self._tasks.now_s)
        # A notification need not queue behind reads.
        producers = peer.connection or await peer.turn(self._tasks)
        if tables := producers.unreached:
            self._peers.looking[producers] = None
            await producers.leases.reach(self._tasks, tables)
        return producers

    def _notify(
        self, producers: PeerConnection, peer: str, messages: Iterable[bytes]
    ) -> TransferError | None:
        """Send messages to one worker; return the error if one could not be sent, or None."""
        for message in messages:
            try:
                producers.notify(peer, message)
                self._stats.record_notification()
            except TransferError as error:
                # The producer frees the blocks when their lease runs out.
                self._stats.record_failed_notification()
                return error
        return None


async def _leave_release(error: Exception | None) -> None:
    """End a release: one that fails leaves the blocks to their lease."""
    if error is not None:
        log = (
            logger.info
            if isinstance(error, ReadError | LeaseError)
            else partial(logger.error, exc_info=error)
        )
        log("Blocks are freed when their lease runs out: %s", one_line(error))


async def _leave_renewal(error: Exception | None) -> None:
    """End a renewal: the next one comes before the lease expires."""
    if error is not None and not isinstance(error, ReadError | LeaseError):
        logger.error("Leases are not renewed this time", exc_info=error)

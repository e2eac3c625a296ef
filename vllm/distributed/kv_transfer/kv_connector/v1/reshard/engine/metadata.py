# SPDX-License-Identifier: Apache-2.0
"""Messages between an engine's scheduler and its workers, in the classes that vLLM carries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload

from ..protocol.fingerprint import OfferFingerprint, OfferSecret
from ..protocol.ids import BlockIds, RequestId
from ..protocol.messages import Receive, RemoteRequest
from ..protocol.metadata import WorkerHandshake
from ..transport.announcements import AnnouncerAddress
from .stats import ReshardStats


class ReshardHandshakeMetadata(WorkerHandshake, NixlHandshakePayload):
    """A worker's handshake with other engines, on its way to its own scheduler.

    Connectors around this one, as Dynamo's `PdConnector`, only let upstream's class pass. Nothing
    reads that one's fields, which are empty.
    """

    compatibility_hash = ""
    agent_metadata_bytes = b""


@dataclass(frozen=True)
class Offer:
    """A request whose blocks are held for another engine.

    Attributes:
        fingerprint: Fingerprint of the blocks' contents.
        lease_s: Seconds from now for which the blocks are held: a duration, because workers on
            other hosts have other clocks.
        num_blocks: Number of blocks, over all KV-cache groups.
        secret: Secret with which its reader may give the blocks up; None if it cannot.
        trace_headers: Headers that identify the request's trace; None without a trace.
        block_ids: The blocks, by KV-cache group; none where nothing is packed.
    """

    fingerprint: OfferFingerprint
    lease_s: float
    num_blocks: int = 0
    secret: OfferSecret | None = None
    trace_headers: Mapping[str, str] | None = None
    block_ids: BlockIds = ()


@dataclass
class ReshardConnectorMetadata(KVConnectorMetadata):
    """What the scheduler requests from the workers in one step.

    Attributes:
        receive: Requests to read blocks for.
        prefetch: Requests that are not offered yet, each with what can be read of it by now.
        given_up: Remote requests to give up, as this engine refused theirs. Their holders are
            notified.
        failed: Requests that some worker could not read. Nothing more need be read for them, and
            each worker reports them: see `failed_reads`.
        admitted: Requests that take part in a batch and may be read by another engine.
        withdrawn: Requests that will not be offered.
        offered: Requests whose blocks are held from now on.
        num_offers: Number of offers that the engine has made up to this step. Their announcements
            are older than the step.
        announcer: Address to receive offers from before their step; None if there is no need, or
            if it was sent before.
        awaited: Requests that wait for blocks from now on, and whose leases are renewed until they
            have ended.
        ended: Requests that have stopped waiting.
    """

    receive: dict[RequestId, Receive] = field(default_factory=dict)
    prefetch: dict[RequestId, Receive] = field(default_factory=dict)
    given_up: list[Receive] = field(default_factory=list)
    failed: set[RequestId] = field(default_factory=set)
    admitted: set[RequestId] = field(default_factory=set)
    withdrawn: set[RequestId] = field(default_factory=set)
    offered: dict[RequestId, Offer] = field(default_factory=dict)
    num_offers: int = 0
    announcer: AnnouncerAddress | None = None
    awaited: dict[RequestId, RemoteRequest] = field(default_factory=dict)
    ended: set[RequestId] = field(default_factory=set)

    def __bool__(self) -> bool:
        """Return whether anything is requested."""
        of_offers = {"num_offers", "announcer"}
        return any(value for name, value in vars(self).items() if name not in of_offers)


@final
@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """What has become of requests at a worker, from its connector's thread to the scheduler.

    vLLM takes what was sent, received and counted. The rest goes to the connector's scheduler, as
    soon as it is known.

    Attributes:
        sent: Requests whose blocks are not held for other engines any more.
        received: Requests that were received, and those that failed and are drained.
        failed: Requests that could not be read, each with its blocks, which may still be written
            until the request is in `received`.
        shortages: Why a worker cannot serve further engines, by its agent's name; empty once it
            can.
        stats: Metrics; None without any.
    """

    sent: set[RequestId] = field(default_factory=set)
    received: set[RequestId] = field(default_factory=set)
    failed: dict[RequestId, frozenset[int]] = field(default_factory=dict)
    shortages: dict[str, str] = field(default_factory=dict)
    stats: ReshardStats | None = None

    def __bool__(self) -> bool:
        return bool(
            self.sent or self.received or self.failed or self.shortages or self.stats is not None
        )

    def add(self, later: WorkerReport) -> None:
        """Merge a later report, or another worker's, into this one."""
        self.sent |= later.sent
        self.received |= later.received
        self.failed |= later.failed
        self.shortages |= later.shortages
        if self.stats is None:
            self.stats = later.stats
        elif later.stats is not None:
            self.stats.aggregate(later.stats)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Return two workers' reports in one."""
        assert isinstance(other, WorkerReport)
        both = WorkerReport()
        both.add(self)
        both.add(other)
        return both

    def take_finished(self) -> tuple[set[RequestId], set[RequestId]]:
        """Take out the requests that were sent, and those that were received."""
        finished = self.sent, self.received
        self.sent, self.received = set(), set()
        return finished

    def take_failed(self) -> dict[RequestId, frozenset[int]]:
        """Take out the requests that could not be read, with their blocks."""
        failed, self.failed = self.failed, {}
        return failed

    def take_shortages(self) -> dict[str, str]:
        """Take out what has changed of shortages."""
        shortages, self.shortages = self.shortages, {}
        return shortages

    def take_stats(self) -> ReshardStats | None:
        """Take out the metrics; None without any."""
        stats, self.stats = self.stats, None
        return stats

# SPDX-License-Identifier: Apache-2.0
"""What travels between an engine's scheduler and its workers, in the classes that vLLM carries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from ..protocol.board import BoardUpdate
from ..protocol.fingerprint import OfferFingerprint, OfferSecret
from ..protocol.ids import RequestId
from ..protocol.messages import Receive, RemoteRequest
from ..protocol.metadata import WorkerHandshake
from ..transport.sockets import InternalAddress


@dataclass(frozen=True)
class ReshardHandshakeMetadata(WorkerHandshake, KVConnectorHandshakeMetadata):
    """What a worker says of itself to other engines, on its way to its own scheduler."""


@dataclass
class ReshardConnectorMetadata(KVConnectorMetadata):
    """What the scheduler asks of the workers in one step.

    Attributes:
        receive: Requests to read blocks for.
        given_up: Requests that other engines hold for requests that this one has refused. They are
            told so.
        failed: Requests that some worker could not read. Nothing more need be read for them, and
            each worker reports them: see `failed_reads`.
        admitted: Requests that take part in a batch and may be read by another engine.
        withdrawn: Requests that will not be offered.
        offered: Requests whose blocks are held for another engine, and for how many seconds from
            now: a duration, because workers on other hosts have other clocks.
        offered_blocks: How many blocks each of these has, of all KV-cache groups.
        fingerprints: What each of these offers; of the same requests.
        secrets: What gives each of these up.
        trace_headers: What the traces of some of these are known by.
        num_offers: How many offers the engine has made up to this step. What is announced of them
            is older than the step.
        announcer: Where to hear of offers before the step that says so; None where that does not
            help, or was said before.
        doorbell: Where to ring; None where the scheduler does not rest, or it was said before.
        is_idle: The scheduler may rest after this step: what there is to tell later is rung for.
        awaited: Requests that wait for blocks from now on, and whose leases are to be renewed
            until they have ended.
        ended: Requests that do not wait any longer.
        early: Requests that other engines compute, and may not have offered yet: by the name that
            both engines have for each.
        board_updates: What other engines may see of the requests that this one computes.
    """

    receive: dict[RequestId, Receive] = field(default_factory=dict)
    given_up: list[Receive] = field(default_factory=list)
    failed: set[RequestId] = field(default_factory=set)
    admitted: set[RequestId] = field(default_factory=set)
    withdrawn: set[RequestId] = field(default_factory=set)
    offered: dict[RequestId, float] = field(default_factory=dict)
    offered_blocks: dict[RequestId, int] = field(default_factory=dict)
    fingerprints: dict[RequestId, OfferFingerprint] = field(default_factory=dict)
    secrets: dict[RequestId, OfferSecret] = field(default_factory=dict)
    trace_headers: dict[RequestId, Mapping[str, str]] = field(default_factory=dict)
    num_offers: int = 0
    announcer: InternalAddress | None = None
    doorbell: InternalAddress | None = None
    is_idle: bool = False
    awaited: dict[RequestId, RemoteRequest] = field(default_factory=dict)
    ended: set[RequestId] = field(default_factory=set)
    early: dict[RequestId, RemoteRequest] = field(default_factory=dict)
    board_updates: list[BoardUpdate] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether anything is asked for."""
        return bool(
            self.receive
            or self.given_up
            or self.admitted
            or self.withdrawn
            or self.offered
            or self.fingerprints
            or self.awaited
            or self.ended
            or self.failed
            or self.early
            or self.board_updates
        )


@dataclass
class WorkerNews(KVConnectorWorkerMetadata):
    """What workers tell their scheduler in one step, as soon as they know.

    Attributes:
        failed: Requests that a worker could not read.
        begun: Requests of `early` of which something is computed.
        admissible: Requests of `early` that may have blocks.
        faults: Those of them that will not be read, each with the reason.
        first_tokens: The token that is told with the offer of some of them.
        offered_s: For how many seconds requests were offered that were received.
    """

    failed: set[RequestId] = field(default_factory=set)
    begun: set[RequestId] = field(default_factory=set)
    admissible: set[RequestId] = field(default_factory=set)
    faults: dict[RequestId, str] = field(default_factory=dict)
    first_tokens: dict[RequestId, int] = field(default_factory=dict)
    offered_s: dict[RequestId, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any(getattr(self, each.name) for each in fields(self))

    def add(self, other: WorkerNews) -> None:
        """Take in what was seen later, or by another worker."""
        self.failed |= other.failed
        self.begun |= other.begun
        self.admissible |= other.admissible
        self.faults |= other.faults
        self.first_tokens |= other.first_tokens
        # Each worker has seen the offer by itself: the first of them counts.
        for request_id, offered_s in other.offered_s.items():
            self.offered_s[request_id] = max(offered_s, self.offered_s.get(request_id, 0.0))

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerNews:
        """What two workers say."""
        assert isinstance(other, WorkerNews)
        both = WorkerNews()
        both.add(self)
        both.add(other)
        return both

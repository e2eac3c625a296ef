# SPDX-License-Identifier: Apache-2.0
"""The producer's side of a worker, with what its scheduler and its peers do."""

from __future__ import annotations

from tests.v1.kv_connector.unit.reshard.protocol.tables import seen
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.metadata import (
    Offer,
    ReshardConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.producer import ProducerSide
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.stats import ReshardStats
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.fingerprint import (
    OfferFingerprint,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.leases import Held
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    DoneEntry,
    GaveUpEntry,
    encode_done,
    encode_gave_up,
)

OFFER = OfferFingerprint(48, 1, 2)
OTHERS = [OfferFingerprint(47, 1, 2), OfferFingerprint(48, 9, 2), OfferFingerprint(48, 1, 9)]
SECRET = 0xFEEDFACEC0FFEE11
LEASE_S = 30.0


class Agent:
    """An agent at which notifications arrive."""

    def __init__(self) -> None:
        self.arrived: list[tuple[str, bytes]] = []

    def register(self, regions, memory) -> None:
        """Nobody reads here."""

    def take_notifications(self) -> list[tuple[str, bytes]]:
        """What has arrived."""
        arrived, self.arrived = self.arrived, []
        return arrived


class Producer:
    """A producer, with what its scheduler and its peers would do."""

    def __init__(self) -> None:
        self.agent, self.stats = Agent(), ReshardStats()
        self.side = ProducerSide(self.agent, LEASE_S, self.stats)

    def tell(self, now_s: float = 0.0, **metadata) -> None:
        """What the scheduler asks for in a step."""
        self.side.apply_metadata(ReshardConnectorMetadata(**metadata), now_s)

    def offer(
        self,
        *request_ids: str,
        num_blocks: int = 3,
        now_s: float = 0.0,
        num_offers: int = 0,
        trace_headers: dict[str, str] | None = None,
        **metadata,
    ) -> None:
        """Requests were computed."""
        self.tell(now_s, admitted=set(request_ids))
        self.tell(
            now_s,
            num_offers=num_offers,
            offered=dict.fromkeys(
                request_ids, Offer(OFFER, LEASE_S, num_blocks, SECRET, trace_headers)
            ),
            **metadata,
        )

    def hear(
        self,
        *request_ids: str,
        fingerprint: OfferFingerprint = OFFER,
        notifier: str = "d0",
        of: int = 1,
    ) -> None:
        """A reader is through with some requests."""
        entries = [DoneEntry.of(request_id, of, fingerprint) for request_id in request_ids]
        self.agent.arrived += [("peer", message) for message in encode_done(notifier, entries)]

    def hear_that_gives_up(
        self, *request_ids: str, secret: int = SECRET, notifier: str = "d0", of: int = 1
    ) -> None:
        """A reader wants none of some requests."""
        entries = [GaveUpEntry(request_id, of, secret) for request_id in request_ids]
        self.agent.arrived += [("peer", message) for message in encode_gave_up(notifier, entries)]

    def seen(self, request_id: str) -> Held:
        """What readers see of a request."""
        return seen(self.side.table_address, request_id)

    def is_entered(self, request_id: str) -> bool:
        """Whether readers see that the request is held."""
        return self.seen(request_id).entered

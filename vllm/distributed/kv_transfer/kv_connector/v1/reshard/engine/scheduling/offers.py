# SPDX-License-Identifier: Apache-2.0
"""Offers to other engines, on their way from the scheduler to the workers.

Each offer goes with the next step's metadata. If steps are scheduled before the output of earlier
ones is known, workers may have to compute steps already sent before they see that metadata. Those
may hold other clients' prompts, which the reader would wait for. So such a scheduler also announces
each offer, and workers show it at once.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ...protocol.fingerprint import OfferFingerprint, OfferSecret
from ...protocol.ids import BlockIds, RequestId
from ...protocol.messages import Announcement, encode_announcement
from ...transport.announcements import Announcer, AnnouncerAddress, open_announcer
from ..metadata import Offer, ReshardConnectorMetadata

if TYPE_CHECKING:
    from vllm.config import ParallelConfig


def host_for_workers(config: ParallelConfig, host: str) -> str:
    """Return the address where workers reach the scheduler: loopback if all are on one machine.

    Args:
        config: Configuration that says whether they are on one machine.
        host: Address of this machine that others reach.
    """
    executor = config.distributed_executor_backend
    is_local = executor in ("mp", "uni") and config.nnodes_within_dp == 1
    return "127.0.0.1" if is_local else host


class OfferBook:
    """Offers that no step has sent to the workers yet. Belongs to the scheduler's thread."""

    def __init__(self) -> None:
        # Their leases begin with the step: `lease_s` is 0 until then.
        self._offers: dict[RequestId, Offer] = {}
        self._num_offers = 0
        self._announcer: Announcer | None = None
        # The announcer's address, until it is sent to the workers.
        self._address: AnnouncerAddress | None = None

    def announce_from(self, host: str) -> None:
        """Announce all further offers, if an announcer can be opened.

        Args:
            host: Address of this machine that all workers reach.
        """
        self._announcer = open_announcer(host)
        if self._announcer is not None:
            self._address = self._announcer.address

    def offer(
        self,
        request_id: RequestId,
        num_blocks: int,
        fingerprint: OfferFingerprint,
        trace_headers: Mapping[str, str] | None = None,
        block_ids: BlockIds = (),
    ) -> OfferSecret:
        """Offer a request's blocks, which all workers have computed.

        Args:
            request_id: The request.
            num_blocks: Number of blocks, over all KV-cache groups.
            fingerprint: Fingerprint of the blocks' contents.
            trace_headers: Headers that identify the request's trace; None without a trace.
            block_ids: The blocks, by KV-cache group; none where nothing is packed.

        Returns:
            The secret with which the engine that receives the request may give the blocks up.
        """
        secret = secrets.randbits(64)
        offer = Offer(fingerprint, 0.0, num_blocks, secret, trace_headers, block_ids)
        self._offers[request_id] = offer
        self._num_offers += 1
        self.announce(
            Announcement(self._num_offers, request_id, fingerprint, tuple(map(list, block_ids)))
        )
        return secret

    def announce(self, announcement: Announcement) -> None:
        """Send to all workers before the next step, if there is an announcer."""
        if self._announcer is not None:
            self._announcer.send(encode_announcement(announcement))

    def write_to(
        self, metadata: ReshardConnectorMetadata, leases_s: Mapping[RequestId, float]
    ) -> None:
        """Move the offers made since the last step into a step's metadata.

        Args:
            metadata: The step's metadata.
            leases_s: Seconds from now for which each of these offers is held.
        """
        assert leases_s.keys() == self._offers.keys(), "upstream holds what is offered"
        metadata.offered = {
            request_id: replace(offer, lease_s=leases_s[request_id])
            for request_id, offer in self._offers.items()
        }
        self._offers.clear()
        metadata.num_offers = self._num_offers
        metadata.announcer, self._address = self._address, None

    def close(self) -> None:
        """Stop announcing; may be called repeatedly."""
        if self._announcer is not None:
            self._announcer.close()
            self._announcer = None

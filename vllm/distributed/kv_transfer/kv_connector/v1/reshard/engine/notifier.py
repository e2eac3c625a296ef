# SPDX-License-Identifier: Apache-2.0
"""What a worker tells those who hold blocks for it. Belongs to the connector's thread."""

from __future__ import annotations

from collections.abc import Iterable

from vllm.logger import init_logger

from ..errors import TransferError
from ..protocol.ledgers import RequestId
from ..protocol.messages import Done, encode_notification, renewals
from ..transport.generation import Generation
from .stats import ReshardStats

logger = init_logger(__name__)


class Notifier:
    """Sends notifications to the workers of other engines.

    Args:
        name: What holders know this worker by.
        stats: Where to count.
    """

    def __init__(self, name: str, stats: ReshardStats) -> None:
        self._name = name
        self._stats = stats

    def release(
        self, request_id: RequestId, holders: Generation, *, known_as_broken: bool = False
    ) -> None:
        """Tell the holders of a request's blocks that this worker is through with them.

        Args:
            request_id: The request, as its holders call it.
            holders: The connection with their engine.
            known_as_broken: That they cannot be told is no news.
        """
        for peer, num_notifiers in holders.engine.releases:
            done = Done(request_id, self._name, num_notifiers)
            message = encode_notification(done)
            self._notify(holders, peer, message, known_as_broken=known_as_broken)

    def renew(self, request_ids: Iterable[RequestId], holders: Generation) -> None:
        """Ask the holders of some requests' blocks to hold them for longer."""
        message = renewals(request_ids)
        for peer, _ in holders.engine.releases:
            self._notify(holders, peer, message)

    def _notify(
        self, holders: Generation, peer: str, message: bytes, *, known_as_broken: bool = False
    ) -> None:
        try:
            holders.notify(peer, message)
            self._stats.record_notification()
        except TransferError as error:
            # The holder frees the blocks when their lease runs out.
            self._stats.record_failed_notification()
            if not known_as_broken:
                logger.warning("%s: its blocks are freed when their lease runs out", error)

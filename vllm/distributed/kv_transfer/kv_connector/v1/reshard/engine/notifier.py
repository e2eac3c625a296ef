# SPDX-License-Identifier: Apache-2.0
"""What a worker tells the producers of its blocks. Belongs to the connector's thread."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm.logger import init_logger

from ..errors import TransferError
from ..protocol.fingerprint import OfferFingerprint, OfferSecret
from ..protocol.ids import RequestId
from ..protocol.messages import (
    DoneEntry,
    GaveUpEntry,
    encode_done,
    encode_gave_up,
    encode_renewals,
)
from ..protocol.quoting import one_line, quote
from ..transport.connection import PeerConnection
from ..transport.lane import Lane
from .stats import ReshardStats

logger = init_logger(__name__)


@dataclass(slots=True)
class _Outgoing:
    """What one producer is told at the end of a poll.

    Attributes:
        releases: The requests that this worker is through with.
        given_up: Those that it gives up.
        known_as_broken: That it cannot be told is no news, for any of them.
    """

    releases: list[DoneEntry] = field(default_factory=list)
    given_up: list[GaveUpEntry] = field(default_factory=list)
    known_as_broken: bool = True


class Notifier:
    """Sends notifications to the workers of other engines.

    What is to be told of requests is collected until `flush`, so that many requests cost each
    producer one notification.

    Args:
        name: What producers know this worker by.
        stats: Where to count.
    """

    def __init__(self, name: str, stats: ReshardStats) -> None:
        self._name = name
        self._stats = stats
        self._outgoing: dict[tuple[PeerConnection, str], _Outgoing] = {}
        # Those over which something was sent that may be on its way.
        self._talking: dict[Lane, None] = {}

    @property
    def is_talking(self) -> bool:
        """Whether something that was sent may be on its way."""
        return bool(self._talking)

    def release(
        self,
        request_id: RequestId,
        fingerprint: OfferFingerprint,
        producers: PeerConnection,
        *,
        known_as_broken: bool = False,
    ) -> None:
        """Tell the producers of a request's blocks, by `flush`, that this worker is through.

        Args:
            request_id: The request, as its producers call it.
            fingerprint: What they should offer under that name; they release nothing without it.
            producers: The connection with their engine.
            known_as_broken: That they cannot be told is no news.
        """
        for peer, num_notifiers in producers.engine.releases:
            outgoing = self._outgoing.setdefault((producers, peer), _Outgoing())
            outgoing.releases.append(DoneEntry.of(request_id, num_notifiers, fingerprint))
            outgoing.known_as_broken &= known_as_broken

    def give_up(
        self, request_id: RequestId, secret: OfferSecret, producers: PeerConnection
    ) -> None:
        """Tell the producers of a request's blocks, by `flush`, that this worker wants none.

        Args:
            request_id: The request, as its producers call it.
            secret: What their offer went with.
            producers: The connection with their engine.
        """
        for peer, num_notifiers in producers.engine.releases:
            outgoing = self._outgoing.setdefault((producers, peer), _Outgoing())
            outgoing.given_up.append(GaveUpEntry(request_id, num_notifiers, secret))
            outgoing.known_as_broken = False

    def renew(self, request_ids: Iterable[RequestId], producers: PeerConnection) -> bool:
        """Ask the producers of some requests' blocks to hold them for longer.

        Returns:
            Whether each of them could be asked.
        """
        messages = list(encode_renewals(request_ids))
        asked = [
            self._notify(producers, peer, messages, known_as_broken=True)
            for peer, _ in producers.engine.releases
        ]
        return all(asked)

    def flush(self) -> None:
        """Send what was collected: one notification to each producer, or a few long ones."""
        while self._outgoing:
            producers, peer = to = next(iter(self._outgoing))
            outgoing = self._outgoing.pop(to)
            try:
                messages = encode_done(self._name, outgoing.releases)
                messages += encode_gave_up(self._name, outgoing.given_up)
                self._notify(producers, peer, messages, known_as_broken=outgoing.known_as_broken)
            except Exception:
                logger.exception(
                    "%s is not told: blocks are freed when their lease runs out", quote(peer)
                )

    def advance(self, now_s: float) -> None:
        """Let NIXL get on with what was sent."""
        for lane in list(self._talking):
            if lane.agent.is_open and now_s < lane.talks_until_s:
                lane.progress()
            else:
                del self._talking[lane]

    def _notify(
        self,
        producers: PeerConnection,
        peer: str,
        messages: Iterable[bytes],
        *,
        known_as_broken: bool = False,
    ) -> bool:
        """Send messages to one worker; returns whether all were taken."""
        for message in messages:
            try:
                producers.notify(peer, message)
                self._talking[producers.lane] = None
                self._stats.record_notification()
            except TransferError as error:
                # The producer frees the blocks when their lease runs out.
                self._stats.record_failed_notification()
                if not known_as_broken:
                    logger.warning(
                        "%s: its blocks are freed when their lease runs out", one_line(error)
                    )
                return False
        return True

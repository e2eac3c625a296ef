# SPDX-License-Identifier: Apache-2.0
"""Notifications to the producers of a worker's blocks. Belongs to the connector's thread."""

from __future__ import annotations

from collections.abc import Iterable

from vllm.logger import init_logger

from ...errors import TransferError
from ...protocol.ids import RequestId
from ...protocol.messages import (
    DoneEntry,
    GaveUpEntry,
    Receive,
    encode_done,
    encode_gave_up,
    encode_renewals,
)
from ...protocol.quoting import one_line, quote
from ...transport.connection import PeerConnection
from ...transport.lane import Lane
from ..stats import ReshardStats

logger = init_logger(__name__)


class Notifier:
    """Sends notifications to the workers of other engines.

    Releases are collected until `flush`, so that many requests cost each producer one notification.

    Args:
        name: This worker's name at the producers.
        stats: Its metrics.
    """

    def __init__(self, name: str, stats: ReshardStats) -> None:
        self._name = name
        self._stats = stats
        # Releases to send to each producer at the end of a poll.
        self._outgoing: dict[tuple[PeerConnection, str], list[DoneEntry | GaveUpEntry]] = {}
        # Lanes with notifications that may still be on their way.
        self._talking: dict[Lane, None] = {}

    @property
    def is_talking(self) -> bool:
        """True while a notification may be on its way."""
        return bool(self._talking)

    def release(self, receive: Receive, producers: PeerConnection) -> None:
        """Queue a notice, sent by `flush`, that a request's producers need not hold its blocks.

        Sends nothing if this worker has neither the secret nor the fingerprint of the offer.

        Args:
            receive: The request.
            producers: The connection with the producers' engine.
        """
        request_id = receive.remote_request_id
        for peer, num_notifiers in producers.releases:
            entry: DoneEntry | GaveUpEntry
            if receive.secret is not None:
                entry = GaveUpEntry(request_id, num_notifiers, receive.secret)
            elif receive.fingerprint is not None:
                entry = DoneEntry.of(request_id, num_notifiers, receive.fingerprint)
            else:
                return
            self._outgoing.setdefault((producers, peer), []).append(entry)

    def renew(self, request_ids: Iterable[RequestId], producers: PeerConnection) -> bool:
        """Renew the leases of some requests at their producers.

        Returns:
            Whether a notification was sent to each producer.
        """
        messages = encode_renewals(request_ids)
        errors = [self._notify(producers, peer, messages) for peer, _ in producers.releases]
        return not any(errors)

    def flush(self) -> None:
        """Send the queued releases: one notification to each producer, or a few long ones."""
        while self._outgoing:
            producers, peer = to = next(iter(self._outgoing))
            entries = self._outgoing.pop(to)
            try:
                done = [entry for entry in entries if isinstance(entry, DoneEntry)]
                gave_up = [entry for entry in entries if isinstance(entry, GaveUpEntry)]
                messages = encode_done(self._name, done) + encode_gave_up(self._name, gave_up)
                if error := self._notify(producers, peer, messages):
                    # A broken connection is known already, and logged elsewhere.
                    log = logger.debug if producers.lifetime.is_retired else logger.warning
                    log("%s: its blocks are freed when their lease runs out", one_line(error))
            except Exception:
                logger.exception(
                    "%s is not told: blocks are freed when their lease runs out", quote(peer)
                )

    def advance(self, now_s: float) -> None:
        """Let NIXL make progress with notifications that may be on their way."""
        for lane in list(self._talking):
            if lane.agent.is_open and now_s < lane.talks_until_s:
                lane.progress()
            else:
                del self._talking[lane]

    def _notify(
        self, producers: PeerConnection, peer: str, messages: Iterable[bytes]
    ) -> TransferError | None:
        """Send messages to one worker; return the error if one could not be sent, or None."""
        for message in messages:
            try:
                producers.notify(peer, message)
                self._talking[producers.lane] = None
                self._stats.record_notification()
            except TransferError as error:
                # The producer frees the blocks when their lease runs out.
                self._stats.record_failed_notification()
                return error
        return None

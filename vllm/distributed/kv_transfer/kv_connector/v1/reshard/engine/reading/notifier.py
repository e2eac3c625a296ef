# SPDX-License-Identifier: Apache-2.0
"""Notifications to the producers of a worker's blocks. Belongs to the connector's thread."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

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
from ..stats import ReshardStats

logger = init_logger(__name__)


class _Release(NamedTuple):
    """A release to send to a producer; see `Notifier.release`."""

    receive: Receive
    entry: DoneEntry | GaveUpEntry
    is_second: bool


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
        self._outgoing: dict[tuple[PeerConnection, str], list[_Release]] = {}

    def release(
        self, receive: Receive, producers: PeerConnection, *, is_second: bool = False
    ) -> None:
        """Queue a notice, sent by `flush`, that a request's producers need not hold its blocks.

        Sends nothing if this worker has neither the secret nor the fingerprint of the offer.

        Args:
            receive: The request.
            producers: The connection with the producers' engine.
            is_second: Whether an earlier notice of it could not be sent.
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
            release = _Release(receive, entry, is_second)
            self._outgoing.setdefault((producers, peer), []).append(release)

    def renew(self, request_ids: Iterable[RequestId], producers: PeerConnection) -> bool:
        """Renew the leases of some requests at their producers.

        Returns:
            Whether a notification was sent to each producer.
        """
        messages = encode_renewals(request_ids)
        errors = [self._notify(producers, peer, messages) for peer, _ in producers.releases]
        return not any(errors)

    def flush(self) -> dict[PeerConnection, dict[RequestId, Receive]]:
        """Send the queued releases: one notification to each producer, or a few long ones.

        Returns:
            Requests whose first release could not be sent, by the connection that is broken and
            their ids there: once, however many of their producers could not be told.
        """
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
        return unsent

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

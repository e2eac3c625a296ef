# SPDX-License-Identifier: Apache-2.0
"""What a worker tells the producers of its blocks. Belongs to the connector's thread."""

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

    What is to be told of requests is collected until `flush`, so that many requests cost each
    producer one notification.

    Args:
        name: What producers know this worker by.
        stats: Where to count.
    """

    def __init__(self, name: str, stats: ReshardStats) -> None:
        self._name = name
        self._stats = stats
        # What each producer is told at the end of a poll.
        self._outgoing: dict[tuple[PeerConnection, str], list[DoneEntry | GaveUpEntry]] = {}
        # Those over which something was sent that may be on its way.
        self._talking: dict[Lane, None] = {}

    @property
    def is_talking(self) -> bool:
        """Whether something that was sent may be on its way."""
        return bool(self._talking)

    def release(self, receive: Receive, producers: PeerConnection) -> None:
        """Have the producers of a request's blocks told, by `flush`, that they need not hold them.

        They are told nothing if this worker can show neither the secret nor the fingerprint of what
        they hold.

        Args:
            receive: The request.
            producers: The connection with their engine.
        """
        request_id = receive.remote_request_id
        for peer, num_notifiers in producers.engine.releases:
            entry: DoneEntry | GaveUpEntry
            if receive.secret is not None:
                entry = GaveUpEntry(request_id, num_notifiers, receive.secret)
            elif receive.fingerprint is not None:
                entry = DoneEntry.of(request_id, num_notifiers, receive.fingerprint)
            else:
                return
            self._outgoing.setdefault((producers, peer), []).append(entry)

    def renew(self, request_ids: Iterable[RequestId], producers: PeerConnection) -> bool:
        """Ask the producers of some requests' blocks to hold them for longer.

        Returns:
            Whether each of them could be asked.
        """
        messages = encode_renewals(request_ids)
        errors = [self._notify(producers, peer, messages) for peer, _ in producers.engine.releases]
        return not any(errors)

    def flush(self) -> None:
        """Send what was collected: one notification to each producer, or a few long ones."""
        while self._outgoing:
            producers, peer = to = next(iter(self._outgoing))
            entries = self._outgoing.pop(to)
            try:
                done = [entry for entry in entries if isinstance(entry, DoneEntry)]
                gave_up = [entry for entry in entries if isinstance(entry, GaveUpEntry)]
                messages = encode_done(self._name, done) + encode_gave_up(self._name, gave_up)
                if error := self._notify(producers, peer, messages):
                    # That a producer which cannot be read from cannot be told either is no news.
                    log = logger.warning if producers.lifetime.is_open else logger.debug
                    log("%s: its blocks are freed when their lease runs out", one_line(error))
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
        self, producers: PeerConnection, peer: str, messages: Iterable[bytes]
    ) -> TransferError | None:
        """Send messages to one worker; returns why one could not be sent, or None."""
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

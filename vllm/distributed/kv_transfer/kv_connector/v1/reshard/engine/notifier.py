# SPDX-License-Identifier: Apache-2.0
"""What a worker tells those who hold blocks for it. Belongs to the connector's thread."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm.logger import init_logger

from ..errors import TransferError
from ..protocol.binding import Binding
from ..protocol.ledgers import RequestId
from ..protocol.messages import Release, releases, renewals
from ..transport.generation import Generation
from .stats import ReshardStats

logger = init_logger(__name__)


@dataclass(slots=True)
class _Outgoing:
    """What one holder is told at the end of a turn.

    Attributes:
        releases: The requests that this worker is through with.
        known_as_broken: That it cannot be told is no news, for any of them.
    """

    releases: list[Release] = field(default_factory=list)
    known_as_broken: bool = True


class Notifier:
    """Sends notifications to the workers of other engines.

    What is to be told of requests is collected until `flush`, so that many requests cost each
    holder one notification.

    Args:
        name: What holders know this worker by.
        stats: Where to count.
    """

    def __init__(self, name: str, stats: ReshardStats) -> None:
        self._name = name
        self._stats = stats
        self._outgoing: dict[tuple[Generation, str], _Outgoing] = {}
        # Those over which something was sent that may be on its way.
        self._talking: dict[Generation, None] = {}

    @property
    def is_talking(self) -> bool:
        """Whether something that was sent may be on its way."""
        return bool(self._talking)

    def release(
        self,
        request_id: RequestId,
        binding: Binding,
        holders: Generation,
        *,
        known_as_broken: bool = False,
    ) -> None:
        """Tell the holders of a request's blocks, by `flush`, that this worker is through.

        Args:
            request_id: The request, as its holders call it.
            binding: What they should offer under that name; they believe nobody who cannot say.
            holders: The connection with their engine.
            known_as_broken: That they cannot be told is no news.
        """
        for peer, num_notifiers in holders.engine.releases:
            outgoing = self._outgoing.setdefault((holders, peer), _Outgoing())
            outgoing.releases.append(Release.of(request_id, num_notifiers, binding))
            outgoing.known_as_broken &= known_as_broken

    def renew(self, request_ids: Iterable[RequestId], holders: Generation) -> None:
        """Ask the holders of some requests' blocks to hold them for longer."""
        messages = renewals(request_ids)
        for peer, _ in holders.engine.releases:
            self._notify(holders, peer, messages)

    def flush(self) -> None:
        """Send what was collected: one notification to each holder, unless that grows too long."""
        collected, self._outgoing = self._outgoing, {}
        for (holders, peer), outgoing in collected.items():
            messages = releases(self._name, outgoing.releases)
            self._notify(holders, peer, messages, known_as_broken=outgoing.known_as_broken)

    def advance(self, now_s: float) -> None:
        """Let NIXL get on with what was sent."""
        for holders in list(self._talking):
            if holders.is_connected and now_s < holders.talks_until_s:
                holders.advance()
            else:
                del self._talking[holders]

    def _notify(
        self,
        holders: Generation,
        peer: str,
        messages: Iterable[bytes],
        *,
        known_as_broken: bool = False,
    ) -> None:
        for message in messages:
            try:
                holders.notify(peer, message)
                self._talking[holders] = None
                self._stats.record_notification()
            except TransferError as error:
                # The holder frees the blocks when their lease runs out.
                self._stats.record_failed_notification()
                if not known_as_broken:
                    logger.warning("%s: its blocks are freed when their lease runs out", error)
                return

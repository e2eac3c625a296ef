# SPDX-License-Identifier: Apache-2.0
"""Which leases the scheduler has renewed, and where.

Upstream keeps such a book by engine id, with the address that the first request names. Addresses
come from clients: there, one request that names a wrong one takes the heartbeats of all others with
it, and their leases run out. Here an address is part of the key, as it is for workers, so that a
wrong one costs its own request.
"""

from __future__ import annotations

from collections import defaultdict

from ..protocol.ledgers import RequestId
from ..protocol.messages import Heartbeats, RemoteEngineAddress

BEATS_PER_LEASE = 6
"""As upstream's: several may be lost before a lease runs out."""


class HeartbeatBook:
    """The requests of other engines whose blocks somebody here still waits for.

    Belongs to the scheduler's thread.

    Args:
        lease_s: For how long a heartbeat is taken to renew a lease.
    """

    def __init__(self, lease_s: float) -> None:
        self._interval_s = lease_s / BEATS_PER_LEASE
        self._waiting: dict[RequestId, tuple[RemoteEngineAddress, RequestId]] = {}
        self._next_s = float("-inf")

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(
        self, request_id: RequestId, producer: RemoteEngineAddress, remote_request_id: RequestId
    ) -> None:
        """A request waits for blocks that its producer knows under another name."""
        self._waiting[request_id] = producer, remote_request_id

    def end(self, request_id: RequestId) -> None:
        """A request waits no longer, if it did."""
        self._waiting.pop(request_id, None)

    def due(self, now_s: float) -> list[Heartbeats]:
        """What to send now, for each address; nothing before the interval is over."""
        if not self._waiting or now_s < self._next_s:
            return []
        self._next_s = now_s + self._interval_s
        by_producer: dict[RemoteEngineAddress, set[RequestId]] = defaultdict(set)
        for producer, remote_request_id in self._waiting.values():
            by_producer[producer].add(remote_request_id)
        return [Heartbeats(producer, frozenset(names)) for producer, names in by_producer.items()]

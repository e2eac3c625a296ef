# SPDX-License-Identifier: Apache-2.0
"""The leases that a worker renews, by itself, for as long as its engine waits for the blocks.

The scheduler says once that a request waits, and where its blocks are held; steps that take long,
or a rank that is stuck, cost no lease after that. An address comes from a client: it is part of the
key, so that a wrong one costs its own request.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

from ...protocol.ids import RequestId
from ...protocol.messages import RemoteEngineAddress, RemoteRequest
from ..settings import DEFAULT_LEASE_S

RENEWALS_PER_LEASE = 6
"""As upstream's heartbeats: several may be lost before a lease runs out."""

LONGEST_INTERVAL_S = DEFAULT_LEASE_S / RENEWALS_PER_LEASE
"""Other engines may have shorter leases than this one, which does not know them."""


class Renewals:
    """The requests whose leases at other engines are renewed. Belongs to the connector's thread.

    Args:
        lease_s: This engine's own lease. Where it is longer than vLLM's default, leases are renewed
            as often as with that one.
    """

    def __init__(self, lease_s: float) -> None:
        self._interval_s = min(lease_s / RENEWALS_PER_LEASE, LONGEST_INTERVAL_S)
        self._waiting: dict[RequestId, RemoteRequest] = {}
        self._next_s = -math.inf

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def next_due_s(self) -> float:
        """When leases are to be renewed next."""
        return self._next_s if self._waiting else math.inf

    def begin(self, requests: Mapping[RequestId, RemoteRequest]) -> None:
        """Requests wait for blocks that are held under other names elsewhere."""
        self._waiting.update(requests)

    def end(self, request_ids: Iterable[RequestId]) -> None:
        """Requests wait no longer, if they did."""
        for request_id in request_ids:
            self._waiting.pop(request_id, None)

    @property
    def sources(self) -> set[RemoteEngineAddress]:
        """The engines that hold what requests wait for."""
        return {request.source for request in self._waiting.values()}

    def take_due(self, now_s: float) -> dict[RemoteEngineAddress, set[RequestId]]:
        """The requests to renew now, at each engine; none before the interval is over."""
        due: dict[RemoteEngineAddress, set[RequestId]] = defaultdict(set)
        if self._waiting and now_s >= self._next_s:
            self._next_s = now_s + self._interval_s
            for request in self._waiting.values():
                due[request.source].add(request.request_id)
        return due

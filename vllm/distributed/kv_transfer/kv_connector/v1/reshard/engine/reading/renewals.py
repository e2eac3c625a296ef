# SPDX-License-Identifier: Apache-2.0
"""The leases at other engines that a worker renews while requests wait for the blocks.

The scheduler reports once that a request waits, and which engine holds its blocks. After that, no
lease expires because of long steps or a stuck rank. The address comes from a client, so leases
are renewed per address: a wrong one affects only its own request.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

from ...protocol.ids import RequestId
from ...protocol.messages import RemoteEngineAddress, RemoteRequest
from ..settings import DEFAULT_LEASE_S

RENEWALS_PER_LEASE = 6
"""The same as for upstream's heartbeats: several can be lost before a lease expires."""

LONGEST_INTERVAL_S = DEFAULT_LEASE_S / RENEWALS_PER_LEASE
"""Maximum interval: other engines' leases may be shorter than this engine's."""


class Renewals:
    """The requests whose leases at other engines are renewed. Belongs to the connector's thread.

    Args:
        lease_s: This engine's own lease, in seconds. If it is longer than vLLM's default, leases
            are renewed as often as with the default.
    """

    def __init__(self, lease_s: float) -> None:
        self._interval_s = min(lease_s / RENEWALS_PER_LEASE, LONGEST_INTERVAL_S)
        self._waiting: dict[RequestId, RemoteRequest] = {}
        self._next_s = -math.inf

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def next_due_s(self) -> float:
        """Time of the next renewal; infinity if no request waits."""
        return self._next_s if self._waiting else math.inf

    def begin(self, requests: Mapping[RequestId, RemoteRequest]) -> None:
        """Add waiting requests, each with its holder's address and id for it."""
        self._waiting.update(requests)

    def stop(self, request_ids: Iterable[RequestId]) -> None:
        """Remove requests; ignore those that do not wait."""
        for request_id in request_ids:
            self._waiting.pop(request_id, None)

    @property
    def sources(self) -> set[RemoteEngineAddress]:
        """The engines that hold blocks for waiting requests."""
        return {request.source for request in self._waiting.values()}

    def take_due(self, now_s: float) -> dict[RemoteEngineAddress, set[RequestId]]:
        """Return the requests to renew now, by engine; empty until the next renewal is due."""
        due: dict[RemoteEngineAddress, set[RequestId]] = defaultdict(set)
        if self._waiting and now_s >= self._next_s:
            self._next_s = now_s + self._interval_s
            for request in self._waiting.values():
                due[request.source].add(request.request_id)
        return due

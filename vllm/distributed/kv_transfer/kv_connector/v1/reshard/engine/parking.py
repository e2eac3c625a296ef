# SPDX-License-Identifier: Apache-2.0
"""Requests that a decode engine's scheduler has, and gives no blocks yet.

A request that was sent to both engines at once waits until the other one computes the last chunk of
its prompt: until then it holds no blocks and is in nobody's way. It has blocks then, so that
workers read as soon as it is offered, without a step in between. One that will not be offered has
blocks, too: vLLM hears of failed reads only where something is read, and does as
`kv_load_failure_policy` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..protocol.ids import RequestId
from ..protocol.messages import RemoteRequest


class Parking:
    """The requests that wait. Belongs to the scheduler's thread."""

    def __init__(self) -> None:
        self._parked: set[RequestId] = set()
        self._faults: dict[RequestId, str] = {}
        self._untold: dict[RequestId, RemoteRequest] = {}

    def __len__(self) -> int:
        """Requests that wait for blocks."""
        return len(self._parked)

    def __contains__(self, request_id: RequestId) -> bool:
        """Whether a request waits for blocks."""
        return request_id in self._parked

    def park(self, request_id: RequestId, request: RemoteRequest) -> None:
        """A request waits for an engine that knows it by a shared name."""
        self._parked.add(request_id)
        self._untold[request_id] = request

    def hear(self, admissible: Iterable[RequestId], faults: Mapping[RequestId, str]) -> None:
        """Take note of what a worker has seen of requests; those that wait do so no more."""
        self._parked.difference_update(admissible)
        for request_id, reason in faults.items():
            if request_id in self._parked:
                self._parked.remove(request_id)
                self._faults[request_id] = reason

    def leave(self, request_id: RequestId) -> str | None:
        """A request has blocks, or has ended; returns why it will not be read, if that is known."""
        self._parked.discard(request_id)
        return self._faults.pop(request_id, None)

    def take(self) -> dict[RequestId, RemoteRequest]:
        """The requests that workers were not told of."""
        untold, self._untold = self._untold, {}
        return untold

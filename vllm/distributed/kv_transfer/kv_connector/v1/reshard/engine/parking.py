# SPDX-License-Identifier: Apache-2.0
"""Requests that a decode engine's scheduler has, and gives no blocks yet.

A request that was sent to both engines at once waits until the other one computes the last chunk of
its prompt. It has blocks then, so that workers read as soon as it is offered, without a step in
between. One that will not be offered has blocks, too: vLLM hears of failed reads only where
something is read, and does as `kv_load_failure_policy` says.

Where some of its prompt is computed before, it may have blocks already, to be read into. Two
engines must not wait for each other then: this one with blocks for a prompt that needs more room
there, which is taken up by what is offered, and needs these blocks. So all such requests together
leave room for the longest prompt: whatever is offered finds room once the requests that run here
have ended. And a request has blocks so early only where as much is free beside it, so that none
behind it waits for these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..protocol.ids import RequestId
from ..protocol.messages import RemoteRequest


class Parking:
    """The requests that wait. Belongs to the scheduler's thread.

    Args:
        num_blocks: How many blocks there are; 0 to give none before a last chunk.
        longest_blocks: How many the longest prompt takes.
    """

    def __init__(self, num_blocks: int, longest_blocks: int) -> None:
        self._most_blocks = num_blocks - longest_blocks
        self._longest_blocks = longest_blocks
        # How many blocks each takes.
        self._parked: dict[RequestId, int] = {}
        # Those of which something is computed.
        self._begun: set[RequestId] = set()
        # Those that have blocks, and whose last chunks are not computed.
        self._holding: dict[RequestId, int] = {}
        self._faults: dict[RequestId, str] = {}
        self._untold: dict[RequestId, RemoteRequest] = {}

    def __len__(self) -> int:
        """Requests that wait for blocks."""
        return len(self._parked)

    def park(self, request_id: RequestId, request: RemoteRequest, num_blocks: int) -> None:
        """A request waits for an engine that knows it by a shared name.

        Args:
            request_id: The request.
            request: The same there.
            num_blocks: How many blocks it takes at most.
        """
        self._parked[request_id] = num_blocks
        self._untold[request_id] = request

    def may_have_blocks(self, request_id: RequestId, free_blocks: int) -> bool:
        """Whether a request waits no longer, or need not, with so many blocks that are free."""
        if (num_blocks := self._parked.get(request_id)) is None:
            return True
        if request_id not in self._begun or num_blocks + self._longest_blocks > free_blocks:
            return False
        return sum(self._holding.values()) + num_blocks <= self._most_blocks

    def hear(
        self,
        begun: Iterable[RequestId],
        admissible: Iterable[RequestId],
        faults: Mapping[RequestId, str],
    ) -> None:
        """Take note of what a worker has seen of requests.

        Args:
            begun: Those of which something is computed.
            admissible: Those that wait no longer, as their last chunks are computed.
            faults: Those that wait no longer, as they will not be offered.
        """
        self._begun.update(each for each in begun if each in self._parked)
        for request_id in admissible:
            self._end(request_id)
            self._holding.pop(request_id, None)
        for request_id, reason in faults.items():
            if request_id in self._parked:
                self._end(request_id)
                self._faults[request_id] = reason

    def admit(self, request_id: RequestId) -> None:
        """A request has blocks to be read into."""
        if request_id in self._parked:
            self._holding[request_id] = self._end(request_id)

    def leave(self, request_id: RequestId) -> str | None:
        """Workers hear of a request's blocks, or that it has ended.

        Returns:
            Why it will not be read, if that is known.
        """
        self._end(request_id)
        return self._faults.pop(request_id, None)

    def forget(self, request_ids: Iterable[RequestId]) -> None:
        """Nothing is read for requests any more."""
        for request_id in request_ids:
            self._holding.pop(request_id, None)

    def take(self) -> dict[RequestId, RemoteRequest]:
        """The requests that workers were not told of."""
        untold, self._untold = self._untold, {}
        return untold

    def _end(self, request_id: RequestId) -> int:
        """A request does not wait for blocks; returns how many it takes."""
        self._begun.discard(request_id)
        return self._parked.pop(request_id, 0)

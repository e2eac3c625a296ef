# SPDX-License-Identifier: Apache-2.0
"""Requests of a decode engine's scheduler that get no blocks yet.

A request that was sent to both engines at once waits until the prefill engine computes the last
chunk of its prompt. Then it gets blocks, so that workers read as soon as it is offered, without a
step in between. A request that will not be offered gets blocks, too: vLLM handles failed reads, as
`kv_load_failure_policy` says, only where something is read.

Once part of its prompt is computed there, a request may get blocks earlier. Two engines must not
wait for each other then: this one holds blocks for a prompt that needs more room there, and offers
that need these blocks take up that room. So all such requests together leave room for the longest
prompt: every offer finds room once the running requests have ended. And a request gets early blocks
only while enough for the longest prompt stay free, so that none behind it waits for these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...protocol.ids import RequestId
from ...protocol.messages import RemoteRequest


class Parking:
    """The requests that wait for blocks. Belongs to the scheduler's thread.

    Args:
        num_blocks: Number of blocks of the cache; 0 to give no blocks before a last chunk.
        longest_blocks: Number of blocks that the longest prompt takes.
    """

    def __init__(self, num_blocks: int, longest_blocks: int) -> None:
        self._most_blocks = num_blocks - longest_blocks
        self._longest_blocks = longest_blocks
        # Blocks that each takes at most.
        self._parked: dict[RequestId, int] = {}
        # Parked requests of whose prompts a part is computed.
        self._begun: set[RequestId] = set()
        # Requests that have blocks although their last chunks are not computed.
        self._holding: dict[RequestId, int] = {}
        self._faults: dict[RequestId, str] = {}
        self._untold: dict[RequestId, RemoteRequest] = {}

    def __len__(self) -> int:
        """Return the number of requests that wait for blocks."""
        return len(self._parked)

    def park(self, request_id: RequestId, request: RemoteRequest, num_blocks: int) -> None:
        """Have a request wait for the engine that computes its prompt under a shared name.

        Args:
            request_id: The request.
            request: The same request at that engine.
            num_blocks: Maximum number of blocks that it takes.
        """
        self._parked[request_id] = num_blocks
        self._untold[request_id] = request

    def may_have_blocks(self, request_id: RequestId, free_blocks: int) -> bool:
        """Return whether a request may get blocks now, while `free_blocks` blocks are free."""
        if (num_blocks := self._parked.get(request_id)) is None:
            return True
        if request_id not in self._begun or num_blocks + self._longest_blocks > free_blocks:
            return False
        return sum(self._holding.values()) + num_blocks <= self._most_blocks

    def hear(
        self,
        begun: Iterable[RequestId],
        may_have_blocks: Iterable[RequestId],
        faults: Mapping[RequestId, str],
    ) -> None:
        """Update requests with what a worker has seen at the other engine.

        Args:
            begun: Requests of whose prompts a part is computed.
            may_have_blocks: Requests that stop waiting, as their last chunks are computed.
            faults: Requests that stop waiting, as they will not be offered, each with the reason.
        """
        self._begun.update(each for each in begun if each in self._parked)
        for request_id in may_have_blocks:
            self._end(request_id)
            self._holding.pop(request_id, None)
        for request_id, reason in faults.items():
            if request_id in self._parked:
                self._end(request_id)
                self._faults[request_id] = reason

    def note_blocks(self, request_id: RequestId) -> None:
        """Note that a request has blocks to read into."""
        if request_id in self._parked:
            self._holding[request_id] = self._end(request_id)

    def leave(self, request_id: RequestId) -> str | None:
        """Stop waiting for a request: workers receive its blocks, or it has ended.

        Returns:
            Why it will not be read; None if no reason is known.
        """
        self._end(request_id)
        return self._faults.pop(request_id, None)

    def forget(self, request_ids: Iterable[RequestId]) -> None:
        """Forget the early blocks of requests that nothing is read for any more."""
        for request_id in request_ids:
            self._holding.pop(request_id, None)

    def take(self) -> dict[RequestId, RemoteRequest]:
        """Return the requests that workers have not received yet."""
        untold, self._untold = self._untold, {}
        return untold

    def _end(self, request_id: RequestId) -> int:
        """Stop waiting for a request; return how many blocks it takes, 0 if it does not wait."""
        self._begun.discard(request_id)
        return self._parked.pop(request_id, 0)

# SPDX-License-Identifier: Apache-2.0
"""Ends a request whose read has failed, and keeps its blocks until nothing can write into them.

A worker learns of a failed read in two stages: that it has failed, and, perhaps minutes later, that
it has drained: nothing can write into its blocks any more. vLLM has a report for each, but holds
the first back until all workers have made the second, which never happens if a peer hangs. What
workers send to their connector's scheduler is not held back. So a request takes one round of
reports if every worker reads it, and two if any of them fails:

    worker       its read fails: notifies the scheduler, and reports nothing to vLLM
    scheduler    notifies all workers in the next step
    workers      report the request as failed and received, all in that step
    scheduler    lets vLLM end the request or recompute it, and keeps its blocks
    workers      report it as received again, each once its read has drained
    scheduler    frees the blocks

vLLM counts each round over all workers. A worker that had already finished when another failed has
thereby made its first report, and makes its second when it is notified.

On 0.22.1 failed reads are reported by their blocks, and not held back: every request takes one
round there, and `FailedLoads` passes it on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

from ..protocol.ids import RequestId

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


class _Read(Enum):
    """State of a request that a worker has not made its last report of."""

    GOING_ON = auto()
    FAILED = auto()
    FAILED_AND_DRAINED = auto()
    TOLD = auto()


class LoadReports:
    """A worker's reports of the requests that it reads. Belongs to the engine's thread."""

    def __init__(self) -> None:
        self._reads: dict[RequestId, _Read] = {}
        self._told: set[RequestId] = set()
        self._once_more: set[RequestId] = set()
        self._news: set[RequestId] = set()

    def __len__(self) -> int:
        """Return the number of requests for which a report is still due."""
        return len(self._reads.keys() | self._once_more)

    def note_started(self, begun: Iterable[RequestId], told: Iterable[RequestId]) -> None:
        """Note what the scheduler sends with a step.

        Args:
            begun: Requests that have something to read from this step on.
            told: Requests whose reads have failed, here or at another worker.
        """
        for request_id in begun:
            # Of one that is read before it is offered, more than one step says so.
            self._reads.setdefault(request_id, _Read.GOING_ON)
        self._told.update(told)

    def advance(
        self, failed: Iterable[RequestId], drained: Iterable[RequestId]
    ) -> tuple[set[RequestId], set[RequestId]]:
        """Return what to report in this step.

        Args:
            failed: Requests whose reads have failed at this worker since the last step.
            drained: Requests that nothing at this worker can write for any more, whether or not
                they have failed. Each is passed once.

        Returns:
            The requests to report as received, and those of them to report as failed.
        """
        received, self._once_more = self._once_more, set()
        told, self._told = self._told, set()
        for request_id in told:
            received.add(request_id)
            read = self._reads.get(request_id)
            if read is _Read.FAILED_AND_DRAINED:
                del self._reads[request_id]
                self._once_more.add(request_id)
            elif read is not None:
                self._reads[request_id] = _Read.TOLD
        for request_id in failed:
            if self._reads[request_id] is _Read.GOING_ON:
                self._reads[request_id] = _Read.FAILED
                self._news.add(request_id)
        for request_id in drained:
            if self._reads[request_id] is _Read.FAILED:
                self._reads[request_id] = _Read.FAILED_AND_DRAINED
                continue
            del self._reads[request_id]
            # Reports are sets, so a request's two rounds need two steps.
            (self._once_more if request_id in received else received).add(request_id)
        return received, told

    def take_newly_failed(self) -> set[RequestId]:
        """Return the requests whose reads have failed here since the last call."""
        news, self._news = self._news, set()
        return news


class BlockOwner(Protocol):
    """The part of vLLM's cache manager used here; 0.22.1's lacks it, and is not passed to us."""

    block_pool: BlockPool

    def pop_blocks_for_free(self, request: Request) -> list[KVCacheBlock]:
        """Take a request's blocks, in the order of its sequence, without freeing them."""


@dataclass(slots=True)
class _Entry:
    """A request that is being read, or whose read has failed.

    Attributes:
        request: The request.
        num_blocks: Number of blocks that are read into, over all KV-cache groups.
        failed: Whether a worker could not read it.
        in_doubt: Whether all workers have reported that, so that only the second round is due.
            Until that round, something may still write into its blocks.
        blocks: Its blocks, once they are taken from it; None before.
    """

    request: Request
    num_blocks: int
    failed: bool = False
    in_doubt: bool = False
    blocks: list[KVCacheBlock] | None = None


class FailedLoads:
    """The requests that workers read, and the blocks in doubt. Belongs to the scheduler's thread.

    An ended request keeps its blocks, as an aborted one does, until it is reported to vLLM as
    received, once all workers have drained. A request that will be recomputed must not wait for
    that, and must not be computed into these blocks, so they are taken from it.

    Args:
        record_in_doubt: Called with the number of blocks in doubt when it changes.

    Attributes:
        manager: The owner of the blocks. If None, a request that will be recomputed waits until
            all workers have drained.
    """

    def __init__(self, record_in_doubt: Callable[[int], None]) -> None:
        self._record_in_doubt = record_in_doubt
        self.manager: BlockOwner | None = None
        self._entries: dict[RequestId, _Entry] = {}
        self._to_tell: set[RequestId] = set()

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_taken_blocks(self) -> int:
        """Number of blocks taken from requests and not freed yet."""
        return sum(len(entry.blocks or ()) for entry in self._entries.values())

    def begin(self, request: Request, num_blocks: int) -> None:
        """Note that workers are asked to read a request into `num_blocks` blocks."""
        self._entries[request.request_id] = _Entry(request, num_blocks)

    def hear(self, request_ids: AbstractSet[RequestId]) -> set[RequestId]:
        """Note requests that a worker could not read; return those that had not failed before."""
        news = set()
        for request_id in request_ids:
            entry = self._entries.get(request_id)
            if entry is not None and not entry.failed:
                entry.failed = True
                news.add(request_id)
        if news:
            self._to_tell |= news
            self._count_in_doubt()
        return news

    def take_failed(self) -> set[RequestId]:
        """Return the requests that all workers must report as failed, each of them once."""
        to_tell, self._to_tell = self._to_tell, set()
        return to_tell

    def settle(self, received: AbstractSet[RequestId]) -> set[RequestId]:
        """Note requests that all workers have reported as received.

        Returns:
            The requests to pass on to vLLM as received.
        """
        return {request_id for request_id in received if self._settle(request_id)}

    def _settle(self, request_id: RequestId) -> bool:
        """Note a round of reports; return whether to pass the request on to vLLM as received."""
        entry = self._entries.get(request_id)
        if entry is None:
            return True
        if entry.failed and not entry.in_doubt:
            entry.in_doubt = True
            if self.manager is None or entry.request.is_finished():
                return False
            entry.blocks = self.manager.pop_blocks_for_free(entry.request)
            return True
        del self._entries[request_id]
        if entry.failed:
            self._count_in_doubt()
        if entry.blocks is None:
            return True
        assert self.manager is not None
        # In vLLM's order: blocks at the end of a sequence are reused first.
        self.manager.block_pool.free_blocks(reversed(entry.blocks))
        return False

    def _count_in_doubt(self) -> None:
        """Record how many blocks of failed requests some worker's read may still write into."""
        failed = (entry for entry in self._entries.values() if entry.failed)
        self._record_in_doubt(sum(entry.num_blocks for entry in failed))

# SPDX-License-Identifier: Apache-2.0
"""How an engine ends a request whose read has failed, and keeps its blocks until nothing writes.

Of a read that goes wrong a worker learns two things: that it has failed, and, perhaps minutes
later, that nothing can write into its blocks any more. vLLM has a report for each, but holds the
first one back until all workers have made the second. Against a peer that hangs that is never. What
workers tell their connector's scheduler is not held back, so that each request takes one round of
reports if it is read everywhere, and two if it fails anywhere:

    worker       its read fails: tells the scheduler, and reports nothing
    scheduler    tells all workers in the next step
    workers      report the request as failed and received, all in that step
    scheduler    lets vLLM end the request or compute it anew, and keeps its blocks
    workers      report it as received again, each when nothing writes into its blocks any more
    scheduler    gives the blocks back

vLLM counts each round over all workers. One that was through before another failed has made its
first report then, and makes its second when it is told.

On 0.22.1 failed reads are reported by their blocks, which are not held back: there every request
takes one round, and a `ReadBook` lets it pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

from vllm.v1.request import RequestStatus

from ..protocol.ids import RequestId

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


class _Read(Enum):
    """What a worker knows of a request that it has not made its last report of."""

    GOING_ON = auto()
    FAILED = auto()
    FAILED_AND_DRAINED = auto()
    TOLD = auto()


class ReadReports:
    """What a worker reports of the requests that it reads. Belongs to the engine's thread."""

    def __init__(self) -> None:
        self._reads: dict[RequestId, _Read] = {}
        self._told: set[RequestId] = set()
        self._once_more: set[RequestId] = set()
        self._news: set[RequestId] = set()

    def __len__(self) -> int:
        """Requests that a report is still due for."""
        return len(self._reads.keys() | self._once_more)

    def note_started(self, begun: Iterable[RequestId], told: Iterable[RequestId]) -> None:
        """Hear from the scheduler.

        Args:
            begun: Requests that there is something to read for, from this step on.
            told: Requests whose reads have failed, here or at another worker.
        """
        self._reads.update(dict.fromkeys(begun, _Read.GOING_ON))
        self._told.update(told)

    def advance(
        self, failed: Iterable[RequestId], drained: Iterable[RequestId]
    ) -> tuple[set[RequestId], set[RequestId]]:
        """What to report in this step.

        Args:
            failed: Requests whose reads have failed at this worker since the last step.
            drained: Those that nothing writes for any more at this worker, whether or not they have
                failed. None is ever named again.

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
            # A round a step: what is reported is a set.
            (self._once_more if request_id in received else received).add(request_id)
        return received, told

    def take_news(self) -> set[RequestId]:
        """Requests whose reads have failed here, for the scheduler, since the last call."""
        news, self._news = self._news, set()
        return news


class BlockOwner(Protocol):
    """What is asked of vLLM's cache manager; that of 0.22.1 has less, and is not shown to us."""

    block_pool: BlockPool

    def pop_blocks_for_free(self, request: Request) -> list[KVCacheBlock]:
        """Take the blocks of a request, in the order of its sequence, without giving them back."""


@dataclass(slots=True)
class _Entry:
    """A request that is being read, or was read in vain.

    Attributes:
        request: The request.
        num_blocks: How many blocks are read into, of all KV-cache groups.
        failed: A worker could not read it.
        in_doubt: All workers have said so, and something may still write into its blocks.
        blocks: These, where they were taken from it.
    """

    request: Request
    num_blocks: int
    failed: bool = False
    in_doubt: bool = False
    blocks: list[KVCacheBlock] | None = None


class ReadBook:
    """The requests that workers read, and the blocks in doubt. Belongs to the scheduler's thread.

    A request that has ended keeps its blocks, as an aborted one does, until vLLM hears that it was
    received: it hears so when all workers are drained. One that is to be computed must not wait for
    that, and must not be computed into these blocks: they are taken from it.

    Attributes:
        manager: The owner of the blocks. Without one, a request that is to be computed waits until
            nothing writes into its blocks.
    """

    def __init__(self) -> None:
        self.manager: BlockOwner | None = None
        self._entries: dict[RequestId, _Entry] = {}
        self._to_tell: set[RequestId] = set()

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_loading(self) -> int:
        """Requests that wait for blocks, and for nothing else."""
        requests = (entry.request for entry in self._entries.values())
        return sum(each.status is RequestStatus.WAITING_FOR_REMOTE_KVS for each in requests)

    @property
    def num_taken_blocks(self) -> int:
        """Blocks that no request has, and that are not to be given to one yet."""
        return sum(len(entry.blocks or ()) for entry in self._entries.values())

    @property
    def num_blocks_in_doubt(self) -> int:
        """Blocks of failed requests that a read of some worker may still write into."""
        return sum(entry.num_blocks for entry in self._entries.values() if entry.failed)

    def begin(self, request: Request, num_blocks: int) -> None:
        """Workers are asked to read a request into so many blocks."""
        self._entries[request.request_id] = _Entry(request, num_blocks)

    def hear(self, request_ids: AbstractSet[RequestId]) -> set[RequestId]:
        """Take note of requests that a worker could not read; returns those that are news."""
        news = set()
        for request_id in request_ids:
            entry = self._entries.get(request_id)
            if entry is not None and not entry.failed:
                entry.failed = True
                news.add(request_id)
        self._to_tell |= news
        return news

    def take_failed(self) -> set[RequestId]:
        """Requests that all workers are to report as failed, once each."""
        to_tell, self._to_tell = self._to_tell, set()
        return to_tell

    def settle(self, received: AbstractSet[RequestId]) -> set[RequestId]:
        """Take note of requests that all workers have reported as received.

        Returns:
            Those that vLLM is to take for received.
        """
        return {request_id for request_id in received if self._settle(request_id)}

    def _settle(self, request_id: RequestId) -> bool:
        """Whether vLLM is to take a request for received that workers have reported."""
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
        if entry.blocks is None:
            return True
        assert self.manager is not None
        # As vLLM does it: those at the end of a sequence are reused first.
        self.manager.block_pool.free_blocks(reversed(entry.blocks))
        return False

# SPDX-License-Identifier: Apache-2.0
"""The requests of this engine whose blocks another one holds: one record for each.

    parked  ->  offered  ->  reading  ------------------------->  received
       |                      ^   |                                  ^
       +--->  prefetched  ----+   +--->  failed  --->  in doubt  ----+
       +--->  left

A request whose parameters name blocks begins as offered, and is read once it has blocks of its own.
One that a router has sent to both engines at once is *parked*: the other engine is asked for it.
Where vLLM has the hook (`hold_back`), it is not in vLLM's scheduler: it costs a step nothing, and
is added once there is news of it. Elsewhere vLLM asks for it in every step. If the other engine
will not offer it, its read fails: vLLM handles failed reads as `kv_load_failure_policy` says, only
where something is read.

Two engines must not wait for each other: a prefetched request holds blocks here for a prompt that
needs more room there, and offers that need these blocks take up that room. So all of these together
leave room for the longest prompt: every offer finds room once the running requests have ended. And
a request gets blocks early only while enough for the longest prompt stay free, so that none behind
it waits for these.

Only one request reads an offer, as its holder frees the blocks afterwards; it keeps that claim
until it ends. If an API server refuses a request, or does not see it through, vLLM makes up a
request in its place. For a refused one, only this tells which engine holds its blocks. But vLLM
does the same after requests that this engine has had. Their holders have been notified already, or
must not be: what is held for another prompt may be another client's.

    refused by the API server    made up                   the holder is notified
    taken up, and ended          made up, after that       no further notification

A request in doubt has failed, and something may still write into its blocks: see `failed_reads`.
One that has ended keeps them, as an aborted one does, until it is reported to vLLM as received. One
that will be recomputed must not wait for that, and must not be computed into these blocks, so they
are taken from it. Its record lasts as long.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum, auto
from threading import Lock
from typing import TYPE_CHECKING, Protocol, TypeAlias

from ...protocol.bounds import TrustedPeers
from ...protocol.ids import BlockIds, EngineId, RequestId
from ...protocol.messages import Receive, RemoteEngineAddress, RemoteRequest
from ...protocol.subscriptions import Ask, Computed, Gone, Known, Leave, News, Offered
from ..metadata import ReshardConnectorMetadata
from .receives import to_give_up

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from ...transport.subscriber import Subscriber

RemoteName: TypeAlias = tuple[EngineId, RequestId]
"""An engine, and its id for a request whose blocks it holds."""

MAX_REMEMBERED = 1 << 12
"""Maximum number of remembered ended requests: vLLM makes one up within milliseconds of the end.
Each has two names."""


class RemoteReadState(Enum):
    """Where a request stands; in their order for one that is prefetched and fails."""

    PARKED = auto()
    """It waits for its offer, without blocks."""
    PREFETCHED = auto()
    """It waits for its offer, and workers read into its blocks what is computed of it."""
    LEFT = auto()
    """It has ended here before its offer; vLLM may yet be told to come to it."""
    OFFERED = auto()
    """Its blocks are held, and it has none of its own into which they are read."""
    READING = auto()
    """Workers read into its blocks."""
    FAILED = auto()
    """A worker could not read it."""
    IN_DOUBT = auto()
    """All workers have reported that; something may still write into its blocks."""
    RECEIVED = auto()
    """Nothing writes into its blocks any more."""


_WAITING = frozenset({RemoteReadState.PARKED, RemoteReadState.PREFETCHED})
_READ_INTO = frozenset({RemoteReadState.PREFETCHED, RemoteReadState.READING})
_WRITTEN = _READ_INTO | {RemoteReadState.FAILED, RemoteReadState.IN_DOUBT}

_NOTHING_ASKED = Leave("", "")


class BlockOwner(Protocol):
    """The part of vLLM's cache manager used here; 0.22.1's lacks it, and is not passed to us."""

    block_pool: BlockPool

    def pop_blocks_for_free(self, request: Request) -> list[KVCacheBlock]:
        """Take a request's blocks, in the order of its sequence, without freeing them."""


@dataclass(slots=True, eq=False)
class RemoteRead:
    """A request that reads from another engine.

    Attributes:
        request: The request.
        state: Where it stands.
        claim: What it alone reads; None for nothing.
        is_renewed: Whether its lease is renewed.
        has_ended: Whether the request has ended here.
        block_ids: Its blocks into which workers read; empty without any.
        taken: Its blocks, if they were taken from it; None before.
        since_s: When it has arrived.
        num_blocks: Maximum number of blocks that it takes; 0 if that is not needed.
        place: Where its prompt is computed; None if nobody was asked for it.
        question: What that engine was asked.
        news: The last news of it.
        has_waited: Whether it was not offered when it was asked for.
        resume: Adds it to vLLM's scheduler; None if it is there.
        is_resumed: Whether `resume` was called and vLLM has not come to it.
    """

    request: Request
    state: RemoteReadState = RemoteReadState.OFFERED
    claim: RemoteName | None = None
    is_renewed: bool = False
    has_ended: bool = False
    block_ids: BlockIds = ()
    taken: list[KVCacheBlock] | None = None
    since_s: float = field(default_factory=time.monotonic)
    num_blocks: int = 0
    place: RemoteEngineAddress | None = None
    question: Ask | Leave = _NOTHING_ASKED
    news: News | None = None
    has_waited: bool = False
    resume: Callable[[], None] | None = None
    is_resumed: bool = False

    @property
    def request_id(self) -> RequestId:
        """Its id."""
        return str(self.request.request_id)

    @property
    def is_settled(self) -> bool:
        """Whether the engine that was asked offers it, or will not."""
        return isinstance(self.news, Offered | Gone)

    @property
    def num_written(self) -> int:
        """Number of blocks into which workers read, over all KV-cache groups."""
        return sum(map(len, self.block_ids))


class RemoteReads:
    """The requests that read from other engines. Belongs to the scheduler's thread, but `deliver`.

    Args:
        subscriber: Asks for requests that were sent to both engines.
        trusted: Networks that other engines may be in; None for any.
        record_in_doubt: Called with the number of blocks in doubt when it changes.
        num_blocks: Number of blocks of the cache; 0 to give no blocks before an offer.
        longest_blocks: Number of blocks that the longest prompt takes.

    Attributes:
        manager: The owner of the blocks. If None, a request that will be recomputed waits until
            all workers have drained.
        outbox: What the next step tells the workers.
        num_taken_blocks: Number of blocks taken from requests and not freed yet.
    """

    def __init__(
        self,
        subscriber: Subscriber,
        trusted: TrustedPeers | None,
        record_in_doubt: Callable[[int], None],
        num_blocks: int = 0,
        longest_blocks: int = 0,
    ) -> None:
        self._subscriber = subscriber
        self._trusted = trusted
        self._record_in_doubt = record_in_doubt
        self._most_blocks = num_blocks - longest_blocks
        self._longest_blocks = longest_blocks
        self.manager: BlockOwner | None = None
        self.outbox = ReshardConnectorMetadata()
        self.num_taken_blocks = 0
        self._num_in_doubt = 0
        self._reads: dict[RequestId, RemoteRead] = {}
        # Those that have a claim.
        self._claims: dict[RemoteName, RemoteRead] = {}
        # What nobody gives up: it was read, or given up. Oldest first.
        self._ended: dict[RemoteName, None] = {}
        # Those whose news is heard, by question, also after their end.
        self._asked: dict[str, RemoteRead] = {}
        # Prefetched ones whose news was not taken.
        self._heard: dict[str, RemoteRead] = {}
        # Guards `RemoteRead.resume` and `is_resumed`: vLLM is told once of what it has not seen.
        self._lock = Lock()
        self._inbox: deque[News] = deque()

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self._reads)

    @property
    def has_work(self) -> bool:
        """Whether the engine must step: to free blocks, or because workers have to be told.

        Of leases that they renew from now on, or of offers that they give up.
        """
        return bool(self.num_taken_blocks or self.outbox.awaited or self.outbox.given_up)

    def take_outbox(self) -> ReshardConnectorMetadata:
        """Return what a step tells the workers, and begin with the next one's."""
        outbox, self.outbox = self.outbox, ReshardConnectorMetadata()
        return outbox

    def is_written(self, request_id: RequestId) -> bool:
        """Return whether something may write into blocks that were a request's of this id."""
        read = self._reads.get(request_id)
        return read is not None and read.state in _WRITTEN

    # Waiting for an offer.

    def deliver(self, news: News) -> None:
        """Take news, and have vLLM come to the request; called by the subscriber's thread."""
        with self._lock:
            self._inbox.append(news)
            read = self._asked.get(news.asker)
            if read is None or read.resume is None or isinstance(news, Known):
                return
            if not read.is_resumed:
                read.is_resumed = True
                read.resume()

    def park(
        self,
        request: Request,
        place: RemoteEngineAddress,
        name: str,
        content: int | None,
        num_blocks: int,
        resume: Callable[[], None] | None,
    ) -> None:
        """Ask for a request that was sent to both engines, or say that nobody will read it.

        Args:
            request: The request.
            place: Where its prompt is computed.
            name: Its name at both engines; empty if they have none in common.
            content: Digest of its prompt; None if it will not be read.
            num_blocks: Maximum number of blocks that it takes.
            resume: Adds it to vLLM's scheduler; None if it is there.
        """
        asker = uuid.uuid4().hex
        read = RemoteRead(
            request,
            RemoteReadState.LEFT if content is None else RemoteReadState.PARKED,
            num_blocks=num_blocks,
            place=place,
            question=Leave(asker, name) if content is None else Ask(asker, name, content),
            resume=resume,
        )
        self._reads[read.request_id] = self._asked[asker] = read
        self._subscriber.ask(place, read.question)

    def waiting(self, request_id: RequestId) -> RemoteRead | None:
        """Return a request that waits for its offer; None if it does not."""
        read = self._reads.get(request_id)
        return read if read is not None and read.state in _WAITING else None

    def holds_back(self, request_id: RequestId, free_blocks: int) -> bool | None:
        """Return whether vLLM must not add a request; None if it does not wait here."""
        read = self._reads.get(request_id)
        if read is None or read.state not in (RemoteReadState.PARKED, RemoteReadState.LEFT):
            return None
        with self._lock:
            read.is_resumed = False
            self.hear()
            if read.state is RemoteReadState.LEFT:
                if read.question.asker not in self._asked:
                    self._forget(read)
                return True
            if not self.may_have_blocks(read, free_blocks):
                return True
            # It is in vLLM's scheduler from now on.
            read.resume = None
            return False

    def may_have_blocks(self, read: RemoteRead, free_blocks: int) -> bool:
        """Return whether a waiting request may get blocks, while `free_blocks` blocks are free."""
        if read.is_settled:
            return True
        num_blocks = read.num_blocks
        if not isinstance(read.news, Computed) or num_blocks + self._longest_blocks > free_blocks:
            return False
        prefetched = RemoteReadState.PREFETCHED
        held = sum(each.num_blocks for each in self._reads.values() if each.state is prefetched)
        return held + num_blocks <= self._most_blocks

    def hear(self) -> None:
        """Note what was delivered."""
        while self._inbox:
            news = self._inbox.popleft()
            if (read := self._asked.get(news.asker)) is None:
                continue
            read.news = news
            read.has_waited |= not isinstance(news, Offered)
            if read.state is RemoteReadState.PREFETCHED:
                self._heard[news.asker] = read
            elif read.state is not RemoteReadState.PARKED and read.is_settled:
                self._end(read)

    def take_heard(self) -> list[RemoteRead]:
        """Return the prefetched requests that there is news of."""
        self.hear()
        heard, self._heard = self._heard, {}
        return [each for each in heard.values() if each.state is RemoteReadState.PREFETCHED]

    def settle(self, read: RemoteRead) -> None:
        """Stop waiting for a request's offer: it is offered, or will not be."""
        is_prefetched = read.state is RemoteReadState.PREFETCHED
        read.state = RemoteReadState.READING if is_prefetched else RemoteReadState.OFFERED
        self._asked.pop(read.question.asker, None)

    def leave(self, read: RemoteRead) -> None:
        """Stop waiting for a parked request: it has ended here, or needs nothing of its offer."""
        self._leave(read, RemoteReadState.LEFT)
        if read.resume is None:
            self._forget(read)

    def drop(self, request_ids: Iterable[RequestId]) -> None:
        """Stop waiting for requests that are held back: their clients have left."""
        for request_id in request_ids:
            read = self.waiting(request_id)
            if read is not None and read.resume is not None:
                self.leave(read)

    def _leave(self, read: RemoteRead, state: RemoteReadState) -> None:
        """Have the other engine told that a request is not waited for any more."""
        self.hear()
        read.state, asked = state, read.question
        if read.is_settled:
            self._end(read)
        else:
            assert isinstance(asked, Ask) and read.place is not None
            left = Leave(asked.asker, asked.name, asked.content)
            self._subscriber.ask(read.place, left)

    def _end(self, read: RemoteRead) -> None:
        """End the wait for a request that has left: give up its offer, if there is one."""
        self._asked.pop(read.question.asker, None)
        if isinstance(read.news, Offered):
            self.give_up(to_give_up(read.news.params, self._trusted))
        if read.state is RemoteReadState.LEFT and not read.is_resumed:
            self._forget(read)

    # Claims and leases.

    def claim(self, request: Request, name: RemoteName) -> bool:
        """Return whether a request may read what is held under a name; only one may at a time."""
        holder = self._claims.get(name)
        if holder is not None and holder.request_id != request.request_id:
            return False
        read = self._claims[name] = self._record(request)
        read.claim = name
        return True

    def renew(self, request: Request, remote: RemoteRequest) -> None:
        """Have workers renew a request's lease, until it is received or has ended."""
        self._record(request).is_renewed = True
        self.outbox.awaited[request.request_id] = remote

    def stop_renewal(self, request_id: RequestId) -> None:
        """Stop renewing a request's lease; may be called repeatedly, and for any request."""
        read = self._reads.get(request_id)
        if read is not None and read.is_renewed:
            read.is_renewed = False
            if self.outbox.awaited.pop(request_id, None) is None:
                self.outbox.ended.add(request_id)

    def may_give_up(self, name: RemoteName) -> bool:
        """Return whether nobody reads what is held under a name, or has read it."""
        return name not in self._claims and name not in self._ended

    def give_up(self, receive: Receive | None) -> None:
        """Have the holder of an offer told that nobody will read it, if a secret proves it.

        It may be told again: the secret may have been wrong.
        """
        if receive is not None and receive.secret is not None:
            self.outbox.given_up.append(receive)

    # Reading.

    def begin(self, request: Request, block_ids: BlockIds) -> RemoteRead:
        """Note that workers are asked to read a request into blocks."""
        read = self._record(request)
        is_parked = read.state is RemoteReadState.PARKED
        read.state = RemoteReadState.PREFETCHED if is_parked else RemoteReadState.READING
        read.block_ids = block_ids
        return read

    def fail(self, request_ids: Iterable[RequestId]) -> set[RequestId]:
        """Note requests that a worker could not read; return those that had not failed before.

        All workers are told, and must report them as failed.
        """
        failed = set()
        for request_id in request_ids:
            read = self._reads.get(request_id)
            if read is None or read.state not in _READ_INTO:
                continue
            if read.state is RemoteReadState.PREFETCHED:
                self._leave(read, RemoteReadState.FAILED)
            read.state = RemoteReadState.FAILED
            failed.add(request_id)
            self._count_in_doubt(read.num_written)
        self.outbox.failed |= failed
        return failed

    def receive(self, request_ids: AbstractSet[RequestId]) -> set[RequestId]:
        """Note requests that all workers have reported as received.

        Returns:
            The requests to pass on to vLLM as received.
        """
        return {request_id for request_id in request_ids if self._receive(request_id)}

    def _receive(self, request_id: RequestId) -> bool:
        """Note a round of reports; return whether to pass the request on to vLLM as received."""
        read = self._reads.get(request_id)
        if read is None or read.state not in _WRITTEN:
            return True
        if read.state is RemoteReadState.FAILED:
            read.state = RemoteReadState.IN_DOUBT
            if self.manager is None or read.request.is_finished():
                return False
            read.taken = self.manager.pop_blocks_for_free(read.request)
            self.num_taken_blocks += len(read.taken)
            return True
        if read.state is RemoteReadState.IN_DOUBT:
            self._count_in_doubt(-read.num_written)
        read.state, read.block_ids = RemoteReadState.RECEIVED, ()
        if read.has_ended:
            self._forget(read)
        if (taken := read.taken) is None:
            return True
        assert self.manager is not None
        read.taken = None
        self.num_taken_blocks -= len(taken)
        # In vLLM's order: blocks at the end of a sequence are reused first.
        self.manager.block_pool.free_blocks(reversed(taken))
        return False

    def _count_in_doubt(self, num_blocks: int) -> None:
        """Count blocks of failed requests that some worker's read may still write into."""
        self._num_in_doubt += num_blocks
        self._record_in_doubt(self._num_in_doubt)

    # The end.

    def finish(self, request: Request) -> bool:
        """Note that a request has ended; return whether it was waiting for its offer."""
        read = self._reads.get(request.request_id)
        if read is None or read.request is not request:
            return False
        self.stop_renewal(read.request_id)
        read.has_ended = True
        if read.claim is not None and self._claims.get(read.claim) is read:
            del self._claims[read.claim]
            self._remember(read.claim)
        is_waiting = read.state in _WAITING
        if read.state is RemoteReadState.PARKED:
            self.leave(read)
        elif read.state is RemoteReadState.PREFETCHED:
            # Workers stop reading what is computed of it.
            self.fail([read.request_id])
        elif read.state not in _WRITTEN:
            self._forget(read)
        return is_waiting

    def _record(self, request: Request) -> RemoteRead:
        """Return a request's record, which is made if there is none."""
        read = self._reads.get(request.request_id)
        if read is None or read.request is not request:
            read = self._reads[request.request_id] = RemoteRead(request)
        return read

    def _forget(self, read: RemoteRead) -> None:
        if self._reads.get(read.request_id) is read:
            del self._reads[read.request_id]

    def _remember(self, name: RemoteName) -> None:
        """Remember that nobody has to give up what is held, or was, under a name."""
        self._ended.pop(name, None)
        self._ended[name] = None
        if len(self._ended) > MAX_REMEMBERED:
            del self._ended[next(iter(self._ended))]

# SPDX-License-Identifier: Apache-2.0
"""Requests of a decode engine's scheduler whose prompts another engine computes.

    parked  ->  offered       goes on like any other request, as if the router had sent the offer
       |   +->  gone          gets blocks, and its read fails: vLLM handles failed reads as
       |                      `kv_load_failure_policy` says, only where something is read
       +----->  prefetched    has blocks, into which the computed part is read; then one of these

Where vLLM has the hook (`hold_back`), a parked request is not in its scheduler at all: it costs a
step nothing, and is added once there is news of it. Elsewhere vLLM asks for it in every step.

Two engines must not wait for each other: a prefetched request holds blocks here for a prompt that
needs more room there, and offers that need these blocks take up that room. So all of these together
leave room for the longest prompt: every offer finds room once the running requests have ended. And
a request gets blocks early only while enough for the longest prompt stay free, so that none behind
it waits for these.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING

from ...protocol.ids import BlockIds, RequestId
from ...protocol.messages import RemoteEngineAddress
from ...protocol.params import Params
from ...protocol.subscriptions import Ask, Computed, Gone, Known, Leave, News, Offered

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from ...transport.subscriber import Subscriber


@dataclass(slots=True, eq=False)
class Parked:
    """A request that is not offered yet.

    Attributes:
        request: The request.
        request_id: Its id.
        place: Where its prompt is computed.
        name: Its name at both engines; empty if they have none in common.
        since_s: When it has arrived.
        num_blocks: Maximum number of blocks that it takes.
        resume: Adds it to vLLM's scheduler; None if it is there.
        content: Digest of its prompt; None if it will not be read.
        asker: Number of the question for it.
        news: The last news of it.
        has_waited: Whether it was not offered when it was asked for.
        is_resumed: Whether `resume` was called and vLLM has not come to it.
        block_ids: Its blocks, if it is prefetched; None without any.
    """

    request: Request
    request_id: RequestId
    place: RemoteEngineAddress
    name: str
    since_s: float
    num_blocks: int
    resume: Callable[[], None] | None
    content: int | None
    asker: str = field(default_factory=lambda: uuid.uuid4().hex)
    news: News | None = None
    has_waited: bool = False
    is_resumed: bool = False
    block_ids: BlockIds | None = None

    @property
    def is_settled(self) -> bool:
        """Whether it is offered, or will not be."""
        return isinstance(self.news, Offered | Gone)


class Parking:
    """The requests that wait for another engine. Belongs to the scheduler's thread, but `deliver`.

    Args:
        subscriber: Asks for them.
        num_blocks: Number of blocks of the cache; 0 to give no blocks before an offer.
        longest_blocks: Number of blocks that the longest prompt takes.
    """

    def __init__(self, subscriber: Subscriber, num_blocks: int, longest_blocks: int) -> None:
        self._subscriber = subscriber
        self._most_blocks = num_blocks - longest_blocks
        self._longest_blocks = longest_blocks
        self._parked: dict[RequestId, Parked] = {}
        # Those whose news is heard, by question, including those that have left.
        self._asked: dict[str, Parked] = {}
        # Those that have left, and that vLLM may yet be told to add.
        self._left: dict[RequestId, Parked] = {}
        # Guards `Parked.resume` and `Parked.is_resumed`: vLLM is told once of what it has not seen.
        self._lock = Lock()
        self._inbox: deque[News] = deque()
        # Requests with blocks whose news was not taken.
        self._heard: dict[str, Parked] = {}
        self._given_up: list[Params] = []

    def __len__(self) -> int:
        """Return the number of requests that wait for their offers."""
        return len(self._parked)

    @property
    def has_given_up(self) -> bool:
        """Whether there are offers to give up."""
        return bool(self._given_up)

    def deliver(self, news: News) -> None:
        """Take news, and have vLLM come to the request; called by the subscriber's thread."""
        with self._lock:
            self._inbox.append(news)
            parked = self._asked.get(news.asker)
            if parked is None or parked.resume is None or isinstance(news, Known):
                return
            if not parked.is_resumed:
                parked.is_resumed = True
                parked.resume()

    def park(self, parked: Parked) -> None:
        """Have a request wait; without the digest of its prompt, say that nobody will read it."""
        self._asked[parked.asker] = parked
        if parked.content is None:
            self._left[parked.request_id] = parked
            self._subscriber.ask(parked.place, Leave(parked.asker, parked.name))
        else:
            self._parked[parked.request_id] = parked
            self._subscriber.ask(parked.place, Ask(parked.asker, parked.name, parked.content))

    def holds_back(self, request_id: RequestId, free_blocks: int) -> bool | None:
        """Return whether vLLM must not add a request; None if it does not wait here."""
        parked = self._parked.get(request_id) or self._left.get(request_id)
        if parked is None:
            return None
        has_left = request_id in self._left
        with self._lock:
            parked.is_resumed = False
            self.hear()
            if has_left:
                if parked.asker not in self._asked:
                    self._left.pop(request_id, None)
                return True
            if not self.may_have_blocks(request_id, free_blocks):
                return True
            # It is in vLLM's scheduler from now on.
            parked.resume = None
            return False

    def may_have_blocks(self, request_id: RequestId, free_blocks: int) -> bool:
        """Return whether a request may get blocks now, while `free_blocks` blocks are free."""
        parked = self._parked[request_id]
        if parked.is_settled:
            return True
        num_blocks = parked.num_blocks
        if not isinstance(parked.news, Computed) or num_blocks + self._longest_blocks > free_blocks:
            return False
        held = sum(each.num_blocks for each in self._parked.values() if each.block_ids is not None)
        return held + num_blocks <= self._most_blocks

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._parked

    def get(self, request_id: RequestId) -> Parked | None:
        """Return a request that waits; None if it does not."""
        return self._parked.get(request_id)

    def take(self, request_id: RequestId) -> Parked:
        """Stop waiting for a request: it is offered, or will not be."""
        parked = self._parked.pop(request_id)
        self._asked.pop(parked.asker, None)
        return parked

    def leave(self, request_id: RequestId) -> Parked | None:
        """Stop waiting for a request that has ended here, and have the other engine told.

        Returns:
            The request; None if it does not wait.
        """
        if request_id not in self._parked:
            return None
        self.hear()
        parked = self._parked.pop(request_id)
        if parked.resume is not None:
            self._left[request_id] = parked
        if parked.is_settled:
            self._end(parked)
        else:
            left = Leave(parked.asker, parked.name, parked.content)
            self._subscriber.ask(parked.place, left)
        return parked

    def hear(self) -> None:
        """Note what was delivered."""
        while self._inbox:
            news = self._inbox.popleft()
            if (parked := self._asked.get(news.asker)) is None:
                continue
            parked.news = news
            parked.has_waited |= not isinstance(news, Offered)
            if self._parked.get(parked.request_id) is parked:
                if parked.block_ids is not None:
                    self._heard[news.asker] = parked
            elif parked.is_settled:
                self._end(parked)

    def take_heard(self) -> list[Parked]:
        """Return the requests with blocks that there is news of."""
        self.hear()
        heard, self._heard = self._heard, {}
        return [each for each in heard.values() if each.asker in self._asked]

    def take_given_up(self) -> list[Params]:
        """Return the parameters of offers that nobody will read."""
        given_up, self._given_up = self._given_up, []
        return given_up

    def _end(self, parked: Parked) -> None:
        """End the wait for a request that has left: give up its offer, if there is one."""
        self._asked.pop(parked.asker, None)
        if isinstance(parked.news, Offered):
            self._given_up.append(parked.news.params)
        if not parked.is_resumed:
            self._left.pop(parked.request_id, None)

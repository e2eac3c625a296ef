# SPDX-License-Identifier: Apache-2.0
"""What a prefill engine's scheduler says of its requests while it computes them.

    known  ->  last chunk  ->  offered  ->  (the workers take it down when it was read)
       +------------+---->  aborted, or empty

The names are those that decode engines derive, too. Of two requests that have one name at the same
time, nobody could say which is meant: it is ambiguous until both have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..protocol.board import Posting, Record, State, encode_record
from ..protocol.ids import BlockIds, RequestId


class Postings:
    """The requests that other engines may wait for. Belongs to the scheduler's thread.

    Args:
        announce: Tells all workers before the next step, where that can be.
    """

    def __init__(self, announce: Callable[[Posting], None]) -> None:
        self._announce = announce
        self._names: dict[RequestId, str] = {}
        # How long the prompts are that have blocks, and whose last chunks no step computes.
        self._num_tokens: dict[RequestId, int] = {}
        # Those that have not ended, by name.
        self._living: dict[str, set[RequestId]] = {}
        self._ambiguous: set[str] = set()
        self._number = 0
        self._untold: list[Posting] = []

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._names)

    def know(self, request_id: RequestId, name: str) -> None:
        """A request has come, of which another engine has that name."""
        self._names[request_id] = name
        living = self._living.setdefault(name, set())
        living.add(request_id)
        if len(living) > 1:
            self._ambiguous.add(name)
            self._post(name, State.AMBIGUOUS)
        else:
            self._post(name, State.KNOWN, request_id)

    def admit(self, request_id: RequestId, num_tokens: int) -> None:
        """A request has its first blocks, and computes a prompt of so many tokens."""
        if request_id in self._names:
            self._num_tokens[request_id] = num_tokens

    def compute(self, reached: Iterable[tuple[RequestId, int]], step_tokens: int) -> None:
        """A step is scheduled: prompts that it completes need no more blocks.

        Args:
            reached: The requests in it, each with how many tokens are computed after it.
            step_tokens: How many the step computes, of all of them.
        """
        if not self._num_tokens:
            return
        for request_id, num_tokens in reached:
            if num_tokens >= self._num_tokens.get(request_id, num_tokens + 1):
                del self._num_tokens[request_id]
                self._post_of(request_id, State.LAST_CHUNK, step_tokens=step_tokens)

    def offer(
        self,
        request_id: RequestId,
        num_tokens: int,
        block_ids: BlockIds,
        first_token: int | None = None,
    ) -> None:
        """A request's blocks are held for readers; and the token behind them, where it is told."""
        if request_id in self._names:
            record = encode_record(Record.of(request_id, num_tokens, block_ids, first_token))
            self._post_of(request_id, State.OFFERED, record)

    def end(self, request_id: RequestId, state: State) -> None:
        """A request has ended, and is not offered."""
        self._post_of(request_id, state)
        self.forget([request_id])

    def forget(self, request_ids: Iterable[RequestId]) -> None:
        """Requests are held no more: their names may be others'."""
        for request_id in request_ids:
            name = self._names.pop(request_id, None)
            self._num_tokens.pop(request_id, None)
            if name is None:
                continue
            living = self._living[name]
            living.remove(request_id)
            if not living:
                del self._living[name]
                if name in self._ambiguous:
                    self._ambiguous.remove(name)
                    self._post(name, None)

    def take(self) -> list[Posting]:
        """What workers were not told of by a step."""
        untold, self._untold = self._untold, []
        return untold

    def _post_of(
        self, request_id: RequestId, state: State, record: bytes = b"", step_tokens: int = 0
    ) -> None:
        name = self._names.get(request_id)
        if name is not None and name not in self._ambiguous:
            self._post(name, state, request_id, record, step_tokens)

    def _post(
        self,
        name: str,
        state: State | None,
        request_id: RequestId = "",
        record: bytes = b"",
        step_tokens: int = 0,
    ) -> None:
        self._number += 1
        posting = Posting(self._number, name, state, request_id, record, step_tokens)
        self._untold.append(posting)
        self._announce(posting)

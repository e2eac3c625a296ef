# SPDX-License-Identifier: Apache-2.0
"""States of requests that a prefill engine's scheduler shows on its board while it computes them.

    known  ->  last chunk  ->  offered  ->  (the workers remove it once it has been read)
       +------------+---->  aborted, or empty

If a prompt takes several steps, readers can read the results of earlier steps while the next one
runs: full blocks of groups that keep all tokens. A step's results are shown once its output is
known, because then all workers have computed it.

Decode engines derive the same names. If two requests have one name at the same time, a reader
cannot tell them apart: the name is ambiguous until both have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ...protocol.board import BoardUpdate, Record, State, encode_record
from ...protocol.ids import BlockIds, RequestId

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class Prompt(Protocol):
    """A request whose prompt a scheduler computes, as far as it is needed here.

    Attributes:
        num_prompt_tokens: Number of tokens in the prompt.
        num_computed_tokens: Number of tokens computed after all scheduled steps.
    """

    num_prompt_tokens: int
    num_computed_tokens: int


class Scheduled(NamedTuple):
    """A request in a step.

    Attributes:
        request_id: The request.
        num_before: Number of its tokens computed before the step.
        num_after: Number of its tokens computed after the step.
        block_ids: Blocks that were added for the step, of each KV-cache group.
        begins: Whether it has no other blocks: it is new, or begins anew.
    """

    request_id: RequestId
    num_before: int
    num_after: int
    block_ids: Sequence[Sequence[int]]
    begins: bool


def scheduled_in(output: SchedulerOutput) -> Iterator[Scheduled]:
    """Yield the requests of a step."""
    cached, num_scheduled = output.scheduled_cached_reqs, output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        before = new.num_computed_tokens
        after = before + num_scheduled[new.req_id]
        yield Scheduled(new.req_id, before, after, new.block_ids, begins=True)
    for request_id, before, block_ids in zip(
        cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
    ):
        after, begins = before + num_scheduled[request_id], request_id in cached.resumed_req_ids
        yield Scheduled(request_id, before, after, block_ids or (), begins)


@dataclass(slots=True)
class _Computed:
    """A prompt that is being computed.

    Attributes:
        prompt: The scheduler's request.
        attempt: Number that the scheduler gives each prompt it begins; a new one if begun anew.
        block_ids: Its blocks, of each KV-cache group.
        num_begun_with: Number of its tokens that were cached when its first step was scheduled.
            Another request may compute them in that very step.
        num_told: Number of tokens shown as computed.
        is_last: Whether the step that completes the prompt is scheduled.
    """

    prompt: Prompt
    attempt: int = 0
    block_ids: list[list[int]] = field(default_factory=list)
    num_begun_with: int = 0
    num_told: int = 0
    is_last: bool = False

    def begin(self, scheduled: Scheduled, attempt: int) -> None:
        """Start over with a step that computes from the beginning, or behind cached tokens."""
        self.attempt = attempt
        self.block_ids = [list(each) for each in scheduled.block_ids]
        self.num_begun_with, self.num_told = scheduled.num_before, 0

    def go_on(self, scheduled: Scheduled) -> None:
        """Add the blocks of a step that computes more of the prompt."""
        for ids, more in zip(self.block_ids, scheduled.block_ids, strict=False):
            ids += more


class BoardUpdates:
    """The requests that other engines may wait for. Belongs to the scheduler's thread.

    Args:
        announce: Sends an update to all workers before the next step, if that is possible.
        block_tokens: Number of tokens that a block of each KV-cache group holds; 0 for groups that
            do not keep all tokens. If all are 0, no part of a prompt is shown before its offer.
        in_flight: Returns how many of a request's computed tokens belong to steps whose output is
            not known yet; None if that cannot be determined.
    """

    def __init__(
        self,
        announce: Callable[[BoardUpdate], None],
        block_tokens: Sequence[int] = (),
        in_flight: Callable[[Prompt], int | None] = lambda _: None,
    ) -> None:
        self._announce = announce
        self._block_tokens = block_tokens
        self._in_flight = in_flight
        self._names: dict[RequestId, str] = {}
        # Requests that have blocks and whose prompts are being computed.
        self._computed: dict[RequestId, _Computed] = {}
        # Requests that have not ended, by name.
        self._living: dict[str, set[RequestId]] = {}
        self._ambiguous: set[str] = set()
        self._number = 0
        self._num_attempts = 0
        self._untold: list[BoardUpdate] = []

    def __len__(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._names)

    def add(self, request_id: RequestId, name: str) -> None:
        """Add a request that arrived, under the name that another engine has for it."""
        self._names[request_id] = name
        living = self._living.setdefault(name, set())
        living.add(request_id)
        if len(living) > 1:
            self._ambiguous.add(name)
            self._update(name, State.AMBIGUOUS)
        else:
            self._update(name, State.KNOWN, request_id)

    def note_blocks(self, request_id: RequestId, prompt: Prompt) -> None:
        """Note that a request has its first blocks and computes its prompt."""
        if request_id in self._names and request_id not in self._computed:
            self._computed[request_id] = _Computed(prompt)

    def compute(self, scheduled: Iterable[Scheduled]) -> None:
        """Show what a scheduled step changes: last chunks, and tokens of earlier steps."""
        if not self._computed:
            return
        for each in scheduled:
            computed = self._computed.get(each.request_id)
            if computed is None:
                continue
            if each.begins:
                self._num_attempts += 1
                computed.begin(each, self._num_attempts)
                if computed.is_last:
                    # It was preempted after its last chunk was scheduled: it needs blocks again.
                    computed.is_last = False
                    self._update_of(each.request_id, State.KNOWN)
            else:
                computed.go_on(each)
            is_last = each.num_after >= computed.prompt.num_prompt_tokens
            if is_last and not computed.is_last:
                computed.is_last = True
                self._update_of(each.request_id, State.LAST_CHUNK)
        if any(self._block_tokens):
            for request_id, computed in self._computed.items():
                self._tell_computed(request_id, computed)

    def offer(
        self,
        request_id: RequestId,
        num_tokens: int,
        block_ids: BlockIds,
        first_token: int | None = None,
    ) -> None:
        """Show that a request's blocks are held for readers, and the next token if it is given."""
        if request_id in self._names:
            computed = self._computed.pop(request_id, None)
            attempt = 0 if computed is None else computed.attempt
            record = Record.of(request_id, num_tokens, block_ids, first_token, attempt)
            self._update_of(request_id, State.OFFERED, encode_record(record))

    def finish(self, request_id: RequestId, state: State) -> None:
        """Show that a request has ended without an offer, and forget it."""
        self._update_of(request_id, state)
        self.forget([request_id])

    def forget(self, request_ids: Iterable[RequestId]) -> None:
        """Forget requests that are not held any more; other requests may have their names."""
        for request_id in request_ids:
            name = self._names.pop(request_id, None)
            self._computed.pop(request_id, None)
            if name is None:
                continue
            living = self._living[name]
            living.remove(request_id)
            if not living:
                del self._living[name]
                if name in self._ambiguous:
                    self._ambiguous.remove(name)
                    self._update(name, None)

    def take(self) -> list[BoardUpdate]:
        """Return the updates that no step has sent to the workers yet."""
        untold, self._untold = self._untold, []
        return untold

    def _tell_computed(self, request_id: RequestId, computed: _Computed) -> None:
        """Show how much of a prompt is computed, if that is more than before."""
        prompt = computed.prompt
        in_flight = self._in_flight(prompt)
        is_ambiguous = self._names[request_id] in self._ambiguous
        if in_flight is None or is_ambiguous or not computed.block_ids:
            # Without blocks it was in no step yet: its tokens are still being received here.
            return
        num_tokens = min(prompt.num_computed_tokens - in_flight, prompt.num_prompt_tokens)
        if num_tokens <= max(computed.num_begun_with, computed.num_told):
            return
        computed.num_told = num_tokens
        full = (
            ids[: num_tokens // tokens] if tokens else []
            for ids, tokens in zip(computed.block_ids, self._block_tokens, strict=True)
        )
        record = Record.of(request_id, num_tokens, list(full), attempt=computed.attempt)
        state = State.LAST_CHUNK if computed.is_last else State.KNOWN
        self._update_of(request_id, state, encode_record(record), num_tokens)

    def _update_of(
        self,
        request_id: RequestId,
        state: State,
        record: bytes = b"",
        num_computed: int = 0,
    ) -> None:
        name = self._names.get(request_id)
        if name is not None and name not in self._ambiguous:
            self._update(name, state, request_id, record, num_computed)

    def _update(
        self,
        name: str,
        state: State | None,
        request_id: RequestId = "",
        record: bytes = b"",
        num_computed: int = 0,
    ) -> None:
        self._number += 1
        update = BoardUpdate(self._number, name, state, request_id, record, num_computed)
        self._untold.append(update)
        self._announce(update)

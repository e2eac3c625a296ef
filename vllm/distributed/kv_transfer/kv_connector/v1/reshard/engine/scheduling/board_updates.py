# SPDX-License-Identifier: Apache-2.0
"""What a prefill engine's scheduler says of its requests while it computes them.

    known  ->  last chunk  ->  offered  ->  (the workers take it down when it was read)
       +------------+---->  aborted, or empty

Of a prompt that takes several steps, what these have computed can be read while the next is: blocks
of groups that keep all tokens, as far as they are full. What a step writes is told once its output
is known, which says that all workers have computed it.

The names are those that decode engines derive, too. Where two requests have one name at the
same time, it does not say which is meant: it is ambiguous until both have ended.
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
    """What a scheduler knows of a request whose prompt it computes.

    Attributes:
        num_prompt_tokens: How long the prompt is.
        num_computed_tokens: How many tokens are computed after the steps that are scheduled.
    """

    num_prompt_tokens: int
    num_computed_tokens: int


class Scheduled(NamedTuple):
    """A request in a step.

    Attributes:
        request_id: The request.
        num_before: How many of its tokens are computed before the step.
        num_after: How many are after it.
        block_ids: The blocks of each KV-cache group that it has got for the step.
        begins: They are all that it has: it is new, or begins anew.
    """

    request_id: RequestId
    num_before: int
    num_after: int
    block_ids: Sequence[Sequence[int]]
    begins: bool


def scheduled_in(output: SchedulerOutput) -> Iterator[Scheduled]:
    """The requests of a step."""
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
        prompt: What the scheduler knows of it.
        attempt: Which of all that this scheduler has begun to compute; another one each time that
            it is begun.
        block_ids: Its blocks, of each KV-cache group.
        num_begun_with: How many of its tokens were there when its first step was scheduled. Another
            request may compute them in that very step.
        num_told: How many are told of as computed.
        last_step_tokens: How many tokens the step computes that completes it; 0 until then.
    """

    prompt: Prompt
    attempt: int = 0
    block_ids: list[list[int]] = field(default_factory=list)
    num_begun_with: int = 0
    num_told: int = 0
    last_step_tokens: int = 0

    def begin(self, scheduled: Scheduled, attempt: int) -> None:
        """It is computed from its beginning, or from what is cached of it, in a step."""
        self.attempt = attempt
        self.block_ids = [list(each) for each in scheduled.block_ids]
        self.num_begun_with, self.num_told = scheduled.num_before, 0

    def go_on(self, scheduled: Scheduled) -> None:
        """A step computes more of it."""
        for ids, more in zip(self.block_ids, scheduled.block_ids, strict=False):
            ids += more


class BoardUpdates:
    """The requests that other engines may wait for. Belongs to the scheduler's thread.

    Args:
        announce: Tells all workers before the next step, where that can be.
        block_tokens: How many tokens a block of each KV-cache group holds; 0 for groups that do not
            keep all tokens. Without any, nothing is told of what is computed so far.
        in_flight: How many of a request's computed tokens are those of steps whose output is not
            known yet; None where that cannot be said.
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
        # Those that have blocks, and whose prompts are being computed.
        self._computed: dict[RequestId, _Computed] = {}
        # Those that have not ended, by name.
        self._living: dict[str, set[RequestId]] = {}
        self._ambiguous: set[str] = set()
        self._number = 0
        self._num_attempts = 0
        self._untold: list[BoardUpdate] = []

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._names)

    def add(self, request_id: RequestId, name: str) -> None:
        """A request has come, of which another engine has that name."""
        self._names[request_id] = name
        living = self._living.setdefault(name, set())
        living.add(request_id)
        if len(living) > 1:
            self._ambiguous.add(name)
            self._update(name, State.AMBIGUOUS)
        else:
            self._update(name, State.KNOWN, request_id)

    def admit(self, request_id: RequestId, prompt: Prompt) -> None:
        """A request has its first blocks, and computes its prompt."""
        if request_id in self._names and request_id not in self._computed:
            self._computed[request_id] = _Computed(prompt)

    def compute(self, scheduled: Iterable[Scheduled], step_tokens: int) -> None:
        """A step is scheduled: prompts that it completes need no more blocks.

        Args:
            scheduled: The requests in it.
            step_tokens: How many tokens the step computes, of all of them.
        """
        if not self._computed:
            return
        for each in scheduled:
            computed = self._computed.get(each.request_id)
            if computed is None:
                continue
            if each.begins:
                self._num_attempts += 1
                computed.begin(each, self._num_attempts)
                if computed.last_step_tokens:
                    # It was preempted after its last chunk was scheduled: it needs blocks again.
                    computed.last_step_tokens = 0
                    self._update_of(each.request_id, State.KNOWN)
            else:
                computed.go_on(each)
            is_last = each.num_after >= computed.prompt.num_prompt_tokens
            if is_last and not computed.last_step_tokens:
                computed.last_step_tokens = step_tokens
                self._update_of(each.request_id, State.LAST_CHUNK, step_tokens=step_tokens)
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
        """A request's blocks are held for readers; and the token behind them, where it is told."""
        if request_id in self._names:
            computed = self._computed.pop(request_id, None)
            attempt = 0 if computed is None else computed.attempt
            record = Record.of(request_id, num_tokens, block_ids, first_token, attempt)
            self._update_of(request_id, State.OFFERED, encode_record(record))

    def end(self, request_id: RequestId, state: State) -> None:
        """A request has ended, and is not offered."""
        self._update_of(request_id, state)
        self.forget([request_id])

    def forget(self, request_ids: Iterable[RequestId]) -> None:
        """Requests are held no more: their names may be others'."""
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
        """What workers were not told of by a step."""
        untold, self._untold = self._untold, []
        return untold

    def _tell_computed(self, request_id: RequestId, computed: _Computed) -> None:
        """Tell how much of a prompt is computed, where that is more than before."""
        prompt = computed.prompt
        in_flight = self._in_flight(prompt)
        is_ambiguous = self._names[request_id] in self._ambiguous
        if in_flight is None or is_ambiguous or not computed.block_ids:
            # Without blocks it was in no step yet: its tokens are still to be received here.
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
        step_tokens = computed.last_step_tokens
        state = State.LAST_CHUNK if step_tokens else State.KNOWN
        self._update_of(request_id, state, encode_record(record), step_tokens, num_tokens)

    def _update_of(
        self,
        request_id: RequestId,
        state: State,
        record: bytes = b"",
        step_tokens: int = 0,
        num_computed: int = 0,
    ) -> None:
        name = self._names.get(request_id)
        if name is not None and name not in self._ambiguous:
            self._update(name, state, request_id, record, step_tokens, num_computed)

    def _update(
        self,
        name: str,
        state: State | None,
        request_id: RequestId = "",
        record: bytes = b"",
        step_tokens: int = 0,
        num_computed: int = 0,
    ) -> None:
        self._number += 1
        update = BoardUpdate(
            self._number, name, state, request_id, record, step_tokens, num_computed
        )
        self._untold.append(update)
        self._announce(update)

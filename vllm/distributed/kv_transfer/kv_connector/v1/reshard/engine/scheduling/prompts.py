# SPDX-License-Identifier: Apache-2.0
"""Requests that a prefill engine computes for others, as its side channel tells who asks for them.

    added  ->  computed so far, again and again  ->  offered  ->  forgotten once it is not held
      +------------+---->  gone

What a step has computed is told once its output is known, because then all workers have computed
it: full blocks of groups that keep all tokens. Blocks that were cached when the prompt was begun
are told with those of its first step: another request of that step may compute them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from ...protocol.early import prefill_name
from ...protocol.ids import BlockIds, EngineId, RequestId
from ...protocol.params import Params
from ...protocol.subscriptions import Computed, Publisher
from ..content import prompt_digest

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from ...transport.side_channel import HandshakeServer

_PARTS = 16
"""Most parts in which a prompt is told of while it is computed: each names all blocks so far."""


@dataclass(slots=True)
class _Prompt:
    """A request that is not offered yet.

    Attributes:
        request: The request.
        attempt: The attempt to compute it that was told of last; -1 before the first one.
        num_told: Number of its tokens that need not be told.
    """

    request: Request
    attempt: int = -1
    num_told: int = 0


class Prompts:
    """The requests that other engines may ask for. Belongs to the scheduler's thread.

    Args:
        block_tokens: Number of tokens that a block of each KV-cache group holds; 0 for groups that
            do not keep all tokens. If all are 0, nothing is told of a prompt before its offer.
        in_flight: Returns how many of a request's computed tokens belong to steps whose output is
            not known yet; None if that cannot be determined.
        address: Returns the engine's id, host and port, as its offers have them.

    Attributes:
        server: Tells other engines; None until it is started.
        block_ids_of: Returns a request's blocks, of each KV-cache group; None if vLLM does not say.
    """

    def __init__(
        self,
        block_tokens: Sequence[int],
        in_flight: Callable[[Request], int | None],
        address: Callable[[], tuple[EngineId, str, int]],
    ) -> None:
        self._address = address
        self._block_tokens = block_tokens
        self._in_flight = in_flight
        self.server: HandshakeServer | None = None
        self.block_ids_of: Callable[[RequestId], BlockIds] | None = None
        self._prompts: dict[RequestId, _Prompt] = {}

    def add(self, request: Request, params: Params) -> None:
        """Add a request that has arrived, before anything is left out of its prompt."""
        if self.server is None:
            return
        request_id = request.request_id
        name, content = prefill_name(request_id, params), prompt_digest(request)
        self._prompts[request_id] = _Prompt(request)
        self.server.tell(lambda publisher: publisher.add(request_id, name, content))

    def begin_step(self, *, computes: bool) -> None:
        """Tell what earlier steps have computed, as the next one begins."""
        if self.server is None:
            return
        self.server.came_round_s = time.monotonic() if computes else float("inf")
        if any(self._block_tokens) and self.block_ids_of is not None:
            for request_id in self.server.publisher.claimed & self._prompts.keys():
                self._tell(self._prompts[request_id], self.block_ids_of)

    def end_step(self) -> None:
        """Note that a step has ended: what has arrived is taken up now."""
        if self.server is not None:
            self.server.came_round_s = float("inf")

    def is_given_up(self, request_id: RequestId) -> bool:
        """Return whether nobody will read a request."""
        return self.server is not None and request_id in self.server.publisher.given_up

    def offer(self, request_id: RequestId, params: dict[str, Any]) -> None:
        """Tell that a request is held for its reader."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is not None and self.server is not None:
            attempt = prompt.request.num_preemptions
            self.server.tell(lambda publisher: publisher.offer(request_id, params, attempt))

    def end(self, request_ids: Iterable[RequestId], reason: str) -> None:
        """Tell that requests have ended without an offer, or are not held any more."""
        for request_id in request_ids:
            self._prompts.pop(request_id, None)
            if self.server is not None:
                self.server.tell(partial(Publisher.end, request_id=request_id, reason=reason))

    def _tell(self, prompt: _Prompt, block_ids_of: Callable[[RequestId], BlockIds]) -> None:
        """Tell how much of a prompt is computed, if that is enough more than before."""
        request = prompt.request
        in_flight = self._in_flight(request)
        if in_flight is None or request.status is not RequestStatus.RUNNING:
            return
        total = request.num_prompt_tokens
        num_tokens = min(request.num_computed_tokens - in_flight, total)
        if prompt.attempt != request.num_preemptions:
            prompt.attempt, prompt.num_told = request.num_preemptions, num_tokens
            return
        if num_tokens <= prompt.num_told or num_tokens < prompt.num_told + total // _PARTS:
            return
        prompt.num_told = num_tokens
        request_id = request.request_id
        blocks = [
            list(ids[: num_tokens // tokens]) if tokens else []
            for ids, tokens in zip(block_ids_of(request_id), self._block_tokens, strict=True)
        ]
        place = self._address()
        computed = Computed("", *place, request_id, prompt.attempt, num_tokens, total, blocks)
        assert self.server is not None
        self.server.tell(lambda publisher: publisher.compute(request_id, computed))

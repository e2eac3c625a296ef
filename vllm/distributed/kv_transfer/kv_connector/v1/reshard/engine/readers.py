# SPDX-License-Identifier: Apache-2.0
"""Which requests of this engine read what others hold, and what vLLM gives up in their place.

Where an API server refuses a request, or does not see it through, vLLM makes one up in its place:
of the token 0, aborted as soon as it is there, with the parameters that came with the true one. For
a request that was refused, nothing else tells which engine holds its blocks. But vLLM does the same
after requests that this engine has had: when one fails, or when its client leaves. Their holders
have heard of them, or must not: what is held for another prompt may be another client's.

    refused by the API server    made up                   the holder is told
    taken up, and ended          made up, after that       nothing more is told
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from ..protocol.ids import EngineId, RequestId

if TYPE_CHECKING:
    from vllm.v1.request import Request

RemoteName: TypeAlias = tuple[EngineId, RequestId]
"""An engine, and what it calls a request whose blocks it holds."""

MAX_REMEMBERED = 1 << 12
"""Requests that have ended: vLLM makes one up within milliseconds of that. Each has two names."""


def is_made_up(request: Request) -> bool:
    """Whether a request stands for another one that its API server has not seen through.

    One that vLLM refuses while it is paused is aborted at once, too, but has its own prompt.
    """
    return bool(request.abort_immediately) and request.prompt_token_ids == [0]


class Readers:
    """Which request reads which request of another engine's. Belongs to the scheduler's thread."""

    def __init__(self) -> None:
        self._reading: dict[RemoteName, RequestId] = {}
        # The oldest first.
        self._ended: dict[RemoteName, None] = {}

    def admit(self, remote: RemoteName, request_id: RequestId) -> bool:
        """Whether a request may read, as one of them may at a time."""
        return self._reading.setdefault(remote, request_id) == request_id

    def end(self, remote: RemoteName, request_id: RequestId) -> None:
        """A request has ended, whether it was the one that reads or not."""
        if self._reading.get(remote) != request_id:
            return
        del self._reading[remote]
        self._ended.pop(remote, None)
        self._ended[remote] = None
        if len(self._ended) > MAX_REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def may_give_up(self, remote: RemoteName) -> bool:
        """Whether no request reads this, or did."""
        return remote not in self._reading and remote not in self._ended

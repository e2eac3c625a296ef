# SPDX-License-Identifier: Apache-2.0
"""Which requests read from other engines, and which made-up requests give such a read up.

If an API server refuses a request, or does not see it through, vLLM makes up a request in its
place: it has the one token 0, is aborted as soon as it arrives, and carries the parameters of the
true one. For a refused request, only this tells which engine holds its blocks. But vLLM does the
same after requests that this engine has had, when one fails or its client leaves. Their holders
have been notified already, or must not be: what is held for another prompt may be another client's.

    refused by the API server    made up                   the holder is notified
    taken up, and ended          made up, after that       no further notification
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from ...protocol.ids import EngineId, RequestId

if TYPE_CHECKING:
    from vllm.v1.request import Request

RemoteName: TypeAlias = tuple[EngineId, RequestId]
"""An engine, and its id for a request whose blocks it holds."""

MAX_REMEMBERED = 1 << 12
"""Maximum number of remembered ended requests: vLLM makes one up within milliseconds of the end.
Each has two names."""


def is_placeholder(request: Request) -> bool:
    """Return whether vLLM made up this request for one that its API server has not seen through.

    A request that vLLM refuses while paused is aborted at once, too, but has its own prompt.
    """
    return bool(request.abort_immediately) and request.prompt_token_ids == [0]


class OfferClaims:
    """Which request reads which remote request. Belongs to the scheduler's thread."""

    def __init__(self) -> None:
        self._reading: dict[RemoteName, RequestId] = {}
        # Oldest first.
        self._ended: dict[RemoteName, None] = {}
        # Made-up requests. Their own ids are no keys: clients choose them, and two may share one.
        self._given_up: dict[RemoteName, Request] = {}

    def claim(self, remote: RemoteName, request_id: RequestId) -> bool:
        """Return whether a request may read this remote request; only one may at a time."""
        return self._reading.setdefault(remote, request_id) == request_id

    def finish(self, remote: RemoteName, request_id: RequestId) -> None:
        """Note that a request has ended, whether it was the one that reads or not."""
        if self._reading.get(remote) != request_id:
            return
        del self._reading[remote]
        self._ended.pop(remote, None)
        self._ended[remote] = None
        if len(self._ended) > MAX_REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def may_give_up(self, remote: RemoteName) -> bool:
        """Return whether no request reads, or has read, this remote request."""
        return remote not in self._reading and remote not in self._ended

    def give_up(self, remote: RemoteName, request: Request) -> None:
        """Note that a made-up request gives up this remote request."""
        self._given_up[remote] = request

    def take_given_up(self) -> list[Request]:
        """Return the made-up requests whose holders have not been notified."""
        given_up, self._given_up = self._given_up, {}
        return list(given_up.values())

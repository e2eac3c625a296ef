# SPDX-License-Identifier: Apache-2.0
"""How long requests wait for their first token once another engine has computed their prompt.

The decode engine's part of a handover: from when the request is here and its prompt is offered, as
far as this engine knows, until its first token. It is measured where first tokens are made, so that
no clock of another process is in it: workers say how long ago they saw an offer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from ..protocol.ids import RequestId

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Handovers:
    """The requests that are handed over. Belongs to the scheduler's thread.

    Args:
        record: Called with the seconds that a handover took.
        clock: Seconds that only grow.
    """

    def __init__(
        self, record: Callable[[float], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._record = record
        self._clock = clock
        # Since when each request could have been read.
        self._since_s: dict[RequestId, float] = {}
        # Those that were read, and have no token yet.
        self._received: dict[RequestId, Request] = {}

    def __len__(self) -> int:
        """Requests whose handover is under way."""
        return len(self._since_s)

    def begin(self, request_id: RequestId) -> None:
        """A request has come whose prompt another engine computes, or has computed."""
        self._since_s[request_id] = self._clock()

    def hear(self, offered_s: Mapping[RequestId, float]) -> None:
        """Take note of offers that workers have seen, of requests that may have ended.

        Args:
            offered_s: How long ago each was seen, in seconds.
        """
        now_s = self._clock()
        for request_id in offered_s.keys() & self._since_s.keys():
            self._since_s[request_id] = now_s - offered_s[request_id]

    def receive(self, requests: Iterable[Request]) -> None:
        """Requests were read well."""
        for request in requests:
            if request.request_id in self._since_s:
                self._received[request.request_id] = request

    def advance(self) -> None:
        """See which have their first token, after each step."""
        for request_id in [
            request_id for request_id, each in self._received.items() if each.num_output_tokens
        ]:
            self.end(request_id)

    def end(self, request_id: RequestId) -> None:
        """A request has its first token, or has ended, perhaps without one."""
        since_s = self._since_s.pop(request_id, None)
        request = self._received.pop(request_id, None)
        if request is not None and since_s is not None and request.num_output_tokens:
            self._record(self._clock() - since_s)

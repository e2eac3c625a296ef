# SPDX-License-Identifier: Apache-2.0
"""Measures how long requests wait for their first token after another engine computed the prompt.

This is the decode engine's part of a handover. It begins when the request has arrived and, as far
as this engine knows, is offered; it ends with the first token. Workers report how long ago they saw
the offer, so no two processes' clocks are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...protocol.ids import RequestId

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(slots=True)
class _Handover:
    """A request whose handover is under way.

    Attributes:
        request: The request.
        since_s: When it arrived, or was offered if that was later.
        is_early: True if it may have arrived before it was offered.
    """

    request: Request
    since_s: float
    is_early: bool


class Handovers:
    """The requests whose handovers are under way. Belongs to the scheduler's thread.

    Args:
        record: Called with the duration of each handover, in seconds.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self, record: Callable[[float], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._record = record
        self._clock = clock
        self._by_id: dict[RequestId, _Handover] = {}
        # The subset whose blocks have been read.
        self._read: dict[RequestId, _Handover] = {}

    def __len__(self) -> int:
        """Return the number of handovers under way."""
        return len(self._by_id)

    def begin(self, request: Request, *, is_early: bool) -> None:
        """Begin the handover of a request whose prompt another engine has computed, or computes."""
        self._by_id[request.request_id] = _Handover(request, self._clock(), is_early)

    def hear(self, offered_s: Mapping[RequestId, float]) -> None:
        """Record requests that were read; some may have ended.

        Args:
            offered_s: Seconds since each request was seen to be offered, by request id.
        """
        now_s = self._clock()
        for request_id in offered_s.keys() & self._by_id.keys():
            handover = self._by_id[request_id]
            if handover.is_early:
                since_s = now_s - offered_s[request_id]
                # Each worker reports this when it has finished; the earliest offer counts.
                is_news = request_id not in self._read
                handover.since_s = since_s if is_news else min(since_s, handover.since_s)
            self._read[request_id] = handover

    def fail(self, request_ids: Iterable[RequestId]) -> None:
        """Drop requests that could not be read; their handovers are not recorded."""
        for request_id in request_ids:
            self._by_id.pop(request_id, None)
            self._read.pop(request_id, None)

    def advance(self) -> None:
        """End the handovers whose requests have their first token; called after each step."""
        begun = [name for name, each in self._read.items() if each.request.num_output_tokens]
        for request_id in begun:
            self.finish(request_id)

    def finish(self, request_id: RequestId) -> None:
        """End the handover of a request that has its first token, or has ended without one."""
        self._by_id.pop(request_id, None)
        handover = self._read.pop(request_id, None)
        if handover is not None and handover.request.num_output_tokens:
            self._record(self._clock() - handover.since_s)

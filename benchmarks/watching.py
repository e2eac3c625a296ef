# SPDX-License-Identifier: Apache-2.0
"""What a rank sees while it reads: posts to NIXL, bytes that arrive, and its own pauses."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from vllm.distributed.nixl_utils import NixlWrapper

from .caches import Arrival
from .specs import PauseSummary

_LOOK_S = 0.5e-3
"""How often to look for bytes: little beside any step that is long enough to count."""


@dataclass(frozen=True)
class Post:
    """A read that was posted.

    Attributes:
        at_s: When NIXL had taken it.
        cpu_s: What that took the calling thread, of which copying may be a part.
        thread_id: Of the calling thread: with ours, not the engine's.
    """

    at_s: float
    cpu_s: float
    thread_id: int


def watch_posts(posts: list[Post]) -> None:
    """Note when this process posts reads, whichever connector does."""
    post = NixlWrapper.transfer

    def transfer(agent: Any, *args: Any, **kwargs: Any) -> Any:
        before_s = time.thread_time()
        state = post(agent, *args, **kwargs)
        cpu_s = time.thread_time() - before_s
        posts.append(Post(time.monotonic(), cpu_s, threading.get_ident()))
        return state

    NixlWrapper.transfer = transfer


@dataclass(frozen=True)
class ThreadTimes:
    """CPU time of the threads of this process, as Linux counts it.

    Attributes:
        each_s: By the thread's id.
    """

    each_s: Mapping[str, float]

    @classmethod
    def now(cls) -> ThreadTimes:
        """What each has used so far."""
        each_s = {}
        for thread in Path("/proc/self/task").iterdir():
            try:
                used_ns, *_ = (thread / "schedstat").read_text().split()
            except FileNotFoundError:
                # It has just ended.
                continue
            each_s[thread.name] = int(used_ns) / 1e9
        return cls(each_s)

    def since(self, before: ThreadTimes, but: ThreadTimes) -> float:
        """What was used since then, in seconds, by all threads but some."""
        counted = self.each_s.keys() - but.each_s.keys()
        return sum(self.each_s[each] - before.each_s.get(each, 0.0) for each in counted)


class ArrivalWatch:
    """A thread that notes when the last byte is there.

    Args:
        arrival: Used by that thread alone.
    """

    def __init__(self, arrival: Arrival) -> None:
        self._arrival = arrival
        self._enough = threading.Event()
        self._at_s: float | None = None
        self._thread = threading.Thread(target=self._look, name="arrival", daemon=True)
        self._thread.start()

    def end(self) -> float | None:
        """Look once more and then not again; returns when the last byte was seen, None if never."""
        self._enough.set()
        self._thread.join()
        if self._at_s is None and self._arrival.complete():
            self._at_s = time.monotonic()
        return self._at_s

    def _look(self) -> None:
        while not self._arrival.complete():
            if self._enough.wait(_LOOK_S):
                return
        self._at_s = time.monotonic()


class Pauses:
    """How long the engine's thread, which owns this, is kept from its own work."""

    def __init__(self) -> None:
        # The longest of each step.
        self._each_s: list[float] = []

    def begin_step(self) -> None:
        """A step begins."""
        self._each_s.append(0.0)

    def add(self, duration_s: float) -> None:
        """Take a pause of this step into account."""
        self._each_s[-1] = max(self._each_s[-1], duration_s)

    def summary(self) -> PauseSummary:
        """All steps so far; at least one."""
        return PauseSummary(
            max(self._each_s), float(np.percentile(self._each_s, 99, method="inverted_cdf"))
        )

    def compute(self, duration_s: float) -> None:
        """Act out a step in Python: what passes between two looks at the clock is a pause."""
        last_s = time.monotonic()
        until_s = last_s + duration_s
        while last_s < until_s:
            now_s = time.monotonic()
            self.add(now_s - last_s)
            last_s = now_s

# SPDX-License-Identifier: Apache-2.0
"""Clients that ask one thing after the other and compare every answer with the right one."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import statistics
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

import httpx

from .accuracy import REQUEST_LIMIT_S, Completion, complete
from .errors import PDStackError

_REST_S = 0.25
"""How long a client rests between two requests, on average."""


@dataclass(frozen=True)
class Sample:
    """A request that has ended.

    Attributes:
        phase: in which phase it was sent.
        sent_s: when, in seconds since the load began.
        ended_s: when it ended.
        ttft_s: until its first token had come; ``None`` where it failed.
        failure: why there is no whole answer; empty where there is one.
        differs: whether the answer is another than the right one.
    """

    phase: str
    sent_s: float
    ended_s: float
    ttft_s: float | None
    failure: str = ""
    differs: bool = False


@dataclass(frozen=True)
class Figures:
    """What became of the requests of a phase.

    Attributes:
        requests: how many were sent and have ended.
        failed: how many of them were not answered to the end.
        differing: how many had another answer than the right one.
        ttft_p50_s: median time to the first token; ``None`` where none was answered.
        ttft_p99_s: its 99th percentile.
    """

    phase: str
    requests: int
    failed: int
    differing: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None


def figures(samples: Sequence[Sample], phases: Sequence[str]) -> list[Figures]:
    """Return what became of the requests of each phase, in that order."""
    found = []
    for phase in phases:
        of_phase = [each for each in samples if each.phase == phase]
        times = [each.ttft_s for each in of_phase if each.ttft_s is not None]
        found.append(
            Figures(
                phase,
                len(of_phase),
                sum(bool(each.failure) for each in of_phase),
                sum(each.differs for each in of_phase),
                statistics.median(times) if times else None,
                percentile(times, 0.99) if times else None,
            )
        )
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """Return the least value that at least this share of all values does not exceed.

    Args:
        values: at least one.
        share: above 0, at most 1.
    """
    return sorted(values)[math.ceil(share * len(values)) - 1]


class Load:
    """Clients in a thread of their own, which owns every connection; `samples` is under a lock.

    Args:
        url: base URL of who is asked, without a path.
        model: what it calls what it serves.
        prompts: what there is to ask, as token ids.
        references: the right answers.
        clients: how many there are.
        seed: other requests for another number.
    """

    def __init__(
        self,
        url: str,
        model: str,
        prompts: Sequence[Sequence[int]],
        references: Sequence[Completion],
        *,
        clients: int,
        seed: int = 0,
    ) -> None:
        self._url = url
        self._model = model
        self._prompts = prompts
        self._references = references
        self._clients = clients
        self._seed = seed
        self._lock = threading.Lock()
        self._samples: list[Sample] = []
        self._began = time.monotonic()
        self._ending = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)
        self.phase = ""

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.finish(0.0 if kind is not None else REQUEST_LIMIT_S)

    @property
    def samples(self) -> list[Sample]:
        """The requests that have ended so far."""
        with self._lock:
            return list(self._samples)

    def finish(self, limit_s: float) -> None:
        """Send nothing more, and return when all requests have ended.

        Args:
            limit_s: how long they may take; what has not ended then is broken off.
        """
        self._ending.set()
        self._thread.join(limit_s)
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._break_off)
            self._thread.join()

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._ask_all())
        self._loop.close()

    def _break_off(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    async def _ask_all(self) -> None:
        async with httpx.AsyncClient(timeout=REQUEST_LIMIT_S, trust_env=False) as http:
            clients = [self._keep_asking(http, number) for number in range(self._clients)]
            await asyncio.gather(*clients)

    async def _keep_asking(self, http: httpx.AsyncClient, number: int) -> None:
        rng = random.Random(f"{self._seed} {number}")
        for count in itertools.count():
            await asyncio.sleep(rng.expovariate(1 / _REST_S))
            if self._ending.is_set():
                return
            # Half of the requests find no block of others, and so have to be read whole.
            salt = f"{self._seed} {number} {count}" if rng.random() < 0.5 else None
            sample = await self._ask(http, rng.randrange(len(self._prompts)), salt)
            with self._lock:
                self._samples.append(sample)

    async def _ask(self, http: httpx.AsyncClient, index: int, salt: str | None) -> Sample:
        phase, sent_s = self.phase, time.monotonic() - self._began
        answer, failure = None, ""
        try:
            answer = await complete(http, self._url, self._model, self._prompts[index], salt)
        except (PDStackError, httpx.HTTPError, ValueError, KeyError) as error:
            failure = f"{type(error).__name__}: {error}"
        return Sample(
            phase,
            sent_s,
            time.monotonic() - self._began,
            answer.ttft_s if answer is not None else None,
            failure,
            answer is not None and answer.tokens != self._references[index].tokens,
        )

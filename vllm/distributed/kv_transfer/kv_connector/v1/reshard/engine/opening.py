# SPDX-License-Identifier: Apache-2.0
"""Opening a generation: ask an engine what it is, plan, and prepare everything with an agent.

None of this takes the engine's thread or the connector's. One thread asks all engines; another
prepares a generation for each that has answered, out of values that never change, and hands over
what nobody else has seen.

Most of that would be the agent: it is made, and all memory of the cache registered with it, before
an engine is asked for, and the next one once nothing is being read, which it would take cores from.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

from vllm.logger import init_logger

from ..memory.summary import describe_reads, layers_text
from ..plan.shards import Shard
from ..protocol.messages import RemoteEngineAddress
from ..protocol.metadata import WorkerDescription
from ..transport.agent import NixlAgent
from ..transport.generation import Generation
from ..transport.remote import Reader, RemoteEngine
from ..transport.staging_area import StagingArea
from .plans import Planner

logger = init_logger(__name__)

Answer = tuple[WorkerDescription, ...]
Ask = Callable[[RemoteEngineAddress], Future[Answer]]
"""Asks an engine for its workers; waits for nothing."""


@dataclass(frozen=True, slots=True)
class Local:
    """What a worker brings to every connection.

    Attributes:
        reader: The worker and its cache.
        shards: What every worker of its engine holds.
        regions: The cache's memory, as an agent registers it.
        area: Where staged reads stop over; None where all go direct.
        spread: Spreads replicas of an engine over holders of the same heads.
        missing_drafts: What becomes of a draft's layers that the other engine has not.
    """

    reader: Reader
    shards: tuple[Shard, ...]
    regions: Sequence[tuple[int, int, int]]
    area: StagingArea | None
    spread: int
    missing_drafts: Literal["refuse", "compute"] = "refuse"


MOST_DIVIDING = 8
"""So many agents at a time have threads that divide large reads, one that is ready among them. Each
such thread takes 20 ms to make and 5 MB: much for hundreds of engines, of each of which little is
read."""


class MakeAgent(Protocol):
    """Makes an agent that reads, with nothing registered."""

    def __call__(self, name: str, *, divides: bool) -> NixlAgent:
        """Make one; it divides large reads among threads, or has none."""


class Opener:
    """Opens generations for one worker.

    Args:
        make_agent: Makes the agents to read with.
        hung_grace_s: As in `Lifetime`.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        make_agent: MakeAgent,
        hung_grace_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make_agent = make_agent
        self._hung_grace_s = hung_grace_s
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reshard-opener")
        # Belongs to that thread, from `begin` on.
        self._dividing: list[NixlAgent] = []
        # One, or none. Also `close` takes it from there.
        self._ready: deque[NixlAgent] = deque()
        self._stays_ready = False
        self._closed = False
        self._local: Local | None = None
        self._planner: Planner | None = None
        self._ask: Ask | None = None

    def begin(self, local: Local, ask: Ask, *, stays_ready: bool) -> None:
        """What to connect and how to ask, known once the caches are registered.

        Args:
            local: What to connect.
            ask: How to ask.
            stays_ready: Whether to have an agent ready for the next engine, as suits who reads.
        """
        self._local, self._ask = local, ask
        self._planner = Planner(local.shards, local.spread, local.missing_drafts)
        self._stays_ready = stays_ready
        if stays_ready:
            self._make_ready()

    def open(self, address: RemoteEngineAddress) -> Future[Generation]:
        """Shake hands with an engine and prepare all lists; waits for nothing.

        The future raises what a `HandshakeClient` does; `ReshardError` where the engine's layout
        does not fit ours, and `TransferError` where NIXL does not accept it.
        """
        assert self._ask is not None
        opened: Future[Generation] = Future()
        began_s = time.monotonic()
        asked = self._ask(address)
        asked.add_done_callback(partial(self._answered, address, opened, began_s))
        return opened

    def quiet(self) -> None:
        """Nothing is being read: have an agent ready for the next engine. Waits for nothing."""
        if self._stays_ready and not self._ready:
            # Not any more, where this is closed.
            with suppress(RuntimeError):
                self._thread.submit(self._make_ready)

    def close(self) -> None:
        """Open nothing more."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._close_ready()

    def _answered(
        self,
        address: RemoteEngineAddress,
        opened: Future[Generation],
        began_s: float,
        asked: Future[Answer],
    ) -> None:
        """Go on with what an engine has answered. Called by the thread that asks."""
        if not opened.set_running_or_notify_cancel():
            return
        try:
            descriptions = asked.result()
            self._thread.submit(self._finish, address, descriptions, opened, began_s)
        except BaseException as error:
            # Nobody has answered, or this is closed.
            opened.set_exception(error)

    def _finish(
        self,
        address: RemoteEngineAddress,
        descriptions: Answer,
        opened: Future[Generation],
        began_s: float,
    ) -> None:
        try:
            opened.set_result(self._prepare(address, descriptions, began_s))
        except BaseException as error:
            opened.set_exception(error)

    def _make_ready(self) -> None:
        """Have an agent ready for the next engine.

        Not where it would have no threads: when it is taken, others may have ended theirs.
        """
        if self._ready or not self._may_divide():
            return
        # Where it cannot be made, whoever needs it next is told.
        with suppress(Exception):
            self._ready.append(self._new_agent())
        if self._closed:
            self._close_ready()

    def _close_ready(self) -> None:
        with suppress(IndexError):
            self._ready.pop().close()

    def _take_agent(self) -> NixlAgent:
        try:
            return self._ready.pop()
        except IndexError:
            return self._new_agent()

    def _new_agent(self) -> NixlAgent:
        """An agent with which all memory is registered that is read into."""
        local = self._local
        assert local is not None
        divides = self._may_divide()
        agent = self._make_agent(f"reader/{uuid.uuid4()}", divides=divides)
        try:
            agent.register(local.regions)
            if local.area is not None:
                agent.register([local.area.region])
        except BaseException:
            agent.close()
            raise
        if divides:
            self._dividing.append(agent)
        return agent

    def _may_divide(self) -> bool:
        self._dividing = [each for each in self._dividing if each.is_open]
        return len(self._dividing) < MOST_DIVIDING

    def _prepare(
        self, address: RemoteEngineAddress, descriptions: Answer, began_s: float
    ) -> Generation:
        local, planner = self._local, self._planner
        assert local is not None and planner is not None
        shards = [description.shard for description in descriptions]
        planned = planner.plan(shards)
        plan = planned.plan
        if planned.missing:
            logger.warning(
                "Drafts start cold: engine %s does not have their layers (%s).",
                address.engine_id,
                layers_text(planned.missing),
            )
        agent = self._take_agent()
        try:
            by_rank = {description.shard.rank: description for description in descriptions}
            engine = RemoteEngine(agent, by_rank, plan, local.reader, local.area)
            generation = Generation(agent, engine, self._hung_grace_s, self._clock)
        except BaseException:
            agent.close()
            raise
        logger.info(
            "From engine %s of %d ranks, rank %s %s. The handshake took %.1f ms.",
            address.engine_id,
            len(descriptions),
            local.reader.rank,
            describe_reads(plan, local.reader.rank),
            1e3 * (time.monotonic() - began_s),
        )
        return generation

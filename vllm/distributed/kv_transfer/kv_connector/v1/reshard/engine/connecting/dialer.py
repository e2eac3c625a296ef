# SPDX-License-Identifier: Apache-2.0
"""The slow steps of connecting to an engine: asking it, planning, lowering, and making lanes.

None of them runs on the engine's thread or the connector's. The handshake client's thread asks; the
dialer's thread plans and lowers, from immutable values, and makes lanes, each of which registers
the whole cache. The results belong to the connector's thread.
"""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Literal, TypeVar

import msgspec
from vllm.logger import init_logger

from ...errors import one_line, quote
from ...plan.reshard import ReshardPlan, layers_text, plan_reshard
from ...plan.shards import Layer, Shard
from ...protocol.compatibility import check_meanings
from ...protocol.description import WorkerDescription
from ...protocol.messages import RemoteEngineAddress
from ...transport.agent import NixlAgent
from ...transport.arena import StagingArea
from ...transport.handshake_client import DEFAULT_TIMEOUT_S
from ...transport.lane import Lane
from ...transport.remote import LocalCache, LoweredEngine, lower_engine
from ..caches.drafts import without_missing_drafts
from ..stalls import StallWatch

MOST_PLANS = 8
"""Number of cached plans: more than the layouts that one worker reads from. A plan of 128 ranks
with 128 takes 1 MB."""


@dataclass(frozen=True, slots=True)
class Planned:
    """What is read from engines of one layout.

    Attributes:
        missing: Draft layers that are not read because the other engine does not have them.
        plan: The plan.
    """

    missing: tuple[Layer, ...]
    plan: ReshardPlan


class Planner:
    """Plans for one worker's engine. Belongs to the thread that opens connections.

    Replicas of an engine differ only in their addresses, which planning does not read. So two
    hundred replicas need one plan.

    Args:
        shards: Shards of all of this engine's workers.
        replica_offset: Offset that spreads replicas of this engine over holders of the same heads.
        missing_drafts: What to do about draft layers that the other engine does not have.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        replica_offset: int,
        missing_drafts: Literal["refuse", "compute"],
    ) -> None:
        self._shards, self._replica_offset = shards, replica_offset
        self._missing_drafts = missing_drafts
        # By the digest of the other engine's layout; most recently used last.
        self._planned: OrderedDict[bytes, Planned] = OrderedDict()

    def plan(self, src: Sequence[Shard]) -> Planned:
        """Return the plan for reading from an engine, made before for its layout if there is one.

        Args:
            src: Shards of all of its workers.

        Raises:
            ReshardError: Its layout does not fit ours.
        """
        key = layout_digest(src)
        if key not in self._planned:
            self._planned[key] = self._plan(src)
            if len(self._planned) > MOST_PLANS:
                self._planned.popitem(last=False)
        self._planned.move_to_end(key)
        return self._planned[key]

    def _plan(self, src: Sequence[Shard]) -> Planned:
        needed, missing = without_missing_drafts(src, self._shards, self._missing_drafts)
        return Planned(missing, plan_reshard(src, needed, replica_offset=self._replica_offset))


def layout_digest(shards: Sequence[Shard]) -> bytes:
    """Return a digest of all that planning reads of an engine: its ranks and what each holds.

    The order of the shards does not matter; the order of a rank's layers does.
    """
    in_order = sorted(shards, key=lambda shard: shard.rank)
    # Encodes every attribute, without a call of Python for each layer.
    encoded = msgspec.msgpack.encode([(each.rank, [*each.holdings.items()]) for each in in_order])
    return sha256(encoded).digest()


logger = init_logger(__name__)

_Made = TypeVar("_Made")

Answer = tuple[WorkerDescription, ...]
Ask = Callable[[RemoteEngineAddress], Future[Answer]]
"""Asks an engine for its workers; does not block."""


@dataclass(frozen=True, slots=True)
class LocalEndpoint:
    """The local side of every connection of a worker.

    Attributes:
        cache: The worker and its cache.
        shards: The shard of every worker of its engine.
        regions: Address, bytes and device id of each memory region of the cache.
        area: Staging area for staged reads; None if all reads are direct.
        replica_offset: Offset that spreads replicas of an engine over holders of the same heads.
        missing_drafts: What to do if the other engine lacks a draft's layers.
    """

    cache: LocalCache
    shards: tuple[Shard, ...]
    regions: Sequence[tuple[int, int, int]]
    area: StagingArea | None
    replica_offset: int
    missing_drafts: Literal["refuse", "compute"] = "refuse"


class Dialer:
    """Asks engines, plans and lowers for one worker, and makes its lanes.

    Args:
        make_agent: Makes an agent to read with, from its name, with nothing registered.
        clock: Monotonic clock, in seconds.
        prepare: Called on the dialer's thread before each task until it succeeds once; None for
            nothing.
        thread: Executor to use as the dialer's thread; None to start one.

    Attributes:
        call: Watch on its thread's current task, which may take as long as a whole handshake. If
            NIXL blocks, nothing can end it; the requests that wait for it reach their deadlines.
    """

    def __init__(
        self,
        make_agent: Callable[[str], NixlAgent],
        clock: Callable[[], float] = time.monotonic,
        prepare: Callable[[], None] | None = None,
        thread: Executor | None = None,
    ) -> None:
        self.call = StallWatch("dialer's thread", DEFAULT_TIMEOUT_S)
        self._make_agent = make_agent
        self._clock = clock
        # Belongs to the thread. Not the pool's initializer: one failure would break the pool.
        self._prepare = prepare
        self._thread = thread or ThreadPoolExecutor(1, thread_name_prefix="reshard-dialer")
        self._local: LocalEndpoint | None = None
        self._planner: Planner | None = None
        self._ask: Ask | None = None

    def begin(self, local: LocalEndpoint, ask: Ask) -> None:
        """Set the local endpoint and how to ask, once the caches are registered."""
        self._local, self._ask = local, ask
        self._planner = Planner(local.shards, local.replica_offset, local.missing_drafts)

    def dial(self, address: RemoteEngineAddress) -> Future[LoweredEngine]:
        """Ask an engine, and plan and lower the reads from it; does not block.

        The future raises the errors of a `HandshakeClient`, and `ReshardError` if the engine's
        layout does not fit ours.
        """
        assert self._ask is not None
        lowered: Future[LoweredEngine] = Future()
        self._ask(address).add_done_callback(partial(self._answered, address, lowered))
        return lowered

    def make_lane(self) -> Future[Lane]:
        """Make a lane; does not block."""
        return self._thread.submit(self._timed, self._make_lane)

    def close(self) -> None:
        """Start no more tasks."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _answered(
        self,
        address: RemoteEngineAddress,
        lowered: Future[LoweredEngine],
        asked: Future[Answer],
    ) -> None:
        """Queue the answer for lowering. Called on the thread that asks."""
        if not lowered.set_running_or_notify_cancel():
            return
        try:
            self._thread.submit(self._finish, address, asked.result(), lowered)
        except BaseException as error:
            # Asking has failed, or the dialer is closed.
            lowered.set_exception(error)

    def _finish(
        self,
        address: RemoteEngineAddress,
        descriptions: Answer,
        lowered: Future[LoweredEngine],
    ) -> None:
        try:
            lowered.set_result(self._timed(self._lower, address, descriptions))
        except BaseException as error:
            lowered.set_exception(error)

    def _timed(self, make: Callable[..., _Made], *arguments: object) -> _Made:
        """Run a task; the connector's thread reports it if it takes too long."""
        self.call.begin(self._clock())
        try:
            if self._prepare is not None:
                self._prepare()
                self._prepare = None
            return make(*arguments)
        finally:
            self.call.end()

    def _lower(self, address: RemoteEngineAddress, descriptions: Answer) -> LoweredEngine:
        local, planner = self._local, self._planner
        assert local is not None and planner is not None
        check_meanings((each.cache for each in descriptions), local.cache.cache)
        planned = planner.plan([description.shard for description in descriptions])
        if planned.missing:
            logger.warning(
                "Drafts start cold: engine %s does not have their layers (%s).",
                quote(address.engine_id),
                one_line(layers_text(planned.missing)),
            )
        by_rank = {description.shard.rank: description for description in descriptions}
        return lower_engine(by_rank, planned.plan, local.cache, local.area)

    def _make_lane(self) -> Lane:
        """Make a lane, and register all memory that reads write into."""
        local = self._local
        assert local is not None
        agent = self._make_agent(f"lane/{uuid.uuid4()}")
        try:
            agent.register(local.regions)
            if local.area is not None:
                agent.register([local.area.region])
            return Lane(agent)
        except BaseException:
            agent.close()
            raise

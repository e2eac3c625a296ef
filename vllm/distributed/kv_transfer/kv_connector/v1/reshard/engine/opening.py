# SPDX-License-Identifier: Apache-2.0
"""Opening a generation: ask an engine what it is, plan, and prepare everything with an agent.

None of this takes the engine's thread or the connector's. Threads of an executor do it: they are
given values that never change, and hand over a generation that nobody else has seen.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from vllm.logger import init_logger

from ..errors import RemoteLayoutError
from ..memory.summary import describe_reads
from ..plan.reshard import plan_reshard
from ..plan.shards import Shard
from ..plan.verify import verify_plan
from ..protocol.messages import RemoteEngineAddress
from ..protocol.metadata import WorkerDescription
from ..transport.agent import NixlAgent
from ..transport.generation import Generation
from ..transport.remote import Reader, RemoteEngine
from ..transport.staging_area import StagingArea

logger = init_logger(__name__)

_THREADS = 32
"""As many engines may leave us waiting before they hold up others' handshakes."""

Fetch = Callable[[RemoteEngineAddress], tuple[WorkerDescription, ...]]


@dataclass(frozen=True, slots=True)
class Local:
    """What a worker brings to every connection.

    Attributes:
        reader: The worker and its cache.
        shards: What every worker of its engine holds.
        regions: The cache's memory, as an agent registers it.
        area: Where staged reads stop over; None where all go direct.
        spread: Spreads replicas of an engine over holders of the same heads.
    """

    reader: Reader
    shards: tuple[Shard, ...]
    regions: Sequence[tuple[int, int, int]]
    area: StagingArea | None
    spread: int


class Opener:
    """Opens generations for one worker.

    Args:
        make_agent: Makes an agent that reads, with nothing registered.
        fetch: Asks an engine for its workers.
        hung_grace_s: As in `Lifetime`.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        make_agent: Callable[[str], NixlAgent],
        fetch: Fetch,
        hung_grace_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make_agent = make_agent
        self._fetch = fetch
        self._hung_grace_s = hung_grace_s
        self._clock = clock
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="reshard-handshake")
        self._local: Local | None = None

    def read_into(self, local: Local) -> None:
        """What to connect, known once the caches are registered."""
        self._local = local

    def open(self, address: RemoteEngineAddress) -> Future[Generation]:
        """Shake hands with an engine and prepare all lists; blocks on nothing.

        The future raises `ReshardError` where its layout does not fit ours, and `TransferError`
        where NIXL does not accept it.
        """
        return self._threads.submit(self._open, address)

    def close(self) -> None:
        """Open nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _open(self, address: RemoteEngineAddress) -> Generation:
        began_s = time.monotonic()
        descriptions = self._fetch(address)
        local = self._local
        assert local is not None
        shards = [description.shard for description in descriptions]
        plan = plan_reshard(shards, local.shards, spread=local.spread)
        # It costs many times what planning does: it is for who looks for a defect of ours.
        if logger.isEnabledFor(logging.DEBUG) and (
            faults := verify_plan(shards, local.shards, plan)
        ):
            raise RemoteLayoutError(
                f"no plan fits what engine {address.engine_id} says of itself ({faults[0]}): run "
                "the same build of the connector on both engines"
            )
        agent = self._make_agent(f"reader/{uuid.uuid4()}")
        try:
            agent.register(local.regions)
            if local.area is not None:
                agent.register([local.area.region])
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

# SPDX-License-Identifier: Apache-2.0
"""What is read from another engine: the legs of each of its ranks.

The dialer's thread lowers the plan to legs; the connector's thread prepares them for NIXL when it
connects (`connection`).
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from vllm.logger import init_logger

from ..errors import LocalLayoutError
from ..memory.cache import RankCache
from ..memory.leg import Leg
from ..memory.lowering import lower_read
from ..memory.packing import PackedCache, PackedLeg
from ..memory.staging import MAX_WINDOW_BYTES, StagedLeg, stage_leg
from ..plan.reshard import ReshardPlan, describe_reads
from ..plan.shards import MeshRank
from ..protocol.description import WorkerDescription
from ..protocol.request_blocks import check_windows
from .agent import Prepared
from .arena import StagingArea
from .packed_windows import PackedWindows

logger = init_logger(__name__)


@dataclass(frozen=True, slots=True)
class LocalCache:
    """The reading worker.

    Attributes:
        rank: Its rank.
        cache: Its KV cache.
        window_groups: KV-cache groups that keep only the last tokens of a sequence.
    """

    rank: MeshRank
    cache: RankCache
    window_groups: Set[int]


@dataclass(frozen=True, slots=True)
class PreparedStaging:
    """A staged leg with its descriptor lists.

    Attributes:
        leg: The leg.
        arena: List for our arena.
        remote: List for the peer's memory.
    """

    leg: StagedLeg
    arena: Prepared
    remote: Prepared


@dataclass(frozen=True, slots=True)
class PreparedPacking:
    """A packed leg, and the windows of the worker that packs it."""

    leg: PackedLeg
    windows: PackedWindows


@dataclass(frozen=True, slots=True)
class PreparedLeg:
    """A leg with its descriptor lists.

    Attributes:
        leg: The leg.
        local: List for our memory.
        remote: List for the peer's memory.
        staging: The same for reads through the arena; None if all its reads go direct.
        packing: What to ask the peer's worker for; None unless it packs.
    """

    leg: Leg
    local: Prepared
    remote: Prepared
    staging: PreparedStaging | None = None
    packing: PreparedPacking | None = None


@dataclass(frozen=True, slots=True)
class LoweredLeg:
    """A leg, and its staged and packed forms; None where it is not read so."""

    leg: Leg
    staged: StagedLeg | None
    packed: PackedLeg | None


@dataclass(frozen=True, slots=True)
class _LoweredWorker:
    """A worker's legs, and how many readers notify it; 0 if this worker does not."""

    description: WorkerDescription
    legs: list[LoweredLeg]
    num_notifiers: int


@dataclass(frozen=True, slots=True)
class LoweredEngine:
    """A worker's reads from another engine, lowered to legs that NIXL has not prepared yet.

    Attributes:
        num_ranks: Number of the engine's workers.
        rank: This worker's rank.
        summary: Description of the reads, for the log.
        workers: The engine's workers that this one reads from or notifies.
        area: Arena for staged reads; None if all reads go direct.
    """

    num_ranks: int
    rank: MeshRank
    summary: str
    workers: list[_LoweredWorker]
    area: StagingArea | None


def lower_engine(
    descriptions: Mapping[MeshRank, WorkerDescription],
    plan: ReshardPlan,
    local: LocalCache,
    area: StagingArea | None = None,
) -> LoweredEngine:
    """Lower this worker's reads from an engine to legs. Touches no agent.

    Args:
        descriptions: Descriptions of the engine's workers.
        plan: The plan between that engine and ours.
        local: This worker.
        area: Arena for staged reads; None if all reads go direct.

    Raises:
        RemoteLayoutError: The caches at the two ends do not fit.
    """
    legs: dict[MeshRank, list[LoweredLeg]] = {}
    for read in plan.reads_of(local.rank):
        description = descriptions[read.src_rank]
        src = description.cache
        packs = PackedCache(src) if description.packing.arena_bytes else None
        lowered = legs.setdefault(read.src_rank, [])
        for leg in lower_read(read, src, local.cache):
            check_windows(leg, local.window_groups)
            staged = _stage(leg, src, area)
            packed = None
            if packs is not None and staged is not None and staged.slice_bytes <= MAX_WINDOW_BYTES:
                packed = packs.lower(staged)
            lowered.append(LoweredLeg(leg, staged, packed))
    notifiers = {each.src_rank: len(each.notifiers) for each in plan.notified_by(local.rank)}
    return LoweredEngine(
        len(descriptions),
        local.rank,
        describe_reads(plan, local.rank),
        [
            _LoweredWorker(descriptions[rank], legs.get(rank, []), notifiers.get(rank, 0))
            for rank in dict.fromkeys((*legs, *notifiers))
        ],
        area,
    )


def _stage(leg: Leg, src: RankCache, area: StagingArea | None) -> StagedLeg | None:
    if area is None:
        return None
    try:
        staged = stage_leg(leg, src)
        # Raises if the arena is too large, here, where the leg can still be read direct.
        area.rows(staged.descriptor_bytes)
    except LocalLayoutError as error:
        logger.warning("Reads of a leg go direct, and are not staged: %s", error)
        return None
    return staged if staged.slice_bytes <= area.memory.nbytes else None

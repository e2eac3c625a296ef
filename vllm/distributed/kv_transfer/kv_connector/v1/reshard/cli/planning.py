# SPDX-License-Identifier: Apache-2.0
"""The plan between two engines, and what it costs each rank.

Checks, legs and the selection of a request's blocks are those of the engines. This module has no
rules of its own of what is read; it adds up.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..errors import LocalLayoutError
from ..memory.cache import RankCache
from ..memory.leg import Leg
from ..memory.lowering import lower_read
from ..memory.packing import MAX_PACKED_BLOCKS
from ..memory.staging import MAX_WINDOW_BYTES, StagingPolicy, Strategy, stage_leg
from ..plan.reshard import Read, ReshardPlan, plan_reshard
from ..plan.shards import Layer, MeshRank
from ..protocol.compatibility import check_meanings
from ..protocol.messages import Receive, RemoteEngineAddress
from ..protocol.request_blocks import RequestBlocks, check_windows
from .engines import Engine


@dataclass(frozen=True, slots=True)
class Part:
    """What one read moves of one kind of cache, for a request with adjoining blocks at both ends.

    Attributes:
        read: The read, of these layers alone.
        kind: The kind of cache.
        layers: Indices of the layers.
        has_state: True if it is recurrent state, whose size does not depend on the request's.
        num_bytes: Bytes, in whole blocks.
        descriptors: Number of descriptors.
        descriptor_bytes: Size of the smallest.
        merged: Number of descriptors after merging those that adjoin at both ends.
        staged: The same for a read by way of an arena, where adjoining at the source is enough; if
            it is packed, the number of windows.
        strategies: How its legs are read, by the defaults of `StagingPolicy`.
    """

    read: Read
    kind: str
    layers: tuple[int, ...]
    has_state: bool
    num_bytes: int
    descriptors: int
    descriptor_bytes: int
    merged: int
    staged: int
    strategies: frozenset[Strategy]

    @property
    def how(self) -> str:
        """How it is read, in a word."""
        return "/".join(sorted(each.value for each in self.strategies))


@dataclass(frozen=True, slots=True)
class CacheRow:
    """A kind of cache of some layers, alike in all that is told of it.

    Attributes:
        kind: Its name: that of the layers, without what all have in common.
        layers: Indices of the layers.
        units: Heads, groups or channels of a layer.
        kept_as: "state", "slots", "whole blocks" and so on, with the type of its numbers.
        block_tokens: Tokens in a block of each engine; None for state.
        kept: Which tokens are kept.
        unit_bytes: Bytes of one unit, for a token or, for state, a request.
    """

    kind: str
    layers: tuple[int, ...]
    units: int
    kept_as: str
    block_tokens: tuple[int, int] | None
    kept: str
    unit_bytes: float


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and its costs for a request.

    Attributes:
        plan: The plan.
        parts: What is read, in the order of the plan's reads.
        rows: The kinds of cache.
        num_tokens: Length of the request's prompt.
    """

    plan: ReshardPlan
    parts: tuple[Part, ...]
    rows: tuple[CacheRow, ...]
    num_tokens: int

    @property
    def totals(self) -> tuple[int, int, int]:
        """Bytes of the request at all decode ranks, those of state, and its descriptors."""
        return (
            sum(part.num_bytes for part in self.parts),
            sum(part.num_bytes for part in self.parts if part.has_state),
            sum(part.descriptors for part in self.parts),
        )

    def of(self, rank: MeshRank) -> list[Part]:
        """Return what a decode rank reads."""
        return [part for part in self.parts if part.read.dst_rank == rank]

    def readers_of(self, rank: MeshRank) -> dict[MeshRank, int]:
        """Return who reads from a prefill rank, and how many bytes."""
        found: Counter[MeshRank] = Counter()
        for part in self.parts:
            if part.read.src_rank == rank:
                found[part.read.dst_rank] += part.num_bytes
        return dict(found)


def plan_engines(prefill: Engine, decode: Engine, num_tokens: int) -> Planned:
    """Plan what is read, and measure it.

    Args:
        prefill: The engine that is read from.
        decode: The engine that reads.
        num_tokens: Length of the request's prompt.

    Raises:
        ReshardError: An engine would refuse the other.
    """
    src, dst = prefill.caches_for(num_tokens), decode.caches_for(num_tokens)
    for cache in decode.caches[:: decode.layout.mesh.tp_size]:
        check_meanings(prefill.caches, cache)
    plan = plan_reshard(prefill.shards, decode.shards)
    source = RemoteEngineAddress("prefill", "", 0)
    blocks = decode.block_ids(num_tokens), prefill.block_ids(num_tokens)
    request = RequestBlocks(Receive(source, "the request", *blocks, num_tokens, num_tokens))
    windows = {
        number
        for number, each in enumerate(decode.groups)
        if each.window_tokens or each.chunk_tokens
    }
    kinds = _kinds([layer for shard in decode.shards for layer in shard.holdings])
    # Ranks of a stage differ in what they hold only, so that most reads cost what another does.
    measured: dict[object, list[Part]] = {}
    parts: list[Part] = []
    for read in plan.reads:
        ends = read.src_rank.pp_rank, read.dst_rank.pp_rank, read.src_tokens, read.dst_tokens
        alike = (*ends, read.layers, read.num_units, read.src_unit_offset, read.dst_unit_offset)
        if alike not in measured:
            caches = src[read.src_rank], dst[read.dst_rank]
            measured[alike] = [*_measure(read, *caches, request, windows, kinds)]
        for part in measured[alike]:
            parts.append(replace(part, read=replace(read, layers=part.read.layers)))
    rows = _rows(plan, src, dst, (prefill, decode), kinds)
    return Planned(plan, tuple(parts), rows, num_tokens)


def _kinds(layers: Sequence[Layer]) -> dict[Layer, tuple[str, int]]:
    """Return the kind and the index of each layer: its name without and with its first number."""
    found: dict[Layer, tuple[list[str], int]] = {}
    for layer in layers:
        name = re.split(r"(?:^|\.)(\d+)(?:\.|$)", str(layer), maxsplit=1)
        rest = [each for each in (name[0], name[-1] if len(name) > 1 else "") if each]
        found[layer] = rest, int(name[1]) if len(name) > 1 else 0
    first = {tuple(rest[:-1]) for rest, _ in found.values()}
    common = len(first) == 1
    return {
        layer: (".".join(rest[-1:] if common else rest), index)
        for layer, (rest, index) in found.items()
    }


def _measure(
    read: Read,
    src: RankCache,
    dst: RankCache,
    request: RequestBlocks,
    windows: set[int],
    kinds: dict[Layer, tuple[str, int]],
) -> Iterator[Part]:
    """Yield what a read moves of each kind of cache."""
    by_kind: dict[str, list[Layer]] = {}
    for layer in read.layers:
        by_kind.setdefault(kinds[layer][0], []).append(layer)
    for kind, layers in by_kind.items():
        of_kind = replace(read, layers=tuple(layers))
        legs = lower_read(of_kind, src, dst)
        counted = [0, 0, 0, 0]
        strategies = set()
        for leg in legs:
            counts, strategy = _cost(leg, src, request, windows)
            counted = [total + count for total, count in zip(counted, counts, strict=True)]
            strategies.add(strategy)
        num_bytes, count, merged, staged = counted
        smallest = min(int(leg.src.rows[0, 1]) for leg in legs)
        indices = tuple(sorted(kinds[layer][1] for layer in layers))
        costs = num_bytes, count, smallest, merged, staged, frozenset(strategies)
        yield Part(of_kind, kind, indices, legs[0].per_sequence, *costs)


def _cost(
    leg: Leg, src: RankCache, request: RequestBlocks, windows: set[int]
) -> tuple[tuple[int, int, int, int], Strategy]:
    """Return a leg's bytes, descriptors, merged and staged ones, and its strategy."""
    check_windows(leg, windows)
    selected = request.select(leg)
    count, merged = leg.num_descriptors(selected), leg.num_merged(selected)
    num_bytes = count * int(leg.src.rows[0, 1])
    try:
        staged = stage_leg(leg, src)
    except LocalLayoutError:
        return (num_bytes, count, merged, merged), Strategy.DIRECT
    if not count:
        return (num_bytes, count, merged, staged.num_merged(selected)), Strategy.DIRECT
    how = staged.choose(selected, StagingPolicy(), may_pack=True)
    if how is Strategy.PACKED:
        packed = list(staged.windows(selected, MAX_WINDOW_BYTES, MAX_PACKED_BLOCKS))
        return (num_bytes, count, merged, len(packed)), how
    return (num_bytes, count, merged, staged.num_merged(selected)), how


def _rows(
    plan: ReshardPlan,
    src: dict[MeshRank, RankCache],
    dst: dict[MeshRank, RankCache],
    engines: tuple[Engine, Engine],
    kinds: dict[Layer, tuple[str, int]],
) -> tuple[CacheRow, ...]:
    """Return the kinds of cache, in the order of layers."""
    units: dict[Layer, int] = {}
    ranks: dict[Layer, tuple[MeshRank, MeshRank]] = {}
    for read in plan.reads:
        for layer in read.layers:
            units[layer] = max(units.get(layer, 0), read.units.stop)
            ranks[layer] = read.src_rank, read.dst_rank
    alike: dict[CacheRow, list[int]] = {}
    for layer, (src_rank, dst_rank) in ranks.items():
        ends = src[src_rank].layers[layer], dst[dst_rank].layers[layer]
        planes, group = ends[1].planes, engines[1].groups[ends[1].group]
        kept_as = ends[1].meaning.get("arrangement", "slots")
        numbers = ends[1].meaning.get("numbers of the state", ends[1].meaning.get("numbers", ""))
        unit_bytes = sum(
            each.slot_bytes * each.heads_per_unit / each.slot_tokens for each in planes
        )
        if planes[0].per_sequence:
            kept_as, unit_bytes = "state", unit_bytes * planes[0].block_tokens
        window = f"last {group.window_tokens}" if group.window_tokens else "all"
        row = CacheRow(
            kinds[layer][0],
            (),
            units[layer],
            f"{kept_as}, {numbers}" if numbers else kept_as,
            None if group.has_state else (ends[0].planes[0].block_tokens, planes[0].block_tokens),
            "-"
            if group.has_state
            else f"chunk of {group.chunk_tokens}" * bool(group.chunk_tokens) or window,
            unit_bytes,
        )
        alike.setdefault(row, []).append(kinds[layer][1])
    return tuple(
        replace(row, layers=tuple(sorted(layers)))
        for row, layers in sorted(alike.items(), key=lambda item: item[1][0])
    )

# SPDX-License-Identifier: Apache-2.0
"""The cost of a plan for each rank.

The figures come from the same legs that engines would prepare, here for synthetic caches without
memory. This module has no counting rules of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..memory.cache import LayerCache, Plane, RankCache
from ..memory.leg import Leg
from ..memory.lowering import lower_read
from ..memory.overlap import BlockSpan
from ..memory.staging import StagedLeg, stage_leg
from ..memory.strategy import StagingPolicy, Strategy
from ..plan.mesh import MeshRank
from ..plan.reshard import Read, ReshardPlan
from ..plan.shards import Layer, Shard, TokenShare
from ..plan.text import only_notified_by
from .caches import Cache

DESCRIPTOR_TOKENS = 1024
"""Length of the prompt for which descriptors are counted."""


_MOST_STRETCHES = 1 << 16
"""Maximum number of stretches of tokens to compare for the overlap of two shares."""


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """The sizes of both engines' caches; in a page, heads come before tokens (HND).

    Attributes:
        slot_bytes: Size of one head of one token in one plane, unless `slot_bytes_by_layer` has it.
        num_planes: Number of planes of a layer with heads or a latent.
        src_block_tokens: Tokens in a block of the source.
        dst_block_tokens: Tokens in a block of the destination.
        window_tokens_by_layer: Number of last tokens of a sequence that a layer keeps; layers
            without an entry keep all.
        slot_bytes_by_layer: Slot sizes of layers that differ from `slot_bytes`.
        caches: Layers with another kind of cache than heads or a latent.
    """

    slot_bytes: int
    num_planes: int
    src_block_tokens: int
    dst_block_tokens: int
    window_tokens_by_layer: Mapping[Layer, int] = field(default_factory=dict)
    slot_bytes_by_layer: Mapping[Layer, int] = field(default_factory=dict)
    caches: Mapping[Layer, Cache] = field(default_factory=dict)

    def token_bytes_of(self, layer: Layer) -> float:
        """Return the bytes of one unit of one token, over all planes of a layer."""
        own = self.caches.get(layer)
        if own is not None:
            return own.state_bytes / own.state_tokens
        return self.num_planes * self.slot_bytes_by_layer.get(layer, self.slot_bytes)

    def planes_of(self, layer: Layer, num_units: int, block_tokens: int) -> tuple[Plane, ...]:
        """Return the planes of a layer on a rank, in memory that begins at 0.

        Args:
            layer: The layer.
            num_units: Number of units (heads) that the rank holds; 1 for a latent.
            block_tokens: Tokens in a block of the engine, unless the layer's kind sets it.
        """
        own = self.caches.get(layer)
        slot_bytes, slot_tokens = self.slot_bytes_by_layer.get(layer, self.slot_bytes), 1
        if own is not None:
            block_tokens = own.block_tokens or block_tokens
            slot_tokens = block_tokens if own.is_whole else own.state_tokens
            slot_bytes = own.state_bytes * slot_tokens // own.state_tokens
        page_bytes = block_tokens // slot_tokens * slot_bytes
        plane = Plane(
            address=0,
            block_stride_bytes=num_units * page_bytes,
            head_stride_bytes=page_bytes,
            slot_stride_bytes=slot_bytes,
            slot_bytes=slot_bytes,
            num_heads=num_units,
            block_tokens=block_tokens,
            slot_tokens=slot_tokens,
        )
        return (plane,) * (self.num_planes if own is None else 1)


@dataclass(frozen=True, slots=True)
class ReadFigures:
    """The cost of one read, for requests with adjoining blocks at both ends.

    Attributes:
        read: The read.
        portion: Fraction of all tokens that it moves; 1 unless ranks divide tokens between them.
        token_bytes: Average bytes per token, over all of the read's layers.
        request_bytes: Bytes read for a prompt, in whole blocks.
        descriptors: Number of descriptors for a prompt of `DESCRIPTOR_TOKENS` tokens.
        descriptor_bytes: Size of the smallest descriptor, which is contiguous at both ends.
        merged_descriptors: `descriptors` after merging those that adjoin at both ends.
        staged_descriptors: The same for a read through an arena, where adjoining at the source is
            enough.
        strategy: Strategy for the prompt, by the defaults of `StagingPolicy`.
    """

    read: Read
    portion: float
    token_bytes: float
    request_bytes: int
    descriptors: int
    descriptor_bytes: int
    merged_descriptors: int
    staged_descriptors: int
    strategy: Strategy


@dataclass(frozen=True, slots=True)
class ReaderFigures:
    """The reads and notifications of one destination rank.

    Attributes:
        rank: The rank.
        reads: Its reads.
        only_notifies: Source ranks that it notifies without reading from them.
    """

    rank: MeshRank
    reads: tuple[ReadFigures, ...]
    only_notifies: tuple[MeshRank, ...]

    @property
    def fan_in(self) -> int:
        """Number of source ranks that it reads from."""
        return len({figures.read.src_rank for figures in self.reads})

    @property
    def token_bytes(self) -> float:
        """Average bytes per token."""
        return sum(figures.token_bytes for figures in self.reads)

    @property
    def request_bytes(self) -> int:
        """Bytes read for a prompt."""
        return sum(figures.request_bytes for figures in self.reads)

    @property
    def descriptors(self) -> int:
        """Number of descriptors for a prompt of `DESCRIPTOR_TOKENS` tokens."""
        return sum(figures.descriptors for figures in self.reads)


@dataclass(frozen=True, slots=True)
class SourceFigures:
    """The readers and notifiers of one source rank.

    Attributes:
        rank: The rank.
        fan_out: Number of destination ranks that read from it; 0 if it is only notified.
        notifiers: Destination ranks that it waits for before it frees a request's blocks.
        token_bytes: Average bytes per token that all readers together read from it.
    """

    rank: MeshRank
    fan_out: int
    notifiers: tuple[MeshRank, ...]
    token_bytes: float


@dataclass(frozen=True, slots=True)
class PlanFigures:
    """The cost of a plan.

    Attributes:
        readers: One entry per destination rank, in the order of ranks.
        sources: One entry per source rank, in the order of ranks.
    """

    readers: tuple[ReaderFigures, ...]
    sources: tuple[SourceFigures, ...]


def measure_plan(
    plan: ReshardPlan,
    src: Iterable[Shard],
    dst: Iterable[Shard],
    cache_sizes: CacheSizes,
    prompt_tokens: int,
) -> PlanFigures:
    """Measure a plan, per token and for a prompt.

    Args:
        plan: The plan.
        src: The source's shards that it was made from.
        dst: The destination's shards that it was made from.
        cache_sizes: Sizes of the caches of both engines.
        prompt_tokens: Length of the prompt, at least 1.
    """
    src_shards = {shard.rank: shard for shard in src}
    dst_shards = {shard.rank: shard for shard in dst}
    all_figures = [
        _measure_read(
            read, src_shards[read.src_rank], dst_shards[read.dst_rank], cache_sizes, prompt_tokens
        )
        for read in plan.reads
    ]
    return PlanFigures(
        tuple(
            ReaderFigures(
                rank,
                tuple(figures for figures in all_figures if figures.read.dst_rank == rank),
                only_notified_by(plan, rank),
            )
            for rank in sorted(dst_shards)
        ),
        tuple(
            SourceFigures(
                release.src_rank,
                len({read.dst_rank for read in plan.reads if read.src_rank == release.src_rank}),
                release.notifiers,
                sum(
                    figures.token_bytes
                    for figures in all_figures
                    if figures.read.src_rank == release.src_rank
                ),
            )
            for release in plan.releases
        ),
    )


def _measure_read(
    read: Read, src: Shard, dst: Shard, cache_sizes: CacheSizes, prompt_tokens: int
) -> ReadFigures:
    """Lower a read between synthetic caches, and measure its legs."""
    windows = sorted({cache_sizes.window_tokens_by_layer.get(layer, 0) for layer in read.layers})
    block_tokens = cache_sizes.src_block_tokens, cache_sizes.dst_block_tokens
    longest_tokens = max(prompt_tokens, DESCRIPTOR_TOKENS)
    src_cache, dst_cache = (
        _cache(read.layers, shard, cache_sizes, windows, tokens, longest_tokens)
        for shard, tokens in zip((src, dst), block_tokens, strict=True)
    )
    figures = [
        _measure_leg(leg, stage_leg(leg, src_cache), windows, prompt_tokens)
        for leg in lower_read(read, src_cache, dst_cache)
    ]
    portion = _portion(read)
    return ReadFigures(
        read,
        portion,
        portion * read.num_units * sum(map(cache_sizes.token_bytes_of, read.layers)),
        request_bytes=sum(each.request_bytes for each in figures),
        descriptors=sum(each.descriptors for each in figures),
        descriptor_bytes=min(each.descriptor_bytes for each in figures),
        merged_descriptors=sum(each.merged for each in figures),
        staged_descriptors=sum(each.staged for each in figures),
        strategy=(
            Strategy.STAGED
            if any(each.strategy is Strategy.STAGED for each in figures)
            else Strategy.DIRECT
        ),
    )


@dataclass(frozen=True, slots=True)
class _LegFigures:
    """The contribution of one leg to `ReadFigures`."""

    request_bytes: int
    descriptors: int
    descriptor_bytes: int
    merged: int
    staged: int
    strategy: Strategy


def _measure_leg(
    leg: Leg, staged: StagedLeg, windows: Sequence[int], prompt_tokens: int
) -> _LegFigures:
    """Measure a leg; `windows` has one entry per KV-cache group, 0 for no window."""
    descriptor_bytes = int(leg.src.rows[0, 1])
    counted, request = (
        leg.select(
            *(
                [_span(window, tokens, end.block_tokens, share) for window in windows]
                for end, share in (
                    (leg.src, leg.read.src_tokens),
                    (leg.dst, leg.read.dst_tokens),
                )
            )
        )
        for tokens in (DESCRIPTOR_TOKENS, prompt_tokens)
    )
    return _LegFigures(
        len(leg.indices(request)[0]) * descriptor_bytes,
        len(leg.indices(counted)[0]),
        descriptor_bytes,
        leg.num_merged(counted),
        staged.num_merged(counted),
        staged.choose(request, StagingPolicy()),
    )


def _cache(
    layers: Iterable[Layer],
    shard: Shard,
    cache_sizes: CacheSizes,
    windows: Sequence[int],
    block_tokens: int,
    longest_tokens: int,
) -> RankCache:
    """Return a cache of some layers, in memory that begins at 0, with one group per window."""
    planes = {
        layer: cache_sizes.planes_of(layer, len(shard.holdings[layer].units), block_tokens)
        for layer in layers
    }
    return RankCache(
        num_block_ids=max(-(-longest_tokens // each[0].block_tokens) for each in planes.values()),
        device_id=0,
        layers={
            layer: LayerCache(each, windows.index(cache_sizes.window_tokens_by_layer.get(layer, 0)))
            for layer, each in planes.items()
        },
    )


def _portion(read: Read) -> float:
    """Return the fraction of all tokens that both ranks of a read hold."""
    shares = [each for each in (read.src_tokens, read.dst_tokens) if not each.is_all]
    if not shares:
        return 1
    stretch = math.gcd(*(each.run_tokens for each in shares))
    period = math.lcm(*(each.period_tokens for each in shares)) // stretch
    # If the common period is too long, its beginning is a sample of it.
    stretches = np.arange(min(period, _MOST_STRETCHES)) * stretch
    held = [stretches // each.run_tokens % each.num_shares == each.index for each in shares]
    return float(np.logical_and.reduce(held).mean())


def _span(window_tokens: int, num_tokens: int, block_tokens: int, share: TokenShare) -> BlockSpan:
    """Return the blocks that a prompt's last token attends to: all of them for a window of 0."""
    first_token = max(0, num_tokens - window_tokens) if window_tokens else 0
    together = block_tokens * share.num_shares
    first_block = first_token // together
    block_ids = np.arange(first_block, -(-num_tokens // together), dtype=np.int64)
    return BlockSpan(block_ids, first_block * block_tokens, share)

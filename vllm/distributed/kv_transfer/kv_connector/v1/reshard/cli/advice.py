# SPDX-License-Identifier: Apache-2.0
"""Advice on a pair of layouts: one sentence per inefficiency, with its remedy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ..memory.strategy import Strategy
from ..plan.shards import Shard
from ..plan.text import ranks_text
from .figures import CacheSizes, PlanFigures, SourceFigures

SMALL_DESCRIPTOR_BYTES = 4096
"""Descriptors below this size cost more to post than to transfer."""

_UNEVEN = 1.5
"""A rank is reported if it serves more than this many times the mean of its stage."""


def bytes_text(num_bytes: float) -> str:
    """Return a size as readable text, such as 320 KiB."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"


def advise(
    figures: PlanFigures,
    src: Sequence[Shard],
    dst: Sequence[Shard],
    cache_sizes: CacheSizes | None,
    *,
    is_mla: bool,
) -> Iterator[str]:
    """Yield a sentence for each inefficiency of the plan and its layouts.

    Args:
        figures: The plan's costs.
        src: The shards of the prefill engine.
        dst: The shards of the decode engine.
        cache_sizes: Sizes of the caches; None if sizes in bytes are not known.
        is_mla: True if the model keeps one latent instead of heads.
    """
    if cache_sizes is not None:
        yield from _small_descriptors(figures, cache_sizes)
    yield from _uneven_sources(figures)
    what = "the latent of MLA" if is_mla else "every KV head"
    if (replicas := _replicas(src)) > 1:
        idle = [source.rank for source in figures.sources if not source.fan_out]
        only = f"; {len(idle)} of its {len(src)} ranks are only notified" if idle else ""
        yield (
            f"prefill keeps {what} on {replicas} ranks of a stage{only}: divide its "
            f"--tensor-parallel-size by {replicas}, and use --pipeline-parallel-size instead"
        )
    if (replicas := _replicas(dst)) > 1:
        yield (
            f"decode keeps, and reads, {what} {replicas} times: divide its "
            f"--tensor-parallel-size by {replicas}, and use --data-parallel-size instead"
        )


def _small_descriptors(figures: PlanFigures, cache_sizes: CacheSizes) -> Iterator[str]:
    """Report reads with small descriptors."""
    reads = [read for reader in figures.readers for read in reader.reads]
    sizes = [read.descriptor_bytes for read in reads]
    small = [size for size in sizes if size < SMALL_DESCRIPTOR_BYTES]
    if not small:
        return
    shares = {each for read in reads for each in (read.read.src_tokens, read.read.dst_tokens)}
    src_tokens, dst_tokens = cache_sizes.src_block_tokens, cache_sizes.dst_block_tokens
    most_tokens = max(src_tokens, dst_tokens)
    are_cut = any(not each.is_all and each.run_tokens < most_tokens for each in shares)
    num_staged = sum(
        read.descriptor_bytes < SMALL_DESCRIPTOR_BYTES and read.strategy is Strategy.STAGED
        for reader in figures.readers
        for read in reader.reads
    )
    staged = (
        f"; `auto` stages {num_staged} of them, which merges what adjoins at the source, but "
        "direct reads move each piece by itself"
        if num_staged
        else ""
    )
    if are_cut:
        remedy = (
            "have tokens dealt out in whole blocks, with one --cp-kv-cache-interleave-size and "
            f"--block-size, such as {most_tokens}, on all engines that share them out"
        )
    elif src_tokens != dst_tokens:
        remedy = (
            f"give both engines the same --block-size, not {src_tokens} and {dst_tokens}, so that "
            "whole pages can be read"
        )
    else:
        block_tokens = src_tokens
        while min(small) * (block_tokens // src_tokens) < SMALL_DESCRIPTOR_BYTES:
            block_tokens *= 2
        remedy = f"give both engines --block-size {block_tokens}"
    yield (
        f"{len(small)} of {len(sizes)} reads move as little as {bytes_text(min(small))} at a time, "
        f"less than {bytes_text(SMALL_DESCRIPTOR_BYTES)}: {remedy}{staged}"
    )


def _uneven_sources(figures: PlanFigures) -> Iterator[str]:
    """Report ranks that serve more than their share of a stage."""
    stages: dict[int, list[SourceFigures]] = {}
    for source in figures.sources:
        stages.setdefault(source.rank.pp_rank, []).append(source)
    times = {
        source.rank: source.token_bytes * len(stage) / total
        for stage in stages.values()
        if (total := sum(source.token_bytes for source in stage))
        for source in stage
    }
    if burdened := [rank for rank, share in times.items() if share > _UNEVEN]:
        most = max(times.values())
        yield (
            f"prefill {ranks_text(burdened)} serve{'s' * (len(burdened) == 1)} up to {most:.3g} "
            "times an equal share of the reads from a stage: run more decode ranks or replicas, "
            "which take turns among the prefill ranks that hold the same heads"
        )


def _replicas(shards: Sequence[Shard]) -> int:
    """Return the largest number of ranks that hold the same heads of the same layers."""
    holders = Counter(tuple(shard.holdings.items()) for shard in shards)
    return max(holders.values())

# SPDX-License-Identifier: Apache-2.0
"""Advice on a pair of layouts: one sentence for each inefficiency.

None says to divide a model over fewer ranks: whether its weights would fit is not known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..plan.mesh import MeshRank
from ..plan.text import ranks_text
from .engines import Engine
from .planning import Planned

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


def advise(planned: Planned, prefill: Engine, decode: Engine) -> Iterator[str]:
    """Yield a sentence, without a full stop, for each inefficiency of a plan."""
    yield from _small_descriptors(planned)
    served = {each.src_rank: planned.readers_of(each.src_rank) for each in planned.plan.releases}
    stages: dict[int, int] = {}
    for rank, readers in served.items():
        stages[rank.pp_rank] = stages.get(rank.pp_rank, 0) + sum(readers.values())
    times = {
        rank: sum(readers.values()) * prefill.layout.mesh.tp_size / (stages[rank.pp_rank] or 1)
        for rank, readers in served.items()
    }
    if burdened := [rank for rank, share in times.items() if share > _UNEVEN]:
        yield (
            f"prefill {_some(burdened)} serve{'s' * (len(burdened) == 1)} up to "
            f"{max(times.values()):.3g} times an equal share of the reads from a stage: more "
            "decode ranks or replicas take turns among ranks that hold the same"
        )
    if idle := [rank for rank, readers in served.items() if not readers]:
        yield (
            f"{len(idle)} of {len(served)} prefill ranks hold copies that nobody reads, and are "
            f"only notified: {_some(idle)}"
        )
    holders: dict[object, set[MeshRank]] = {}
    for each in planned.plan.reads:
        held = each.dst_rank.pp_rank, each.layers, each.units, each.dst_tokens
        holders.setdefault(held, set()).add(each.dst_rank)
    if (most := max(map(len, holders.values()))) > 1:
        yield f"decode keeps, and reads, the same {most} times, on as many ranks of a stage"


def _some(ranks: Sequence[MeshRank]) -> str:
    """Name ranks, not all of them if they are many."""
    text = ranks_text(ranks)
    return text if len(text) <= 80 else f"{text[:80].rpartition(',')[0]} and others"


def _small_descriptors(planned: Planned) -> Iterator[str]:
    """Report reads of tokens with small descriptors."""
    parts = [part for part in planned.parts if not part.has_state]
    small = [part for part in parts if part.descriptor_bytes < SMALL_DESCRIPTOR_BYTES]
    if not small:
        return
    least = min(part.descriptor_bytes for part in small)
    shares = {each for part in small for each in (part.read.src_tokens, part.read.dst_tokens)}
    sizes = {row.block_tokens for row in planned.rows if row.block_tokens is not None}
    tokens = max(max(each) for each in sizes)
    if any(not each.is_all and each.run_tokens < tokens for each in shares):
        remedy = "deal tokens out in whole blocks, with one --cp-kv-cache-interleave-size"
    elif any(src != dst for src, dst in sizes):
        remedy = "give both engines the same --block-size, so that whole pages can be read"
    else:
        remedy = "a larger --block-size makes them larger, where the backend takes it"
    staged = sum("staged" in part.how for part in small)
    yield (
        f"{len(small)} of {len(parts)} reads move as little as {bytes_text(least)} at a time, less "
        f"than {bytes_text(SMALL_DESCRIPTOR_BYTES)}: {remedy}"
        + f"; `auto` stages {staged} of them"
        * bool(staged)
    )

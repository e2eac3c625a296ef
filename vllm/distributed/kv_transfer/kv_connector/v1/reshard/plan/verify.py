# SPDX-License-Identifier: Apache-2.0
"""An independent check of a plan, head by head.

It shares no arithmetic with `plan`: every head of every layer is written out as a cell, and the
reads are carried out on cells. It is slower than planning and depends on nothing but the meaning of
a plan, which makes it fit to judge one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from .mesh import MeshRank
from .reshard import Read, ReshardPlan
from .shards import Layer, Shard


def verify_plan(src: Iterable[Shard], dst: Iterable[Shard], plan: ReshardPlan) -> list[str]:
    """Check that a plan fills every destination rank from heads that the source ranks hold.

    Args:
        src: What each source rank holds.
        dst: What each destination rank needs.
        plan: The plan to check.

    Returns:
        One readable line for each fault; none when the plan is right.
    """
    held = {shard.rank: _cells(shard) for shard in src}
    needed = {shard.rank: _cells(shard) for shard in dst}
    return [
        *_check_reads(plan.reads, held, needed),
        *_check_coverage(plan.reads, needed),
        *_check_releases(plan, held, needed),
    ]


def _cells(shard: Shard) -> dict[Layer, list[int]]:
    """The global heads of each layer, in the order in which the shard stores them."""
    return {
        layer: list(range(heads.start, heads.stop)) for layer, heads in shard.heads_by_layer.items()
    }


def _check_reads(
    reads: Iterable[Read],
    held: dict[MeshRank, dict[Layer, list[int]]],
    needed: dict[MeshRank, dict[Layer, list[int]]],
) -> Iterator[str]:
    """Carry out each read on the cells of both ends."""
    for read in reads:
        wanted = list(range(read.heads.start, read.heads.stop))
        for side, cells, rank, offset in (
            ("source", held, read.src_rank, read.src_head_offset),
            ("destination", needed, read.dst_rank, read.dst_head_offset),
        ):
            for layer in read.layers:
                stored = cells.get(rank, {}).get(layer, [])
                at_offset = stored[offset : offset + len(wanted)] if offset >= 0 else []
                if at_offset != wanted:
                    yield (
                        f"read of heads {read.heads} of layer {layer} by {read.dst_rank} from "
                        f"{read.src_rank}: {side} offset {offset} holds heads {at_offset}, "
                        f"not {wanted}"
                    )


def _check_coverage(
    reads: Iterable[Read], needed: dict[MeshRank, dict[Layer, list[int]]]
) -> Iterator[str]:
    """Count how often every needed cell is written."""
    writes = Counter(
        (read.dst_rank, layer, head)
        for read in reads
        for layer in read.layers
        for head in range(read.heads.start, read.heads.stop)
    )
    for rank, cells in needed.items():
        for layer, heads in cells.items():
            for head in heads:
                if (times := writes[rank, layer, head]) != 1:
                    yield f"head {head} of layer {layer} on {rank} is read {times} times, not once"


def _check_releases(
    plan: ReshardPlan, held: Iterable[MeshRank], needed: Iterable[MeshRank]
) -> Iterator[str]:
    """Every source rank hears from its readers, from somebody in any case, and from each once."""
    known = set(needed)
    readers: dict[MeshRank, set[MeshRank]] = {rank: set() for rank in held}
    for read in plan.reads:
        readers.setdefault(read.src_rank, set()).add(read.dst_rank)
    named = Counter(release.src_rank for release in plan.releases)
    for rank in readers:
        if named[rank] != 1:
            yield f"source {rank} has {named[rank]} release entries, not one"
    for release in plan.releases:
        notifiers = set(release.notifiers)
        if release.src_rank not in readers:
            yield f"release of {release.src_rank}, which is no source rank"
        if not notifiers:
            yield f"source {release.src_rank} is released by nobody"
        if len(notifiers) != len(release.notifiers):
            yield f"source {release.src_rank} counts a notifier twice: {_names(release.notifiers)}"
        if strangers := notifiers - known:
            yield f"source {release.src_rank} waits for unknown {_names(strangers)}"
        if forgotten := readers.get(release.src_rank, set()) - notifiers:
            yield f"source {release.src_rank} does not wait for its reader {_names(forgotten)}"


def _names(ranks: Iterable[MeshRank]) -> str:
    return ", ".join(map(str, sorted(ranks)))

# SPDX-License-Identifier: Apache-2.0
"""Plans as text, for the log and `kv-plan`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .mesh import MeshRank
from .reshard import Read, ReshardPlan
from .shards import Layer


def only_notified_by(plan: ReshardPlan, dst_rank: MeshRank) -> tuple[MeshRank, ...]:
    """Return the source ranks that a destination rank notifies without reading from them."""
    read_from = {read.src_rank for read in plan.reads_of(dst_rank)}
    return tuple(
        release.src_rank
        for release in plan.notified_by(dst_rank)
        if release.src_rank not in read_from
    )


def describe_reads(plan: ReshardPlan, dst_rank: MeshRank) -> str:
    """Return one line with a destination rank's reads, and the ranks that it only notifies."""
    reads = "; ".join(
        f"{layers_text(read.layers)}, heads {read.units}{_shared_text(read)} from {read.src_rank}"
        for read in plan.reads_of(dst_rank)
    )
    parts = [f"reads {reads}" if reads else "reads nothing"]
    if notified := only_notified_by(plan, dst_rank):
        parts.append(f"only notifies {ranks_text(notified)}")
    return "; ".join(parts)


def _shared_text(read: Read) -> str:
    """Return the tokens of a read; empty if both ends hold all tokens."""
    if read.src_tokens.is_all and read.dst_tokens.is_all:
        return ""
    return f", tokens {read.src_tokens} into {read.dst_tokens}"


def layers_text(layers: Sequence[Layer]) -> str:
    """Return layers as ranges of indices, or their count if the names do not give distinct indices.

    Names such as `model.layers.3.self_attn.attn` have one index each, and must differ only in it.
    """
    indices = [_index_in(layer) for layer in layers]
    known = sorted(index for index, _ in indices if index is not None)
    if len(set(known)) < len(layers) or len({rest for _, rest in indices}) > 1:
        return f"{len(layers)} layer{'s' * (len(layers) != 1)}"
    return f"layer{'s' * (len(layers) != 1)} {ranges_text(known)}"


def ranges_text(numbers: Sequence[int]) -> str:
    """Return ascending numbers as ranges: 0-9, 20-31."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)


def ranks_text(ranks: Iterable[MeshRank]) -> str:
    """Return ranks as text, with a range within each stage: pp0tp1-7, pp1tp0."""
    tp_ranks_by_stage: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        tp_ranks_by_stage.setdefault(rank.pp_rank, []).append(rank.tp_rank)
    return ", ".join(
        f"pp{pp_rank}tp{part}"
        for pp_rank, tp_ranks in tp_ranks_by_stage.items()
        for part in ranges_text(tp_ranks).split(", ")
    )


def _index_in(layer: Layer) -> tuple[int | None, str]:
    """Return the index in a layer's name if there is exactly one, and the name without it."""
    if isinstance(layer, int):
        return layer, ""
    parts = layer.split(".")
    numbers = [part for part in parts if part.isdecimal()]
    if len(numbers) != 1:
        return None, layer
    return int(numbers[0]), ".".join(part for part in parts if not part.isdecimal())

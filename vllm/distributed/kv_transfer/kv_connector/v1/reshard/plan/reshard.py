# SPDX-License-Identifier: Apache-2.0
"""The plan: which rank reads what from which rank, and which ranks it notifies afterwards.

`plan_reshard` intersects what every destination rank needs with what the source ranks hold. It is a
pure function: the order in which ranks are given does not matter, and both engines compute the same
plan from the same shards.

Example, 6 KV heads and one layer, source TP3 to destination TP2:

    destination    needs    reads from    global heads    at source    at destination
    tp0            [0, 3)   tp0           [0, 2)          0            0
                            tp1           [2, 3)          0            2
    tp1            [3, 6)   tp1           [3, 4)          1            0
                            tp2           [4, 6)          0            1

Source rank tp1 is released by tp0 and tp1, the others by one destination rank each.

The plan needs no number of heads for the model: each layer has its own units. The source may also
have layers that the destination does not need.

If ranks share out the tokens of their units, a read covers the tokens that are in the shares of
both ranks. One latent, source TP4 with 2 shares, destination TP4 with 4 shares, all in runs of the
same length:

    destination    needs     reads from    which holds    together
    tp0            0 of 4    tp0           0 of 2         0 of 4
    tp1            1 of 4    tp1           1 of 2         1 of 4
    tp2            2 of 4    tp2           0 of 2         2 of 4
    tp3            3 of 4    tp3           1 of 2         3 of 4

What follows the plan tells it as text, for the log and `kv-plan`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ..errors import LocalLayoutError, RemoteLayoutError, ReshardError
from .shards import (
    ALL_TOKENS,
    Holding,
    Layer,
    MeshRank,
    Shard,
    TokenShare,
    UnitInterval,
    common_units,
)


@dataclass(frozen=True, slots=True)
class Read:
    """One destination rank's read of a slice of units of some layers from one source rank.

    Attributes:
        dst_rank: Rank that reads.
        src_rank: Rank that it reads from.
        layers: Layers to read, in the order of the destination's cache.
        units: Units to read of each layer, numbered over the whole model.
        src_unit_offset: Position of the first unit within the source's shard of each layer.
        dst_unit_offset: Position of the first unit within the destination's shard of each layer.
        src_tokens: Tokens of these units that the source holds. Tokens in both shares are read.
        dst_tokens: Tokens of these units that the destination holds.
    """

    dst_rank: MeshRank
    src_rank: MeshRank
    layers: tuple[Layer, ...]
    units: UnitInterval
    src_unit_offset: int
    dst_unit_offset: int
    src_tokens: TokenShare = ALL_TOKENS
    dst_tokens: TokenShare = ALL_TOKENS

    @property
    def num_units(self) -> int:
        """Number of units to read of each layer."""
        return len(self.units)


@dataclass(frozen=True, slots=True)
class ReleaseQuorum:
    """The destination ranks that must notify a source rank before it may free a request.

    Attributes:
        src_rank: Rank that holds the blocks.
        notifiers: Ranks that notify it, in order: all its readers, or one destination rank if it
            has none.
    """

    src_rank: MeshRank
    notifiers: tuple[MeshRank, ...]


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """All reads between two engines, and which ranks release which.

    Attributes:
        reads: Reads, ordered by destination rank, then source rank, then heads.
        releases: One quorum for each source rank, in the order of ranks.
    """

    reads: tuple[Read, ...]
    releases: tuple[ReleaseQuorum, ...]

    def reads_of(self, dst_rank: MeshRank) -> tuple[Read, ...]:
        """Return the reads of one destination rank."""
        return tuple(read for read in self.reads if read.dst_rank == dst_rank)

    def notified_by(self, dst_rank: MeshRank) -> tuple[ReleaseQuorum, ...]:
        """Return the quorums that include one destination rank."""
        return tuple(release for release in self.releases if dst_rank in release.notifiers)


def plan_reshard(
    src: Iterable[Shard], dst: Iterable[Shard], *, replica_offset: int = 0
) -> ReshardPlan:
    """Plan the reads that fill every destination rank from the source ranks.

    If several source ranks hold the same units, their readers are assigned to them in turn, both in
    the order of ranks. A reader uses the same holder for everything that the same ranks hold.

    Args:
        src: Shard of each source rank.
        dst: Shard that each destination rank needs; at least one.
        replica_offset: Offset of the first turn. Engines that read from the same source at the same
            time, such as data-parallel replicas, pass different values to load different holders.

    Returns:
        A plan that reads every unit of every destination layer exactly once for every token.

    Raises:
        LocalLayoutError: `dst` is empty or names a rank twice.
        RemoteLayoutError: `src` names a rank twice, or the unit counts of a layer contradict each
            other, or no source rank holds a needed unit, or source ranks share tokens out in
            several ways.
    """
    src_by_rank = _by_rank(src, "source", RemoteLayoutError)
    dst_by_rank = _by_rank(dst, "destination", LocalLayoutError)
    if not dst_by_rank:
        raise LocalLayoutError("there is no destination rank to read for: give at least one")
    held, needed = _on_common_units(src_by_rank, dst_by_rank)
    reads = sorted(
        _merge_layers(_elect(held, needed, replica_offset), held, needed),
        key=lambda read: (read.dst_rank, read.src_rank, read.units, str(read.layers[0])),
    )
    return ReshardPlan(
        tuple(reads), tuple(_releases(reads, src_by_rank, dst_by_rank, replica_offset))
    )


def _by_rank(
    shards: Iterable[Shard], side: str, error: type[ReshardError]
) -> dict[MeshRank, Shard]:
    """Index shards by rank, in the order of ranks."""
    by_rank: dict[MeshRank, Shard] = {}
    for shard in sorted(shards, key=lambda shard: shard.rank):
        if shard.rank in by_rank:
            raise error(f"{side} rank {shard.rank} is given twice: give every rank once")
        by_rank[shard.rank] = shard
    return by_rank


class _Box(NamedTuple):
    """The part of one layer that one rank holds: some units, for some tokens."""

    units: UnitInterval
    tokens: TokenShare


_Boxes: TypeAlias = dict[MeshRank, dict[Layer, _Box]]
"""Each rank's part of each layer, in the order of ranks and of their caches."""


def _on_common_units(
    src: dict[MeshRank, Shard], dst: dict[MeshRank, Shard]
) -> tuple[_Boxes, _Boxes]:
    """Count the needed layers of both ends in common units."""
    by_layer: dict[Layer, tuple[list[Holding], list[Holding]]] = {
        layer: ([], []) for shard in dst.values() for layer in shard.holdings
    }
    for end, shards in enumerate((src, dst)):
        for shard in shards.values():
            for layer, holding in shard.holdings.items():
                if layer in by_layer:
                    by_layer[layer][end].append(holding)
    num_units: dict[Layer, int] = {}
    for layer, ends in by_layer.items():
        common = common_units([*ends[0], *ends[1]])
        if common is None:
            there, here = (", ".join(sorted(set(map(_count_text, end)))) for end in ends)
            raise RemoteLayoutError(
                f"layer {layer} is of {there} units at the source but of {here} here, which are KV "
                "heads, or ranks where its blocks are not looked into: run both engines with the "
                "same model, and with one --tensor-parallel-size where these are ranks"
            )
        num_units[layer] = common

    def boxes(shards: dict[MeshRank, Shard]) -> _Boxes:
        return {
            rank: {
                layer: _Box(holding.among(num_units[layer]), holding.tokens)
                for layer, holding in shard.holdings.items()
                if layer in num_units
            }
            for rank, shard in shards.items()
        }

    return boxes(src), boxes(dst)


def _count_text(holding: Holding) -> str:
    return f"{holding.num_units}{' or a divisor of it' if holding.may_repeat else ''}"


@dataclass(frozen=True, slots=True)
class _Piece:
    """The units of one layer that one destination rank reads from one source rank."""

    dst_rank: MeshRank
    src_rank: MeshRank
    layer: Layer
    units: UnitInterval


_Held: TypeAlias = dict[TokenShare, list[tuple[MeshRank, UnitInterval]]]
"""Ranks that hold a layer and their units, in the order of ranks, for each share of tokens."""


def _elect(src: _Boxes, dst: _Boxes, replica_offset: int) -> Iterator[_Piece]:
    """Choose a holder for every unit and share of tokens of every destination layer."""
    held_by_layer: dict[Layer, _Held] = defaultdict(dict)
    for src_rank, boxes in src.items():
        for layer, box in boxes.items():
            held_by_layer[layer].setdefault(box.tokens, []).append((src_rank, box.units))

    # The readers of each set of replicas, in the order of ranks, which is their turn.
    readers: dict[tuple[MeshRank, ...], list[MeshRank]] = defaultdict(list)
    for dst_rank, boxes in dst.items():
        for layer, needed in boxes.items():
            for share, held_units in _held_of(layer, needed.tokens, held_by_layer[layer]):
                pieces: list[_Piece] = []
                for units in _cut(needed.units, [held for _, held in held_units]):
                    holders = tuple(rank for rank, held in held_units if held.contains(units))
                    if not holders:
                        of_share = "" if share.is_all else f", tokens {share}"
                        raise RemoteLayoutError(
                            f"no source rank holds heads {units} of layer {layer}{of_share}, which "
                            f"destination rank {dst_rank} needs: run both engines with the same "
                            "model, and describe every stage and rank of the source"
                        )
                    if dst_rank not in readers[holders]:
                        readers[holders].append(dst_rank)
                    turn = replica_offset + readers[holders].index(dst_rank)
                    src_rank = holders[turn % len(holders)]
                    if pieces and pieces[-1].src_rank == src_rank:
                        units = UnitInterval(pieces.pop().units.start, units.stop)
                    pieces.append(_Piece(dst_rank, src_rank, layer, units))
                yield from pieces


def _held_of(
    layer: Layer, needed: TokenShare, held: _Held
) -> Iterable[tuple[TokenShare, list[tuple[MeshRank, UnitInterval]]]]:
    """Return each source share with needed tokens and its ranks; a share may have none."""
    if not held:
        return [(ALL_TOKENS, [])]
    ways = {(share.num_shares, share.run_tokens) for share in held}
    if len(ways) > 1:
        named = " and ".join(f"{count} in runs of {run}" for count, run in sorted(ways)[:2])
        raise RemoteLayoutError(
            f"source ranks share out the tokens of layer {layer} in several ways, among {named}: "
            "start all workers of an engine alike"
        )
    ((num_shares, run_tokens),) = ways
    if num_shares == 1:
        return held.items()
    shares = (TokenShare(index, num_shares, run_tokens) for index in range(num_shares))
    return [(share, held.get(share, [])) for share in shares if share.meets(needed)]


def _cut(needed: UnitInterval, held: list[UnitInterval]) -> Iterator[UnitInterval]:
    """Cut an interval wherever a held one begins or ends: no piece is held in part."""
    edges = {edge for units in held for edge in (units.start, units.stop)}
    inner = sorted(edge for edge in edges if needed.start < edge < needed.stop)
    starts, stops = [needed.start, *inner], [*inner, needed.stop]
    return (UnitInterval(start, stop) for start, stop in zip(starts, stops, strict=True))


_Slice: TypeAlias = tuple[UnitInterval, int, int, TokenShare, TokenShare]
"""What a `Read` says after its layers."""


def _merge_layers(pieces: Iterable[_Piece], src: _Boxes, dst: _Boxes) -> Iterator[Read]:
    """Join the pieces that differ only in the layer."""
    layers_by_slice: dict[tuple[MeshRank, MeshRank, _Slice], list[Layer]] = defaultdict(list)
    for piece in pieces:
        there, here = src[piece.src_rank][piece.layer], dst[piece.dst_rank][piece.layer]
        slice_ = (
            piece.units,
            piece.units.start - there.units.start,
            piece.units.start - here.units.start,
            there.tokens,
            here.tokens,
        )
        layers_by_slice[piece.dst_rank, piece.src_rank, slice_].append(piece.layer)
    for (dst_rank, src_rank, slice_), layers in layers_by_slice.items():
        yield Read(dst_rank, src_rank, tuple(layers), *slice_)


def _releases(
    reads: Iterable[Read],
    src: dict[MeshRank, Shard],
    dst: dict[MeshRank, Shard],
    replica_offset: int,
) -> Iterator[ReleaseQuorum]:
    """Name the notifiers of every source rank, also of ranks without a reader."""
    readers: dict[MeshRank, set[MeshRank]] = defaultdict(set)
    for read in reads:
        readers[read.src_rank].add(read.dst_rank)
    dst_ranks = list(dst)
    turn = replica_offset
    for src_rank in src:
        if notifiers := sorted(readers[src_rank]):
            yield ReleaseQuorum(src_rank, tuple(notifiers))
        else:
            yield ReleaseQuorum(src_rank, (dst_ranks[turn % len(dst_ranks)],))
            turn += 1


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

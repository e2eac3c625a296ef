# SPDX-License-Identifier: Apache-2.0
"""An independent check of a plan, unit by unit.

It shares no arithmetic with the planner: it writes every unit of every layer out as a cell, and
carries the reads out on cells. If ranks do not know how many units a layer has, it tries every
possible number. If they share out tokens, a cell is a unit at one stretch of tokens; stretches are
written out until the deal of tokens to ranks repeats. The check is slower than planning, but
depends only on the meaning of a plan, and so can judge one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import TypeAlias

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.reshard import Read, ReshardPlan
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import (
    Holding,
    Layer,
    MeshRank,
    Shard,
    TokenShare,
)

_Cells: TypeAlias = dict[MeshRank, dict[Layer, list[int]]]
"""The units of each layer on each rank, in the rank's order of storage."""

_MOST_STRETCHES = 1 << 12
"""Most stretches of tokens to write out, from the start of a sequence. With the sizes of real
engines the deal repeats before that."""


def verify_plan(src: Iterable[Shard], dst: Iterable[Shard], plan: ReshardPlan) -> list[str]:
    """Check that a plan fills every destination rank from units that the source ranks hold.

    Args:
        src: Shard of each source rank.
        dst: Shard that each destination rank needs.
        plan: Plan to check.

    Returns:
        One readable line for each fault; empty if the plan is right.
    """
    src, dst = list(src), list(dst)
    possible = _possible_counts(src, dst)
    faults = [
        f"layer {layer} has no number of heads that fits what all ranks say of it"
        for layer, counts in possible.items()
        if not counts
    ]
    for turn in range(max(map(len, possible.values()), default=0)):
        # A layer with fewer numbers repeats its last one.
        counts = {
            layer: numbers[min(turn, len(numbers) - 1)]
            for layer, numbers in possible.items()
            if numbers
        }
        faults += _check_reads(plan.reads, _cells(src, counts), _cells(dst, counts))
    faults += _check_coverage(plan.reads, dst, _Deal((*src, *dst)))
    faults += _check_shares(plan.reads, src, dst)
    faults += _check_releases(plan, _ranks(src), _ranks(dst))
    return list(dict.fromkeys(faults))


def _ranks(shards: Iterable[Shard]) -> list[MeshRank]:
    return [shard.rank for shard in shards]


def _possible_counts(src: Iterable[Shard], dst: Iterable[Shard]) -> dict[Layer, list[int]]:
    """Return the possible numbers of units of each destination layer, over the whole model."""
    said: dict[Layer, set[tuple[int, bool]]] = {
        layer: set() for shard in dst for layer in shard.holdings
    }
    for shard in (*src, *dst):
        for layer, holding in shard.holdings.items():
            if layer in said:
                said[layer].add((holding.num_units, holding.may_repeat))
    return {
        layer: [
            count
            for count in range(1, min(number for number, _ in numbers) + 1)
            if all(
                number % count == 0 if may_repeat else number == count
                for number, may_repeat in numbers
            )
        ]
        for layer, numbers in said.items()
    }


def _cells(shards: Iterable[Shard], counts: dict[Layer, int]) -> _Cells:
    """Write out the units of each rank if layers have these numbers of units."""
    return {
        shard.rank: {
            layer: _units(holding, counts[layer])
            for layer, holding in shard.holdings.items()
            if layer in counts
        }
        for shard in shards
    }


def _units(holding: Holding, count: int) -> list[int]:
    if holding.may_repeat:
        return [holding.units.start // (holding.num_units // count)]
    return list(range(holding.units.start, holding.units.stop))


def _check_reads(reads: Iterable[Read], held: _Cells, needed: _Cells) -> Iterator[str]:
    """Carry out each read on the cells of both ends."""
    for read in reads:
        for layer in read.layers:
            there = _slice(held, read.src_rank, layer, read.src_unit_offset, read.num_units)
            here = _slice(needed, read.dst_rank, layer, read.dst_unit_offset, read.num_units)
            if there != here or len(here) != read.num_units:
                yield (
                    f"read of heads {read.units} of layer {layer} by {read.dst_rank} from "
                    f"{read.src_rank}: source offset {read.src_unit_offset} holds heads {there}, "
                    f"destination offset {read.dst_unit_offset} holds heads {here}"
                )


def _slice(
    cells: _Cells, rank: MeshRank, layer: Layer, offset: int, num_units: int
) -> Sequence[int]:
    stored = cells.get(rank, {}).get(layer, [])
    return stored[offset : offset + num_units] if offset >= 0 else []


class _Deal:
    """The stretches of tokens in each share that some shards have.

    A stretch is the largest number of tokens that divides every run.
    """

    def __init__(self, shards: Iterable[Shard]) -> None:
        shares = {each.tokens for shard in shards for each in shard.holdings.values()}
        cut = [share for share in shares if not share.is_all]
        self.stretch_tokens = math.gcd(*(share.run_tokens for share in cut)) or 1
        until_anew = math.lcm(*(share.num_shares * share.run_tokens for share in cut))
        self._num_stretches = min(until_anew // self.stretch_tokens or 1, _MOST_STRETCHES)
        self.of = cache(self._of)

    def _of(self, share: TokenShare) -> frozenset[int]:
        """Return the stretches of a share."""
        if share.is_all:
            return frozenset(range(self._num_stretches))
        dealt: set[int] = set()
        stretch, turn = 0, 0
        while stretch < self._num_stretches:
            for _ in range(share.run_tokens // self.stretch_tokens):
                if turn == share.index:
                    dealt.add(stretch)
                stretch += 1
            turn = (turn + 1) % share.num_shares
        return frozenset(each for each in dealt if each < self._num_stretches)


def _check_shares(
    reads: Iterable[Read], src: Iterable[Shard], dst: Iterable[Shard]
) -> Iterator[str]:
    """Check that each read states the shares that its two ranks have."""
    held, needed = ({shard.rank: shard.holdings for shard in end} for end in (src, dst))
    for read in reads:
        for layer in read.layers:
            there = held.get(read.src_rank, {}).get(layer)
            here = needed.get(read.dst_rank, {}).get(layer)
            for said, holding, rank in (
                (read.src_tokens, there, read.src_rank),
                (read.dst_tokens, here, read.dst_rank),
            ):
                if holding is not None and holding.tokens != said:
                    yield (
                        f"read of layer {layer} by {read.dst_rank} from {read.src_rank} takes it "
                        f"that {rank} holds tokens {said}, but it holds {holding.tokens}"
                    )


def _check_coverage(reads: Iterable[Read], dst: Iterable[Shard], deal: _Deal) -> Iterator[str]:
    """Check that every place of the destination is written once."""
    writes = Counter(
        (read.dst_rank, layer, read.dst_unit_offset + position, stretch)
        for read in reads
        for layer in read.layers
        for position in range(read.num_units)
        for stretch in deal.of(read.src_tokens) & deal.of(read.dst_tokens)
    )
    for shard in dst:
        for layer, holding in shard.holdings.items():
            for position in range(len(holding.units)):
                for stretch in sorted(deal.of(holding.tokens)):
                    if (times := writes[shard.rank, layer, position, stretch]) != 1:
                        at = "" if holding.tokens.is_all else f", tokens {holding.tokens},"
                        yield (
                            f"head {holding.units.start + position} of layer {layer}{at} on "
                            f"{shard.rank} is read {times} times, not once"
                        )
                        break


def _check_releases(
    plan: ReshardPlan, held: Iterable[MeshRank], needed: Iterable[MeshRank]
) -> Iterator[str]:
    """Check that each source rank is notified once by each reader, and by at least one rank."""
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
            yield f"source {release.src_rank} is released by no rank"
        if len(notifiers) != len(release.notifiers):
            yield f"source {release.src_rank} counts a notifier twice: {_names(release.notifiers)}"
        if strangers := notifiers - known:
            yield f"source {release.src_rank} waits for unknown {_names(strangers)}"
        if forgotten := readers.get(release.src_rank, set()) - notifiers:
            yield f"source {release.src_rank} does not wait for its reader {_names(forgotten)}"


def _names(ranks: Iterable[MeshRank]) -> str:
    return ", ".join(map(str, sorted(ranks)))

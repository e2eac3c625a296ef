# SPDX-License-Identifier: Apache-2.0
"""Which rank holds which layers, and which of each layer's units.

*Units* are what tensor parallelism splits of a layer: KV heads, or the one latent of MLA. They are
each layer's own, numbered over the whole model, and held in half-open intervals. With `U` units in
a layer, and `T` tensor-parallel ranks:

    T <= U    T must divide U    rank t holds [t*U/T, (t+1)*U/T)
    T >  U    U must divide T    rank t holds the one unit t*U//T: T/U ranks are its replicas

For U = 6:

    T=2   [0,3) [3,6)
    T=3   [0,2) [2,4) [4,6)
    T=12  [0,1) [0,1) [1,2) [1,2) ... [5,6) [5,6)

These are vLLM's rules for splitting attention (`QKVParallelLinear`, `get_num_kv_heads`) and layers
(`get_pp_indices`), so what they compute here is what the engine's workers hold.

A worker that has several units of a layer knows `U`, which is T times as many. One that has a
single unit of many ranks does not: it is one of T units, or a replica, and no module of vLLM says
which. Its holding says so, and `common_units` finds a number to plan with.

*Tokens* are what decode context parallelism splits. Ranks that would be replicas of each other deal
a sequence out in runs of so many tokens, as players are dealt cards: with `n` of them, and runs of
`I` tokens, the run of token p is rank p//I % n's. What each of them has of it is its `TokenShare`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from ..errors import LocalLayoutError
from .mesh import MeshRank, ParallelMesh

Layer: TypeAlias = int | str
"""A layer's identity, equal on both sides: its name or its global index, one kind in one plan.

Where one layer keeps things that are split by rules of their own, each of them is a layer here.
"""


@dataclass(frozen=True, order=True, slots=True)
class UnitInterval:
    """The units `start <= unit < stop` of one layer; never empty.

    Raises:
        ValueError: The bounds are negative or out of order.
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(
                f"units [{self.start}, {self.stop}) are no interval: need 0 <= start < stop"
            )

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"

    def contains(self, other: UnitInterval) -> bool:
        """Whether every unit of `other` is in this interval."""
        return self.start <= other.start and other.stop <= self.stop


@dataclass(frozen=True, order=True, slots=True)
class TokenShare:
    """The tokens of a sequence that one rank is dealt; all of them, unless it is said otherwise.

    Attributes:
        index: Its place among those that are dealt to, which is the number of its first run.
        num_shares: How many are dealt to, one run each in turn.
        run_tokens: Tokens in a run; 1 where all runs are one rank's.

    Raises:
        ValueError: There is no such place.
    """

    index: int = 0
    num_shares: int = 1
    run_tokens: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.num_shares or self.run_tokens < 1:
            raise ValueError(
                f"share {self.index} of {self.num_shares} in runs of {self.run_tokens} tokens is "
                "none: need 0 <= index < num_shares and run_tokens >= 1"
            )
        if self.num_shares == 1:
            object.__setattr__(self, "run_tokens", 1)

    def __str__(self) -> str:
        if self.is_all:
            return "all"
        return f"{self.index} of {self.num_shares} by {self.run_tokens}"

    @property
    def is_all(self) -> bool:
        """Whether these are all tokens."""
        return self.num_shares == 1

    @property
    def period_tokens(self) -> int:
        """After how many tokens it is dealt to again."""
        return self.num_shares * self.run_tokens

    def meets(self, other: TokenShare) -> bool:
        """Whether some tokens are in both shares.

        A token is in both if it is as far behind the beginnings of two runs. Those of one share are
        apart by its period, so that all distances between the two are equal modulo what the periods
        have in common.
        """
        common = math.gcd(self.period_tokens, other.period_tokens)
        ahead = (other.index * other.run_tokens - self.index * self.run_tokens) % common
        return ahead < self.run_tokens or common - ahead < other.run_tokens


ALL_TOKENS = TokenShare()


@dataclass(frozen=True, slots=True)
class Holding:
    """What one rank holds of one layer.

    Attributes:
        units: The units that it holds.
        num_units: Units of the layer over the whole model.
        may_repeat: `num_units` counts ranks, each of which holds one unit, and adjoining ones may
            hold the same: the layer has that many units or any divisor of it, each of them on
            equally many adjoining ranks. Ranks that share tokens out among them count as one.
        tokens: The tokens that it holds of these units.

    Raises:
        ValueError: The interval lies beyond the layer's units, or is not one rank's.
    """

    units: UnitInterval
    num_units: int
    may_repeat: bool = False
    tokens: TokenShare = ALL_TOKENS

    def __post_init__(self) -> None:
        if self.units.stop > self.num_units or (self.may_repeat and len(self.units) > 1):
            raise ValueError(
                f"units {self.units} of {self.num_units} cannot be held"
                f"{' by a rank that holds one' if self.may_repeat else ''}"
            )

    def among(self, num_units: int) -> UnitInterval:
        """The units that are held of so many: of `num_units`, or of a divisor if they may repeat.

        With a divisor that only divides what the layer has, each unit stands for several.
        """
        if num_units == self.num_units:
            return self.units
        unit = self.units.start * num_units // self.num_units
        return UnitInterval(unit, unit + 1)


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank holds.

    Attributes:
        rank: The holder.
        holdings: The layers that it holds, in the order of its own cache, with its units of each.
    """

    rank: MeshRank
    holdings: Mapping[Layer, Holding]

    def __post_init__(self) -> None:
        object.__setattr__(self, "holdings", MappingProxyType(dict(self.holdings)))


def units_of_rank(tp_rank: int, tp_size: int, num_units: int) -> UnitInterval:
    """The units of a layer that one tensor-parallel rank holds.

    Args:
        tp_rank: The rank, `0 <= tp_rank < tp_size`.
        tp_size: Number of ranks.
        num_units: Units of the layer over all ranks; 1 for MLA.

    Raises:
        LocalLayoutError: Neither of `tp_size` and `num_units` divides the other as it must.
    """
    if num_units < 1:
        raise LocalLayoutError(f"num_kv_heads is {num_units} but must be at least 1")
    larger, smaller = max(tp_size, num_units), min(tp_size, num_units)
    if larger % smaller:
        raise LocalLayoutError(
            f"tensor_parallel_size {tp_size} does not fit {num_units} KV heads: one must "
            f"divide the other; choose a tensor_parallel_size that divides {num_units} or is a "
            "multiple of it"
        )
    if tp_size > num_units:
        unit = tp_rank * num_units // tp_size
        return UnitInterval(unit, unit + 1)
    units_per_rank = num_units // tp_size
    return UnitInterval(tp_rank * units_per_rank, (tp_rank + 1) * units_per_rank)


def holding_of_rank(
    tp_rank: int, tp_size: int, units_per_rank: int, tokens: TokenShare = ALL_TOKENS
) -> Holding:
    """What one rank holds of a layer of which every rank holds equally many units.

    Args:
        tp_rank: The rank, `0 <= tp_rank < tp_size`.
        tp_size: Number of ranks.
        units_per_rank: Units that each rank holds, at least 1.
        tokens: Which tokens it holds of them. As many ranks as share them out adjoin, and hold the
            same units.
    """
    first, num_ranks = (each // tokens.num_shares for each in (tp_rank, tp_size))
    units = UnitInterval(first * units_per_rank, (first + 1) * units_per_rank)
    may_repeat = units_per_rank == 1 < num_ranks
    return Holding(units, num_ranks * units_per_rank, may_repeat, tokens)


def share_of_rank(tp_rank: int, num_shares: int, run_tokens: int) -> TokenShare:
    """The tokens of a rank, where so many adjoining ranks share them out in runs of so many."""
    return TokenShare(tp_rank % num_shares, num_shares, run_tokens)


def common_units(holdings: Iterable[Holding]) -> int | None:
    """With how many units a layer is planned, of which these holdings are all that is known.

    Where it is not known, it is the largest number that fits: a divisor of what every engine
    counts, and so a multiple of what the layer has. Ranks that share one of these units share one
    of the layer's, whatever that is: with `U` units on `T` ranks, and `G` a multiple of `U` that
    divides `T`, the unit of rank t is `t*U//T`, which is `(t*G//T) // (G/U)`.

    Args:
        holdings: Of one layer, at both engines; at least one.

    Returns:
        The number; None where the holdings contradict each other.
    """
    known = {each.num_units for each in holdings if not each.may_repeat}
    counted = {each.num_units for each in holdings if each.may_repeat}
    if len(known) > 1:
        return None
    num_units = known.pop() if known else math.gcd(*counted)
    return None if any(count % num_units for count in counted) else num_units


def partition_layers(
    num_layers: int, pp_size: int, layers_per_stage: Sequence[int] | None = None
) -> list[range]:
    """The global layer indices of each pipeline stage.

    By default every stage gets the same number of layers. What remains goes, one layer each, to the
    stages before the last one, counted backwards, because the last stage has the output head to
    compute (vLLM's `get_pp_indices`).

    Args:
        num_layers: Layers of the model.
        pp_size: Number of stages.
        layers_per_stage: Explicit sizes, as in `VLLM_PP_LAYER_PARTITION`.

    Raises:
        LocalLayoutError: The sizes do not add up, are not one a stage, or leave a stage empty.
    """
    if layers_per_stage is None:
        each, remaining = divmod(num_layers, pp_size)
        extra = range(pp_size - 1 - remaining, pp_size - 1)
        sizes = [each + (stage in extra) for stage in range(pp_size)]
    else:
        sizes = list(layers_per_stage)
        if len(sizes) != pp_size:
            raise LocalLayoutError(
                f"layer partition {','.join(map(str, sizes))} has {len(sizes)} entries but "
                f"pipeline_parallel_size is {pp_size}: give one entry a stage"
            )
        if sum(sizes) != num_layers:
            raise LocalLayoutError(
                f"layer partition {','.join(map(str, sizes))} adds up to {sum(sizes)} layers but "
                f"the model has {num_layers}: make the entries add up"
            )
    if min(sizes) < 1:
        raise LocalLayoutError(
            f"{num_layers} layers over {pp_size} pipeline stages leave stage "
            f"{sizes.index(min(sizes))} without a layer: use a pipeline_parallel_size of at most "
            f"{num_layers} and at least one layer a stage"
        )
    starts = [sum(sizes[:stage]) for stage in range(pp_size)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def shard_model(
    mesh: ParallelMesh,
    num_layers: int,
    num_kv_heads: int | Mapping[int, int],
    layers_per_stage: Sequence[int] | None = None,
    num_shares: int = 1,
    run_tokens: int = 1,
) -> tuple[Shard, ...]:
    """What every rank of an engine holds of a model, by layer index.

    Args:
        mesh: The engine's workers.
        num_layers: Layers of the model.
        num_kv_heads: KV heads of each layer; 1 for MLA. Where layers differ, those of each that has
            a KV cache of its own.
        layers_per_stage: As in `partition_layers`.
        num_shares: Ranks that share the tokens of their heads out, which is the size of decode
            context parallelism.
        run_tokens: Tokens in a run of those.

    Returns:
        One shard a rank, in the mesh's order of ranks.

    Raises:
        LocalLayoutError: vLLM could not run the model on this mesh.
    """
    if mesh.tp_size % num_shares:
        raise LocalLayoutError(
            f"decode_context_parallel_size {num_shares} does not divide tensor_parallel_size "
            f"{mesh.tp_size}: it must"
        )
    if isinstance(num_kv_heads, int):
        num_kv_heads = dict.fromkeys(range(num_layers), num_kv_heads)
    stages = partition_layers(num_layers, mesh.pp_size, layers_per_stage)
    for num_heads in {*num_kv_heads.values()} if num_shares > 1 else ():
        if mesh.tp_size // num_shares % num_heads:
            raise LocalLayoutError(
                f"decode_context_parallel_size {num_shares} shares a head out among ranks that "
                f"hold it all, but tensor_parallel_size {mesh.tp_size} has "
                f"{mesh.tp_size // num_heads} for each of {num_heads} KV heads: choose a size that "
                "divides that"
            )
    return tuple(
        Shard(
            rank,
            {
                layer: Holding(
                    units_of_rank(rank.tp_rank, mesh.tp_size, num_units),
                    num_units,
                    tokens=share_of_rank(rank.tp_rank, num_shares, run_tokens),
                )
                for layer in stages[rank.pp_rank]
                if (num_units := num_kv_heads.get(layer)) is not None
            },
        )
        for rank in mesh.ranks()
    )

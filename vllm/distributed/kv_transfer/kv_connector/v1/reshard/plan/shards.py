# SPDX-License-Identifier: Apache-2.0
"""Which rank holds which layers, and which of each layer's units.

*Units* are the parts of a layer that tensor parallelism splits: KV heads, or the one latent of MLA.
Each layer numbers its own units over the whole model, and a rank holds a half-open interval of
them. With `U` units in a layer, and `T` tensor-parallel ranks:

    T <= U    T must divide U    rank t holds [t*U/T, (t+1)*U/T)
    T >  U    U must divide T    rank t holds the one unit t*U//T: T/U ranks are its replicas

For U = 6:

    T=2   [0,3) [3,6)
    T=3   [0,2) [2,4) [4,6)
    T=12  [0,1) [0,1) [1,2) [1,2) ... [5,6) [5,6)

These are vLLM's rules for splitting attention (`QKVParallelLinear`, `get_num_kv_heads`) and layers
(`get_pp_indices`), so the result matches the engine's workers.

A worker that has several units of a layer can compute `U`: T times as many. With several ranks and
one unit on each, a worker cannot: its unit is one of T, or a replica, and no module of vLLM tells
which. Its holding says so (`may_repeat`), and `common_units` finds a number to plan with.

*Tokens* are split by decode context parallelism. Ranks that would be replicas of each other share a
sequence out in runs, like players who are dealt cards: with `n` ranks, and runs of `I` tokens,
token p goes to rank p//I % n. The tokens of one rank are its `TokenShare`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from ..errors import LocalLayoutError


@dataclass(frozen=True, order=True, slots=True)
class MeshRank:
    """One worker's pipeline stage, and its rank within the stage."""

    pp_rank: int
    tp_rank: int

    def __str__(self) -> str:
        return f"pp{self.pp_rank}tp{self.tp_rank}"


@dataclass(frozen=True, slots=True)
class ParallelMesh:
    """The worker grid of one engine, which is one data-parallel replica.

    Attributes:
        pp_size: Number of pipeline stages.
        tp_size: Number of workers in each stage.

    Raises:
        LocalLayoutError: A size is below 1.
    """

    pp_size: int
    tp_size: int

    def __post_init__(self) -> None:
        for axis, size in (("pipeline", self.pp_size), ("tensor", self.tp_size)):
            if size < 1:
                raise LocalLayoutError(
                    f"{axis}_parallel_size is {size} but must be at least 1: "
                    f"use 1 to run without {axis} parallelism"
                )

    def __str__(self) -> str:
        return f"PP{self.pp_size} x TP{self.tp_size}"

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self.pp_size * self.tp_size

    def ranks(self) -> Iterator[MeshRank]:
        """Yield all workers by their global rank, which is pp_rank * tp_size + tp_rank.

        This is vLLM's order (`initialize_model_parallel`): tensor-parallel ranks are adjacent.
        """
        for pp_rank in range(self.pp_size):
            for tp_rank in range(self.tp_size):
                yield MeshRank(pp_rank, tp_rank)


Layer: TypeAlias = int | str
"""A layer's identity, equal on both sides: its name or its global index, one kind in one plan.

If a layer has several components that are split by different rules, each is a layer here.
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
        """True if every unit of `other` is in this interval."""
        return self.start <= other.start and other.stop <= self.stop


@dataclass(frozen=True, order=True, slots=True)
class TokenShare:
    """The tokens of a sequence that one rank holds; by default all of them.

    Attributes:
        index: Position of the share, which is the index of its first run.
        num_shares: Number of shares; runs go to them in turn.
        run_tokens: Number of tokens in a run; 1 if there is a single share.

    Raises:
        ValueError: There is no such share.
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
        """True if the share has all tokens."""
        return self.num_shares == 1

    @property
    def period_tokens(self) -> int:
        """Number of tokens from one run of the share to its next."""
        return self.num_shares * self.run_tokens

    def meets(self, other: TokenShare) -> bool:
        """Return whether some tokens are in both shares.

        A token is in both if a run of one overlaps a run of the other. Runs of a share start one
        period apart, so all distances between starts of the two shares are equal modulo the gcd of
        their periods.
        """
        common = math.gcd(self.period_tokens, other.period_tokens)
        ahead = (other.index * other.run_tokens - self.index * self.run_tokens) % common
        return ahead < self.run_tokens or common - ahead < other.run_tokens


ALL_TOKENS = TokenShare()


@dataclass(frozen=True, slots=True)
class Holding:
    """The units and tokens that one rank holds of one layer.

    Attributes:
        units: Units that the rank holds.
        num_units: Number of the layer's units over the whole model.
        may_repeat: True if `num_units` counts ranks with one unit each, and adjoining ranks may
            hold the same unit: the layer has that many units or any divisor of it, each on equally
            many adjoining ranks. Ranks that share tokens out among them count as one.
        tokens: Tokens of these units that the rank holds.

    Raises:
        ValueError: The interval exceeds the layer's units, or has several although they may repeat.
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
        """Return the interval held if the layer is counted in `num_units` units.

        The number is the holding's own or, if units may repeat, a divisor of it. If it is smaller
        than the layer's real number of units, each unit stands for several.
        """
        if num_units == self.num_units:
            return self.units
        unit = self.units.start * num_units // self.num_units
        return UnitInterval(unit, unit + 1)


@dataclass(frozen=True, slots=True)
class Shard:
    """All layers that one rank holds.

    Attributes:
        rank: The rank.
        holdings: Holding of each of its layers, in the order of its cache.
    """

    rank: MeshRank
    holdings: Mapping[Layer, Holding]

    def __post_init__(self) -> None:
        object.__setattr__(self, "holdings", MappingProxyType(dict(self.holdings)))


def units_of_rank(tp_rank: int, tp_size: int, num_units: int) -> UnitInterval:
    """Return the units of a layer that one tensor-parallel rank holds.

    Args:
        tp_rank: The rank, `0 <= tp_rank < tp_size`.
        tp_size: Number of ranks.
        num_units: Number of the layer's units over all ranks; 1 for MLA.

    Raises:
        LocalLayoutError: `num_units` is below 1, or neither number divides the other.
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
    """Return one rank's holding of a layer, if all ranks hold equally many units of it.

    Args:
        tp_rank: The rank, `0 <= tp_rank < tp_size`.
        tp_size: Number of ranks.
        units_per_rank: Number of units that each rank holds; at least 1.
        tokens: Tokens of these units that it holds. Ranks that share tokens out adjoin and hold the
            same units.
    """
    first, num_ranks = (each // tokens.num_shares for each in (tp_rank, tp_size))
    units = UnitInterval(first * units_per_rank, (first + 1) * units_per_rank)
    may_repeat = units_per_rank == 1 < num_ranks
    return Holding(units, num_ranks * units_per_rank, may_repeat, tokens)


def share_of_rank(tp_rank: int, num_shares: int, run_tokens: int) -> TokenShare:
    """Return a rank's tokens, if `num_shares` adjoining ranks share them out in runs."""
    return TokenShare(tp_rank % num_shares, num_shares, run_tokens)


def common_units(holdings: Iterable[Holding]) -> int | None:
    """Return the number of units to plan a layer with, given its holdings.

    If no holding has the real number, this is the largest that fits: a divisor of every engine's
    count, and so a multiple of the layer's real number. Ranks that share one of these units also
    share one of the layer's, whatever the real number is: with `U` units on `T` ranks, and `G` a
    multiple of `U` that divides `T`, the unit of rank t is `t*U//T`, which is `(t*G//T) // (G/U)`.

    Args:
        holdings: Holdings of the layer at both engines; at least one.

    Returns:
        The number; None if the holdings contradict each other.
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
    """Return the global layer indices of each pipeline stage.

    By default every stage gets the same number of layers. The remaining ones go, one layer each, to
    the stages just before the last, because the last stage also computes the output head (vLLM's
    `get_pp_indices`).

    Args:
        num_layers: Number of layers of the model.
        pp_size: Number of stages.
        layers_per_stage: Explicit sizes, as in `VLLM_PP_LAYER_PARTITION`; None for the default.

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
    """Return the shard of every rank of an engine, by layer index.

    Args:
        mesh: The engine's workers.
        num_layers: Number of layers of the model.
        num_kv_heads: Number of KV heads of every layer; 1 for MLA. If layers differ, a mapping with
            the number of each layer that has its own KV cache.
        layers_per_stage: As in `partition_layers`.
        num_shares: Number of ranks that share the tokens of their heads out: the size of decode
            context parallelism.
        run_tokens: Number of tokens in a run of a share.

    Returns:
        One shard a rank, in the mesh's order.

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

# SPDX-License-Identifier: Apache-2.0
"""Which rank holds which layers, and which of each layer's KV heads.

Heads are numbered globally, over the whole model, and held in half-open intervals. With `H` KV
heads in a layer, and `T` tensor-parallel ranks:

    T <= H    T must divide H    rank t holds [t*H/T, (t+1)*H/T)
    T >  H    H must divide T    rank t holds the one head t*H//T: T/H ranks are its replicas
    MLA       H counts as 1      every rank holds the one latent head

For H = 6:

    T=2   [0,3) [3,6)
    T=3   [0,2) [2,4) [4,6)
    T=12  [0,1) [0,1) [1,2) [1,2) ... [5,6) [5,6)

These are vLLM's rules for splitting attention (`QKVParallelLinear`, `get_num_kv_heads`) and layers
(`get_pp_indices`), so what they compute here is what the engine's workers hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from ..errors import LocalLayoutError
from .mesh import MeshRank, ParallelMesh

Layer: TypeAlias = int | str
"""A layer's identity, equal on both sides: its name or its global index, one kind in one plan."""


@dataclass(frozen=True, order=True, slots=True)
class HeadInterval:
    """The global KV heads `start <= head < stop` of one layer; never empty.

    Raises:
        ValueError: The bounds are negative or out of order.
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(
                f"heads [{self.start}, {self.stop}) are no interval: need 0 <= start < stop"
            )

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"

    def contains(self, other: HeadInterval) -> bool:
        """Whether every head of `other` is in this interval."""
        return self.start <= other.start and other.stop <= self.stop


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank holds.

    Attributes:
        rank: The holder.
        heads_by_layer: The layers that it holds, in the order of its own cache, with the global
            heads of each.
    """

    rank: MeshRank
    heads_by_layer: Mapping[Layer, HeadInterval]

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads_by_layer", MappingProxyType(dict(self.heads_by_layer)))


def heads_of_rank(tp_rank: int, tp_size: int, num_kv_heads: int) -> HeadInterval:
    """The global heads that one tensor-parallel rank holds.

    Args:
        tp_rank: The rank, `0 <= tp_rank < tp_size`.
        tp_size: Number of ranks.
        num_kv_heads: KV heads of the layer over all ranks; 1 for MLA.

    Raises:
        LocalLayoutError: Neither of `tp_size` and `num_kv_heads` divides the other as it must.
    """
    if num_kv_heads < 1:
        raise LocalLayoutError(f"num_kv_heads is {num_kv_heads} but must be at least 1")
    larger, smaller = max(tp_size, num_kv_heads), min(tp_size, num_kv_heads)
    if larger % smaller:
        raise LocalLayoutError(
            f"tensor_parallel_size {tp_size} does not fit {num_kv_heads} KV heads: one must "
            f"divide the other; choose a tensor_parallel_size that divides {num_kv_heads} or is a "
            "multiple of it"
        )
    if tp_size > num_kv_heads:
        head = tp_rank * num_kv_heads // tp_size
        return HeadInterval(head, head + 1)
    heads_per_rank = num_kv_heads // tp_size
    return HeadInterval(tp_rank * heads_per_rank, (tp_rank + 1) * heads_per_rank)


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
    num_kv_heads: int,
    layers_per_stage: Sequence[int] | None = None,
) -> tuple[Shard, ...]:
    """What every rank of an engine holds of a model whose layers are alike, by layer index.

    Args:
        mesh: The engine's workers.
        num_layers: Layers of the model.
        num_kv_heads: KV heads of each layer; 1 for MLA.
        layers_per_stage: As in `partition_layers`.

    Returns:
        One shard a rank, in the mesh's order of ranks.

    Raises:
        LocalLayoutError: vLLM could not run the model on this mesh.
    """
    stages = partition_layers(num_layers, mesh.pp_size, layers_per_stage)
    return tuple(
        Shard(
            rank,
            dict.fromkeys(
                stages[rank.pp_rank], heads_of_rank(rank.tp_rank, mesh.tp_size, num_kv_heads)
            ),
        )
        for rank in mesh.ranks()
    )

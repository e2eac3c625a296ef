# SPDX-License-Identifier: Apache-2.0
"""The grid of workers over which one engine spreads a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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

# SPDX-License-Identifier: Apache-2.0
"""What all tests of the package share: its fixtures, and engines of random layouts."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TypeAlias

import pytest
from hypothesis import strategies as st

from tests.v1.kv_connector.unit.reshard.early_pairs import clock, pair
from tests.v1.kv_connector.unit.reshard.engine.workers import engines
from tests.v1.kv_connector.unit.reshard.serving import serving, wholes
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import (
    ParallelMesh,
    Shard,
    holding_of_rank,
    shard_model,
)

__all__ = ["clock", "engines", "pair", "serving", "wholes"]

Engine: TypeAlias = tuple[Shard, ...]


@st.composite
def _partitions(draw: st.DrawFn, num_layers: int) -> list[int]:
    """Layers per stage, of any number of stages, none of them empty."""
    cuts = draw(st.sets(st.integers(1, num_layers - 1))) if num_layers > 1 else set()
    edges = [0, *sorted(cuts), num_layers]
    return [stop - start for start, stop in pairwise(edges)]


@st.composite
def _engine(draw: st.DrawFn, heads_by_layer: Mapping[int, int], num_layers: int) -> Engine:
    """The shards of an engine of any layout that vLLM could run, with the ranks in any order."""
    tp_sizes = [
        size
        for size in range(1, 2 * max(heads_by_layer.values()) + 1)
        if all(size % heads == 0 or heads % size == 0 for heads in heads_by_layer.values())
    ]
    tp_size = draw(st.sampled_from(tp_sizes))
    partition = draw(_partitions(num_layers))
    mesh = ParallelMesh(pp_size=len(partition), tp_size=tp_size)
    shards = shard_model(mesh, num_layers, heads_by_layer, partition)
    return tuple(draw(st.permutations(shards)))


@st.composite
def _engine_pairs(draw: st.DrawFn) -> tuple[Engine, Engine]:
    """The shards of two engines that run one model, whose layers may differ or lack a cache."""
    heads = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, None]), min_size=1, max_size=5))
    heads[0] = heads[0] or 1
    if draw(st.booleans()):
        heads = [heads[0]] * len(heads)
    heads_by_layer = {layer: each for layer, each in enumerate(heads) if each is not None}
    engine = _engine(heads_by_layer, len(heads))
    return draw(engine), draw(engine)


def as_workers_say(engine: Engine) -> Engine:
    """The same shards, as far as a worker can tell them from its own number of heads."""
    tp_size = 1 + max(shard.rank.tp_rank for shard in engine)
    return tuple(
        Shard(
            shard.rank,
            {
                layer: holding_of_rank(
                    shard.rank.tp_rank, tp_size, len(holding.units), holding.tokens
                )
                for layer, holding in shard.holdings.items()
            },
        )
        for shard in engine
    )


@pytest.fixture(scope="session")
def engine_pairs() -> st.SearchStrategy[tuple[Engine, Engine]]:
    """A strategy for the shards of a source and a destination engine."""
    return _engine_pairs()

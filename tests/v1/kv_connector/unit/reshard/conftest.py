# SPDX-License-Identifier: Apache-2.0
"""Engines of random layouts, for tests of what must hold for any."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.mesh import ParallelMesh
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import Shard, shard_model


@st.composite
def _partitions(draw: st.DrawFn, num_layers: int) -> list[int]:
    """Layers per stage, of any number of stages, none of them empty."""
    cuts = draw(st.sets(st.integers(1, num_layers - 1))) if num_layers > 1 else set()
    edges = [0, *sorted(cuts), num_layers]
    return [stop - start for start, stop in pairwise(edges)]


@st.composite
def _engine(draw: st.DrawFn, num_layers: int, num_kv_heads: int) -> tuple[Shard, ...]:
    """The shards of an engine of any layout that vLLM could run, with the ranks in any order."""
    divisors = [size for size in range(1, num_kv_heads + 1) if num_kv_heads % size == 0]
    tp_size = draw(st.sampled_from([*divisors, 2 * num_kv_heads, 3 * num_kv_heads]))
    partition = draw(_partitions(num_layers))
    mesh = ParallelMesh(pp_size=len(partition), tp_size=tp_size)
    shards = shard_model(mesh, num_layers, num_kv_heads, partition)
    return tuple(draw(st.permutations(shards)))


@st.composite
def _engine_pairs(draw: st.DrawFn) -> tuple[tuple[Shard, ...], tuple[Shard, ...]]:
    """The shards of two engines that run one model."""
    num_layers, num_kv_heads = draw(st.integers(1, 6)), draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    engine = _engine(num_layers, num_kv_heads)
    return draw(engine), draw(engine)


@pytest.fixture(scope="session")
def engine_pairs() -> st.SearchStrategy[tuple[tuple[Shard, ...], tuple[Shard, ...]]]:
    """A strategy for the shards of a source and a destination engine."""
    return _engine_pairs()


@pytest.fixture
def caplog_vllm(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What vLLM logs, also where its loggers do not propagate to the root."""
    logger = logging.getLogger("vllm")
    caplog.set_level(logging.INFO, "vllm")
    if logger.propagate:
        yield caplog
        return
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)

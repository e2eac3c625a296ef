# SPDX-License-Identifier: Apache-2.0
"""Who holds which layers and heads, compared with what vLLM's own workers would hold."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.utils import get_pp_indices

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import LocalLayoutError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.mesh import MeshRank, ParallelMesh
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import (
    HeadInterval,
    Shard,
    heads_of_rank,
    partition_layers,
    shard_model,
)


def bounds(tp_size: int, num_kv_heads: int) -> list[tuple[int, int]]:
    """The head interval of every rank."""
    intervals = [heads_of_rank(rank, tp_size, num_kv_heads) for rank in range(tp_size)]
    return [(heads.start, heads.stop) for heads in intervals]


@pytest.mark.parametrize(
    ("tp_size", "num_kv_heads", "expected"),
    [
        (1, 6, [(0, 6)]),
        (2, 6, [(0, 3), (3, 6)]),
        (3, 6, [(0, 2), (2, 4), (4, 6)]),
        (4, 2, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (4, 1, [(0, 1)] * 4),
    ],
)
def test_worked_examples(tp_size, num_kv_heads, expected):
    """Few ranks share the heads out; many ranks replicate them in runs."""
    assert bounds(tp_size, num_kv_heads) == expected


@given(num_kv_heads=st.integers(1, 64), quotient=st.integers(1, 16), replicated=st.booleans())
def test_every_head_is_held_equally_often(num_kv_heads, quotient, replicated):
    """No head is lost, none is favoured, and every rank holds equally many."""
    if replicated:
        tp_size, holders, per_rank = num_kv_heads * quotient, quotient, 1
        total = num_kv_heads
    else:
        tp_size, holders, per_rank = num_kv_heads, 1, quotient
        total = num_kv_heads * quotient
    held = [head for start, stop in bounds(tp_size, total) for head in range(start, stop)]
    assert sorted(held) == sorted(list(range(total)) * holders)
    assert all(stop - start == per_rank for start, stop in bounds(tp_size, total))


@pytest.mark.parametrize(("tp_size", "num_kv_heads"), [(4, 6), (6, 4), (3, 2), (5, 8)])
def test_tp_size_that_does_not_fit_is_refused(tp_size, num_kv_heads):
    """VLLM could not run such a layout; the error names both values."""
    with pytest.raises(LocalLayoutError, match=f"size {tp_size} does not fit {num_kv_heads} KV"):
        heads_of_rank(0, tp_size, num_kv_heads)


def test_model_without_heads_is_refused():
    """A layer has at least one KV head."""
    with pytest.raises(LocalLayoutError, match="num_kv_heads is 0"):
        heads_of_rank(0, 1, 0)


@given(num_layers=st.integers(1, 100), pp_size=st.integers(1, 16))
def test_default_partition_is_vllms(num_layers, pp_size):
    """Every stage gets the layers that vLLM gives it, also where they cannot be shared evenly."""
    if pp_size > num_layers:
        with pytest.raises(LocalLayoutError, match="without a layer"):
            partition_layers(num_layers, pp_size)
        return
    stages = partition_layers(num_layers, pp_size)
    assert [(stage.start, stage.stop) for stage in stages] == [
        get_pp_indices(num_layers, pp_rank, pp_size) for pp_rank in range(pp_size)
    ]


def test_explicit_partition_is_taken(monkeypatch):
    """An uneven partition means what VLLM_PP_LAYER_PARTITION means."""
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "10,22")
    stages = partition_layers(32, 2, [10, 22])
    assert stages == [range(0, 10), range(10, 32)]
    assert [(stage.start, stage.stop) for stage in stages] == [
        get_pp_indices(32, pp_rank, 2) for pp_rank in range(2)
    ]


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ([10, 22], "2 entries but pipeline_parallel_size is 3"),
        ([10, 10, 10], "adds up to 30 layers but the model has 32"),
        ([16, 0, 16], "stage 1 without a layer"),
        ([33, -2, 1], "stage 1 without a layer"),
    ],
)
def test_impossible_partition_is_refused(partition, message):
    """The error says which entry or sum is wrong."""
    with pytest.raises(LocalLayoutError, match=message):
        partition_layers(32, 3, partition)


def test_shards_of_a_model():
    """Each rank holds its stage's layers, with its own heads of each."""
    shards = shard_model(ParallelMesh(pp_size=2, tp_size=2), num_layers=3, num_kv_heads=4)
    assert [(shard.rank, dict(shard.heads_by_layer)) for shard in shards] == [
        (MeshRank(0, 0), {0: HeadInterval(0, 2), 1: HeadInterval(0, 2)}),
        (MeshRank(0, 1), {0: HeadInterval(2, 4), 1: HeadInterval(2, 4)}),
        (MeshRank(1, 0), {2: HeadInterval(0, 2)}),
        (MeshRank(1, 1), {2: HeadInterval(2, 4)}),
    ]


def test_shards_are_values():
    """A shard cannot be changed, neither in place nor through the dictionary it was made of."""
    layers = {0: HeadInterval(0, 1)}
    shard = Shard(MeshRank(0, 0), layers)
    layers[1] = HeadInterval(0, 1)
    assert list(shard.heads_by_layer) == [0]
    with pytest.raises(TypeError):
        shard.heads_by_layer[1] = HeadInterval(0, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        shard.rank = MeshRank(1, 1)


@pytest.mark.parametrize(("start", "stop"), [(1, 1), (2, 1), (-1, 1)])
def test_empty_or_negative_intervals_do_not_exist(start, stop):
    """An interval holds at least one head."""
    with pytest.raises(ValueError, match="no interval"):
        HeadInterval(start, stop)

# SPDX-License-Identifier: Apache-2.0
"""How a plan is told to people."""

from __future__ import annotations

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.mesh import MeshRank, ParallelMesh
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.reshard import plan_reshard
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import Shard, shard_model
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.text import (
    describe_reads,
    layers_text,
    ranges_text,
    ranks_text,
)


def engine(*, pp: int = 1, tp: int = 1, heads: int = 1, layers: int = 4):
    """The shards of an engine."""
    return shard_model(ParallelMesh(pp, tp), layers, heads)


def test_reads_are_one_line():
    """What is read from whom, and who is only notified."""
    src, dst = engine(tp=4, pp=2, heads=2), engine(heads=2)
    assert describe_reads(plan_reshard(src, dst), MeshRank(0, 0)) == (
        "reads layers 0-1, heads [0, 1) from pp0tp0; layers 0-1, heads [1, 2) from pp0tp2; "
        "layers 2-3, heads [0, 1) from pp1tp0; layers 2-3, heads [1, 2) from pp1tp2; "
        "only notifies pp0tp1, pp0tp3, pp1tp1, pp1tp3"
    )


def test_rank_without_layers_reads_nothing():
    """A rank that holds no layer is described all the same."""
    src = engine()
    dst = [Shard(MeshRank(0, 0), src[0].holdings), Shard(MeshRank(1, 0), {})]
    assert describe_reads(plan_reshard(src, dst), MeshRank(1, 0)) == "reads nothing"


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ((3,), "layer 3"),
        ((0, 1, 2, 5), "layers 0-2, 5"),
        (("model.layers.3.attn", "model.layers.10.attn", "model.layers.4.attn"), "layers 3-4, 10"),
        (("model.layers.3.attn", "draft.layers.4.attn"), "2 layers"),
        (("blocks.1.layers.3", "blocks.1.layers.4"), "2 layers"),
        (("attention",), "1 layer"),
    ],
)
def test_layers_are_told_by_index_where_names_have_one(layers, text):
    """Names of one kind are told by their indices; others are counted."""
    assert layers_text(layers) == text


def test_ranges_and_ranks():
    """Neighbours are joined, ranks within their stage."""
    assert ranges_text([0, 1, 2, 4, 6, 7]) == "0-2, 4, 6-7"
    ranks = [MeshRank(1, 0), MeshRank(0, 1), MeshRank(0, 2), MeshRank(0, 4)]
    assert ranks_text(ranks) == "pp0tp1-2, pp0tp4, pp1tp0"

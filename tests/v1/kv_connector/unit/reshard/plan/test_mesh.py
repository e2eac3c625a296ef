# SPDX-License-Identifier: Apache-2.0
"""The grid of workers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import LocalLayoutError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.mesh import MeshRank, ParallelMesh


@given(pp_size=st.integers(1, 8), tp_size=st.integers(1, 8))
def test_ranks_are_in_the_order_of_their_global_rank(pp_size, tp_size):
    """The position of a rank is pp_rank * tp_size + tp_rank, and ranks sort in that order."""
    mesh = ParallelMesh(pp_size, tp_size)
    ranks = list(mesh.ranks())
    assert len(ranks) == len(set(ranks)) == mesh.world_size
    assert [rank.pp_rank * tp_size + rank.tp_rank for rank in ranks] == list(range(len(ranks)))
    assert sorted(ranks) == ranks


@pytest.mark.parametrize(("sizes", "axis"), [((0, 1), "pipeline"), ((1, -2), "tensor")])
def test_impossible_size_is_named(sizes, axis):
    """The error names the axis and the value."""
    with pytest.raises(LocalLayoutError, match=rf"{axis}_parallel_size is {min(sizes)} .* use 1"):
        ParallelMesh(*sizes)


def test_names_are_short():
    """Ranks and meshes read well in a log line."""
    assert str(MeshRank(1, 3)) == "pp1tp3"
    assert str(ParallelMesh(2, 4)) == "PP2 x TP4"

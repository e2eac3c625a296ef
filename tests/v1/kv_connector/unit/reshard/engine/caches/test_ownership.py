# SPDX-License-Identifier: Apache-2.0
"""What a worker makes of its own cache, layer by layer."""

from __future__ import annotations

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches.ownership import (
    Split,
    WorkerLayer,
    refuse_shared_names,
    shard_of_worker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import LocalLayoutError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.cache import LayerCache, Plane
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.mesh import MeshRank
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import (
    Holding,
    TokenShare,
    UnitInterval,
)


def layer(*heads: int, split: Split = Split.UNITS, shares_tokens: bool = False) -> WorkerLayer:
    """A layer whose planes have so many heads."""
    planes = tuple(Plane(0, 64, 64, 8, 8, each, 8) for each in heads)
    return WorkerLayer(LayerCache(planes, 0), split, shares_tokens)


def test_each_layer_counts_its_own_heads():
    """Several heads are a rank's own; a single one may be a neighbour's, too; a latent is all's."""
    layers = {"a": layer(3, 3), "b": layer(1), "c": layer(1, split=Split.LATENT)}
    shard = shard_of_worker(MeshRank(1, 2), 4, layers)
    assert shard.rank == MeshRank(1, 2)
    assert dict(shard.holdings) == {
        "a": Holding(UnitInterval(6, 9), 12),
        "b": Holding(UnitInterval(2, 3), 4, may_repeat=True),
        "c": Holding(UnitInterval(0, 1), 1),
    }


def test_ranks_that_share_tokens_out_have_one_head_among_them():
    """Two of four have a head's tokens each; blocks that are not looked into stay a rank's own."""
    share = TokenShare(1, 2, 16)
    layers = {
        "a": layer(1, shares_tokens=True),
        "b": layer(1),
        "c": layer(1, split=Split.LATENT, shares_tokens=True),
        "d": layer(1, split=Split.RANKS, shares_tokens=True),
    }
    shard = shard_of_worker(MeshRank(0, 3), 4, layers, share)
    assert dict(shard.holdings) == {
        "a": Holding(UnitInterval(1, 2), 2, True, share),
        "b": Holding(UnitInterval(3, 4), 4, may_repeat=True),
        "c": Holding(UnitInterval(0, 1), 1, tokens=share),
        "d": Holding(UnitInterval(3, 4), 4, tokens=share),
    }


def test_one_rank_knows_everything():
    """There is nobody who could have the same head."""
    shard = shard_of_worker(MeshRank(0, 0), 1, {"a": layer(1)})
    assert dict(shard.holdings) == {"a": Holding(UnitInterval(0, 1), 1)}


@pytest.mark.parametrize("unlike", [layer(2, 1), layer(2, split=Split.LATENT)])
def test_planes_that_are_not_split_alike_are_refused(unlike):
    """The layer is named, with what its planes have."""
    with pytest.raises(LocalLayoutError, match=r"layer a keeps .* not split alike"):
        shard_of_worker(MeshRank(0, 0), 2, {"a": unlike})


def test_layers_of_one_name_on_two_stages_are_refused():
    """Readers would take the one for the other; ranks of one stage may have the same."""
    first, second, other = (
        shard_of_worker(MeshRank(*rank), 2, {"a": layer(1)}) for rank in ((0, 0), (0, 1), (1, 0))
    )
    refuse_shared_names([first, second])
    with pytest.raises(LocalLayoutError, match="layer a is on stages 0 and 1"):
        refuse_shared_names([first, second, other])

# SPDX-License-Identifier: Apache-2.0
"""What a worker makes of its own cache, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from tests.v1.kv_connector.unit.reshard.engine.configs import stand_at
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches import ownership
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches.ownership import (
    Split,
    WorkerLayer,
    gather_shards,
    num_ranks_of_stage,
    rank_of_worker,
    refuse_shared_names,
    shard_of_worker,
    tokens_of_worker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import LocalLayoutError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.cache import LayerCache, Plane
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import (
    Holding,
    MeshRank,
    Shard,
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


def sizes(tp: int = 1, pcp: int = 1, dcp: int = 1) -> SimpleNamespace:
    """As much of a `ParallelConfig` as is looked at."""
    return SimpleNamespace(
        tensor_parallel_size=tp,
        prefill_context_parallel_size=pcp,
        decode_context_parallel_size=dcp,
        cp_kv_cache_interleave_size=16,
    )


@pytest.mark.parametrize(
    ("config", "places", "expected"),
    [
        # TP and PCP ranks, and the rank and the share that each is.
        (sizes(tp=2), [(0, 0), (1, 0)], [(0, 0), (1, 0)]),
        (sizes(tp=4, dcp=2), [(0, 0), (3, 0)], [(0, 0), (3, 1)]),
        (sizes(tp=2, pcp=2), [(0, 0), (1, 1)], [(0, 0), (1, 0)]),
        (sizes(pcp=2, dcp=2), [(0, 0), (0, 1)], [(0, 0), (1, 1)]),
        (
            sizes(tp=2, pcp=2, dcp=2),
            [(0, 0), (1, 0), (0, 1), (1, 1)],
            [(0, 0), (1, 0), (2, 1), (3, 1)],
        ),
        (
            sizes(tp=2, pcp=2, dcp=4),
            [(0, 0), (1, 0), (0, 1), (1, 1)],
            [(0, 0), (1, 2), (2, 1), (3, 3)],
        ),
    ],
    ids=["TP", "DCP", "replicas", "PCP", "TP replicas of PCP", "TP and PCP"],
)
def test_ranks_and_shares_are_those_of_vllm(monkeypatch, config, places, expected):
    """At the handshake, TP groups one behind another; in a group of DCP, PCP comes first."""
    found = []
    for tp_rank, pcp_rank in places:
        stand_at(monkeypatch, MeshRank(1, tp_rank), pcp_rank)
        rank, share = rank_of_worker(config), tokens_of_worker(config)
        assert rank.pp_rank == 1 and rank.tp_rank < num_ranks_of_stage(config)
        size = config.decode_context_parallel_size
        assert share == TokenShare(share.index, size, 16)
        found.append((rank.tp_rank, share.index))
    assert found == expected


@dataclass
class Group:
    """A group of vLLM's, as its second member sees it.

    Attributes:
        world_size: How many it has.
        step: How the rank of one differs from that of the next: stages, and ranks of a stage.
    """

    world_size: int
    step: tuple[int, int]
    rank_in_group: int = 1

    @property
    def cpu_group(self) -> Group:
        """What `torch.distributed` is given."""
        return self


def all_gather_object(parts: list, own: list, *, group: Group) -> None:
    """As torch's: the others have the same of other ranks."""
    for number in range(group.world_size):
        stages, ranks = (each * (number - group.rank_in_group) for each in group.step)
        parts[number] = [
            (MeshRank(rank.pp_rank + stages, rank.tp_rank + ranks), layers) for rank, layers in own
        ]


@pytest.mark.parametrize(("dcp", "num_ranks"), [(1, 2), (2, 4)], ids=["replicas", "shares"])
def test_every_rank_that_others_know_is_gathered(monkeypatch, dcp, num_ranks):
    """All stages, in the order of ranks; of replicas, those of the own PCP rank alone."""
    groups = {"tp": Group(2, (0, 1)), "pcp": Group(2, (0, 2)), "pp": Group(2, (1, 0))}
    for name, group in groups.items():
        monkeypatch.setattr(ownership, f"get_{name}_group", lambda group=group: group)
    monkeypatch.setattr(ownership.torch.distributed, "all_gather_object", all_gather_object)
    config = sizes(tp=2, pcp=2, dcp=dcp)
    shards = gather_shards(Shard(rank_of_worker(config), {}), config)
    assert [shard.rank for shard in shards] == [
        MeshRank(stage, rank) for stage in range(2) for rank in range(num_ranks)
    ]

# SPDX-License-Identifier: Apache-2.0
"""Which rank a worker is, and what is gathered from the others."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from tests.v1.kv_connector.unit.reshard.engine.configs import stand_at
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches import ranks as ranks_module
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches.ranks import (
    gather_shards,
    num_ranks_of_stage,
    rank_of_worker,
    tokens_of_worker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.mesh import MeshRank
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import Shard, TokenShare


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
        monkeypatch.setattr(ranks_module, f"get_{name}_group", lambda group=group: group)
    monkeypatch.setattr(ranks_module.torch.distributed, "all_gather_object", all_gather_object)
    config = sizes(tp=2, pcp=2, dcp=dcp)
    shards = gather_shards(Shard(rank_of_worker(config), {}), config)
    assert [shard.rank for shard in shards] == [
        MeshRank(stage, rank) for stage in range(2) for rank in range(num_ranks)
    ]

# SPDX-License-Identifier: Apache-2.0
"""The memory of an arena."""

from __future__ import annotations

import pytest
import torch

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import LocalLayoutError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.cache import (
    LayerCache,
    Plane,
    RankCache,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.mesh import ParallelMesh
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.reshard import plan_reshard
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import shard_model
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.description import (
    WorkerDescription,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.leases import LeaseTable
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport import staging_area
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.remote import (
    LocalCache,
    lower_engine,
)


def test_arena_is_memory_that_nixl_is_told_of():
    """Every byte can be written and read again, and NIXL is told where it lies."""
    size_bytes = 3 * 4096 + 1
    area = staging_area.open_area([torch.zeros(1)], size_bytes)
    assert area is not None
    assert area.region == (area.memory.data_ptr(), size_bytes, 0)
    area.memory.copy_(torch.arange(size_bytes) % 251)
    assert torch.equal(area.memory, (torch.arange(size_bytes) % 251).to(torch.uint8))
    area.copier.close()


@pytest.fixture
def vast():
    """An arena of more bytes than NIXL's indices can count, none of which is touched."""
    memory = torch.empty(1 << 31, dtype=torch.uint8)
    return staging_area.StagingArea(memory, copier=None)


def test_arena_of_more_descriptors_than_nixl_counts_is_refused(vast):
    """The message says how large it may be; half as many, of two bytes each, are few enough."""
    with pytest.raises(LocalLayoutError, match=r"is 2147483648 descriptors of 1 bytes.*2147483647"):
        vast.rows(1)
    assert vast.rows(2)[0, 4] == 1 << 30


@pytest.mark.parametrize(("slot_bytes", "is_staged"), [(1, False), (2, True)])
def test_legs_of_very_small_slots_go_direct(vast, caplog_vllm, slot_bytes, is_staged):
    """An engine whose descriptors the arena has too many of is read from without it."""
    (shard,) = shards = shard_model(ParallelMesh(1, 1), 1, 1)
    # One slot to a block, and blocks that do not adjoin.
    plane = Plane(1 << 40, 8, slot_bytes, slot_bytes, slot_bytes, 1, 1)
    cache = RankCache(64, 0, {0: LayerCache((plane,), 0)})
    description = WorkerDescription("engine", shard, cache, LeaseTable(16).address, b"")
    local = LocalCache(shard.rank, cache, frozenset())
    lowered = lower_engine({shard.rank: description}, plan_reshard(shards, shards), local, vast)
    ((leg,),) = (worker.legs for worker in lowered.workers)
    assert (leg.staged is not None) is is_staged
    assert ("Reads of a leg go direct" in caplog_vllm.text) is not is_staged

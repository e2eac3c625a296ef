# SPDX-License-Identifier: Apache-2.0
"""The copies between an arena and a cache; what they copy is judged in `test_staging`."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import LocalLayoutError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.cache import (
    LayerCache,
    Plane,
    RankCache,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.staging import ArenaCopy
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.reshard import plan_reshard
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import (
    ParallelMesh,
    shard_model,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.description import (
    WorkerDescription,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.leases import LeaseTable
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport import arena as arena_module
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.arena import (
    ArenaCopier,
    device_memory,
    host_memory,
    scatter,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.remote import (
    LocalCache,
    lower_engine,
)


def pieces(dst: torch.Tensor, targets: list[int]) -> ArenaCopy:
    """A copy of pieces of 8 bytes from the arena's beginning to these places."""
    return ArenaCopy(
        8 * np.arange(len(targets)),
        dst.data_ptr() + np.array(targets),
        num_heads=1,
        num_slots=1,
        slot_bytes=8,
        arena_strides_bytes=(0, 0),
        cache_strides_bytes=(0, 0),
    )


@pytest.mark.parametrize("memory_of", [host_memory, device_memory])
def test_caches_may_lie_anywhere(memory_of):
    """Chunks of one copy go to several allocations, in any order of theirs."""
    arena = torch.arange(64, dtype=torch.uint8)
    caches = [torch.zeros(4096, dtype=torch.uint8) for _ in range(3)]
    base = caches[0]
    targets = [(cache.data_ptr() - base.data_ptr()) + 16 * n for n, cache in enumerate(caches)]
    scatter(pieces(base, targets), arena, memory_of(caches))
    for number, cache in enumerate(caches):
        expected = torch.zeros_like(cache)
        expected[16 * number : 16 * number + 8] = arena[8 * number : 8 * number + 8]
        assert torch.equal(cache, expected)


def test_copy_on_the_host_is_made_when_it_is_submitted():
    """There is nothing to wait for; one to a place outside of the caches fails alone."""
    arena, cache = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    copies = ArenaCopier(arena, [cache])
    with pytest.raises(IndexError):
        copies.scatter(pieces(cache, [1 << 40]))
    assert copies.scatter(pieces(cache, [8])) is None
    assert cache[8:16].tolist() == list(range(8))
    copies.close()


def test_memory_is_kept_for_as_long_as_copies_may_be_made():
    """No copy writes into memory that has another owner by then."""
    cache = torch.zeros(64, dtype=torch.uint8)
    kept = weakref.ref(cache)
    copies = ArenaCopier(torch.zeros(64, dtype=torch.uint8), [cache])
    del cache
    assert kept() is not None
    del copies
    assert kept() is None


def test_arena_is_memory_that_nixl_is_told_of():
    """Every byte can be written and read again, and NIXL is told where it lies."""
    size_bytes = 3 * 4096 + 1
    area = arena_module.open_area([torch.zeros(1)], size_bytes)
    assert area is not None
    assert area.region == (area.memory.data_ptr(), size_bytes, 0)
    area.memory.copy_(torch.arange(size_bytes) % 251)
    assert torch.equal(area.memory, (torch.arange(size_bytes) % 251).to(torch.uint8))
    area.copier.close()


@pytest.fixture
def vast():
    """An arena of more bytes than NIXL's indices can count, none of which is touched."""
    memory = torch.empty(1 << 31, dtype=torch.uint8)
    return arena_module.StagingArea(memory, copier=None)


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

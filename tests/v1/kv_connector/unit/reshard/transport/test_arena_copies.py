# SPDX-License-Identifier: Apache-2.0
"""The copies between an arena and a cache; what they copy is judged in `test_staging`."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.staging import ArenaCopy
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.arena_copies import (
    ArenaCopier,
    device_memory,
    host_memory,
    scatter,
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

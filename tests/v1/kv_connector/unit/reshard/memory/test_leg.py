# SPDX-License-Identifier: Apache-2.0
"""Which descriptors of a leg move a request's blocks; that they are right, `test_lowering` says."""

from __future__ import annotations

import numpy as np

from tests.v1.kv_connector.unit.reshard.memory.cases import NUM_BLOCKS, Memory, read, select, span
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.lowering import lower_read


def test_adjoining_blocks_stay_adjoining():
    """Descriptors follow the sequence within each plane, so that neighbours can be merged."""
    memory = Memory("HND", 2, 4)
    (leg,) = lower_read(read(2), memory.cache(), memory.cache())
    src_indices, _ = leg.indices(select(leg, [span([3, 4, 5])], [span([7, 8, 9])]))
    assert src_indices.tolist() == [
        row * NUM_BLOCKS + block for row in range(4) for block in (3, 4, 5)
    ]


def test_prefix_that_is_already_here_is_not_read():
    """Where the destination's blocks begin later, the source's earlier blocks are skipped."""
    src, dst = Memory("HND", 1, 4), Memory("HND", 1, 8)
    (leg,) = lower_read(read(1), src.cache(), dst.cache())
    src_indices, dst_indices = leg.indices(
        select(leg, [span([0, 1, 2, 3, 4])], [span([6], start_token=8)])
    )
    assert sorted({int(index) % NUM_BLOCKS for index in src_indices}) == [2, 3]
    assert {int(index) % NUM_BLOCKS for index in dst_indices} == {6}


def test_nothing_in_common_is_nothing_to_read():
    """A full prefix-cache hit leaves no blocks to fill and no descriptors."""
    memory = Memory("HND", 1, 4)
    (leg,) = lower_read(read(1), memory.cache(), memory.cache())
    for indices in leg.indices(select(leg, [span([1, 2])], [span([])])):
        assert indices.dtype == np.int32
        assert indices.size == 0

# SPDX-License-Identifier: Apache-2.0
"""Which way a read goes."""

from __future__ import annotations

from hypothesis import given

from tests.v1.kv_connector.unit.reshard.memory.cases import counts, policies
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.strategy import (
    StagingPolicy,
    Strategy,
)

MIB = 1 << 20


@given(policies, counts, counts, counts)
def test_only_reads_of_many_small_descriptors_that_merge_are_staged(
    policy, num_bytes, num_direct, num_staged
):
    """Each threshold alone is enough for a direct read."""
    if policy.choose(num_bytes, num_direct, num_staged) is Strategy.STAGED:
        assert num_direct >= policy.min_descriptors
        assert num_bytes / num_direct <= policy.max_descriptor_bytes
        assert num_direct / num_staged >= policy.min_merge_factor
    else:
        assert (
            num_direct < policy.min_descriptors
            or num_bytes / num_direct > policy.max_descriptor_bytes
            or num_direct / num_staged < policy.min_merge_factor
        )


@given(policies, counts, counts, counts, counts, counts)
def test_more_to_merge_speaks_for_staging(policy, num_bytes, num_direct, num_staged, more, fewer):
    """What is staged is staged as well with more direct descriptors, and fewer staged ones."""
    if policy.choose(num_bytes, num_direct, num_staged) is Strategy.STAGED:
        fewest = max(num_staged - fewer, 1)
        assert policy.choose(num_bytes, num_direct + more, fewest) is Strategy.STAGED


def test_defaults_stage_small_pages_of_large_reads_only():
    """64 MiB in pages of 2 KiB that do not adjoin here, in pages of 8 KiB, and a few pages."""
    choose = StagingPolicy().choose
    assert choose(64 * MIB, 64 * MIB // 2048, 64) is Strategy.STAGED
    assert choose(64 * MIB, 64 * MIB // 8192, 64) is Strategy.DIRECT
    assert choose(64 * 2048, 64, 2) is Strategy.DIRECT


def test_a_flood_of_tiny_descriptors_is_staged_however_few_bytes_it_has():
    """The state of 36 convolutions of 8,192 channels and 3 rows, transposed on its way."""
    num_direct = 36 * 8192 * 3
    assert StagingPolicy().choose(2 * num_direct, num_direct, 36 * 3) is Strategy.STAGED

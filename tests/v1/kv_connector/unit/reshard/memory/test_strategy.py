# SPDX-License-Identifier: Apache-2.0
"""Which way a read goes."""

from __future__ import annotations

from hypothesis import given

from tests.v1.kv_connector.unit.reshard.memory.cases import counts, policies
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.strategy import (
    StagingPolicy,
    Strategy,
    Work,
)

MIB = 1 << 20


@given(policies, counts, counts, counts)
def test_only_large_reads_of_small_descriptors_that_merge_are_staged(
    policy, num_bytes, num_direct, num_staged
):
    """Each threshold alone is enough for a direct read."""
    direct, staged = Work(num_direct, num_bytes), Work(num_staged, num_bytes)
    if policy.choose(direct, staged) is Strategy.STAGED:
        assert num_bytes >= policy.min_bytes
        assert num_bytes / num_direct <= policy.max_descriptor_bytes
        assert num_direct / num_staged >= policy.min_merge_factor
    else:
        assert (
            num_bytes < policy.min_bytes
            or num_bytes / num_direct > policy.max_descriptor_bytes
            or num_direct / num_staged < policy.min_merge_factor
        )


@given(policies, counts, counts, counts, counts, counts)
def test_more_to_merge_speaks_for_staging(policy, num_bytes, num_direct, num_staged, more, fewer):
    """What is staged is staged as well with more direct descriptors, and fewer staged ones."""
    if policy.choose(Work(num_direct, num_bytes), Work(num_staged, num_bytes)) is Strategy.STAGED:
        direct = Work(num_direct + more, num_bytes)
        staged = Work(max(num_staged - fewer, 1), num_bytes)
        assert policy.choose(direct, staged) is Strategy.STAGED


def test_defaults_stage_small_pages_of_large_reads_only():
    """64 MiB in pages of 2 KiB that do not adjoin here, in pages of 8 KiB, and a few pages."""
    choose, merged = StagingPolicy().choose, Work(64, 64 * MIB)
    assert choose(Work(64 * MIB // 2048, 64 * MIB), merged) is Strategy.STAGED
    assert choose(Work(64 * MIB // 8192, 64 * MIB), merged) is Strategy.DIRECT
    assert choose(Work(64, 64 * 2048), Work(2, 64 * 2048)) is Strategy.DIRECT

# SPDX-License-Identifier: Apache-2.0
"""The checker finds what is wrong with a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tools.verify import verify_plan
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.reshard import (
    ReleaseQuorum,
    plan_reshard,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import (
    Holding,
    MeshRank,
    ParallelMesh,
    Shard,
    UnitInterval,
    holding_of_rank,
    shard_model,
)

SRC = shard_model(ParallelMesh(pp_size=2, tp_size=3), num_layers=4, num_kv_heads=6)
DST = shard_model(ParallelMesh(pp_size=1, tp_size=2), num_layers=4, num_kv_heads=6)
PLAN = plan_reshard(SRC, DST)
STRANGER = MeshRank(9, 9)


def with_read(**changes):
    """The plan with its first read changed."""
    return replace(PLAN, reads=(replace(PLAN.reads[0], **changes), *PLAN.reads[1:]))


def with_release(position: int, *notifiers: MeshRank):
    """The plan with the notifiers of one source rank replaced."""
    releases = list(PLAN.releases)
    releases[position] = replace(releases[position], notifiers=notifiers)
    return replace(PLAN, releases=tuple(releases))


def uncounted(tp_size):
    """An engine with one head of its only layer on every rank."""
    return [
        Shard(MeshRank(0, rank), {0: holding_of_rank(rank, tp_size, 1)}) for rank in range(tp_size)
    ]


def test_plan_must_be_right_for_every_number_of_heads():
    """A read that is right for one head, and not for two, is found."""
    src, dst = uncounted(2), uncounted(2)
    plan = plan_reshard(src, dst)
    assert verify_plan(src, dst, plan) == []
    swapped = replace(plan, reads=(replace(plan.reads[0], src_rank=MeshRank(0, 1)), plan.reads[1]))
    (fault, *_) = verify_plan(src, dst, swapped)
    assert "source offset 0 holds heads [1], destination offset 0 holds heads [0]" in fault


def test_shares_of_tokens_must_be_what_ranks_hold():
    """A read that takes its rank's tokens for others is found, and so is what nobody reads then."""
    src = shard_model(ParallelMesh(1, 4), 1, 1, None, 4, 2)
    dst = shard_model(ParallelMesh(1, 2), 1, 1, None, 2, 4)
    plan = plan_reshard(src, dst)
    assert verify_plan(src, dst, plan) == []
    first, *others = plan.reads
    wrong = replace(first, src_tokens=replace(first.src_tokens, index=3))
    faults = verify_plan(src, dst, replace(plan, reads=(wrong, *others)))
    assert "takes it that pp0tp0 holds tokens 3 of 4 by 2, but it holds 0 of 4 by 2" in faults[1]
    assert faults[0] == "head 0 of layer 0, tokens 0 of 2 by 4, on pp0tp0 is read 0 times, not once"
    faults = verify_plan(src, dst, replace(plan, reads=(first, *plan.reads)))
    assert faults == ["head 0 of layer 0, tokens 0 of 2 by 4, on pp0tp0 is read 2 times, not once"]


def test_ranks_that_contradict_each_other_are_found():
    """There is no number of heads that is 2 and 3."""
    two, three = (
        [Shard(MeshRank(0, 0), {0: Holding(UnitInterval(0, count), count)})] for count in (2, 3)
    )
    faults = verify_plan(two, three, plan_reshard(two, two))
    assert "layer 0 has no number of heads that fits what all ranks say of it" in faults


def test_right_plan_has_no_faults():
    """The plan that the other tests break is right to begin with."""
    assert verify_plan(SRC, DST, PLAN) == []


PLANTED = [
    (replace(PLAN, reads=PLAN.reads[1:]), "head 0 of layer 0 on pp0tp0 is read 0 times"),
    (replace(PLAN, reads=PLAN.reads * 2), "head 0 of layer 0 on pp0tp0 is read 2 times"),
    (with_read(src_unit_offset=1), "source offset 1 holds heads"),
    (with_read(src_unit_offset=-2), "source offset -2 holds heads"),
    (with_read(dst_unit_offset=1), "destination offset 1 holds heads"),
    (
        with_read(src_rank=MeshRank(0, 1)),
        "source offset 0 holds heads [2, 3], destination offset 0 holds heads [0, 1]",
    ),
    (with_read(src_rank=MeshRank(1, 0)), "source offset 0 holds heads []"),
    (with_read(src_rank=STRANGER), "source offset 0 holds heads []"),
    (with_read(dst_rank=STRANGER), "destination offset 0 holds heads []"),
    (with_read(layers=(0,)), "head 0 of layer 1 on pp0tp0 is read 0 times"),
    (with_read(units=UnitInterval(0, 1)), "head 1 of layer 0 on pp0tp0 is read 0 times"),
    (with_release(0), "source pp0tp0 is released by no rank"),
    (with_release(0, MeshRank(0, 1)), "source pp0tp0 does not wait for its reader pp0tp0"),
    (with_release(1, MeshRank(0, 0)), "source pp0tp1 does not wait for its reader pp0tp1"),
    (with_release(0, MeshRank(0, 0), STRANGER), "source pp0tp0 waits for unknown pp9tp9"),
    (with_release(0, MeshRank(0, 0), MeshRank(0, 0)), "source pp0tp0 counts a notifier twice"),
    (replace(PLAN, releases=PLAN.releases[1:]), "source pp0tp0 has 0 release entries, not one"),
    (replace(PLAN, releases=PLAN.releases * 2), "source pp0tp0 has 2 release entries, not one"),
    (
        replace(PLAN, releases=(*PLAN.releases, ReleaseQuorum(STRANGER, (MeshRank(0, 0),)))),
        "release of pp9tp9, which is no source rank",
    ),
]
"""Broken plans, and what the checker says of each."""


@pytest.mark.parametrize(("broken", "fault"), PLANTED)
def test_fault_is_found_and_named(broken, fault):
    """Each way to break a plan is reported in a readable line."""
    faults = verify_plan(SRC, DST, broken)
    assert any(fault in line for line in faults), faults

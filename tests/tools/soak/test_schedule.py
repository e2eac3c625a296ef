# SPDX-License-Identifier: Apache-2.0
"""The planner of the nemesis is a function of its seed, and leaves no kind of fault out."""

from __future__ import annotations

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from tools.soak import schedule
from tools.soak.faults import (
    EARLY,
    FLEET,
    RELAYOUTS,
    ROUTER,
    TARGET_ROLES,
    FaultKind,
    Role,
)
from tools.soak.fleet import FleetSettings
from tools.soak.schedule import PLACEMENTS, SEATS, plan
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.lifetimes import PEER_GRACE_S

seeds = st.integers(0, 1 << 32)
some_kinds = st.lists(st.sampled_from(FaultKind), min_size=1, unique=True)


@given(seeds, some_kinds, st.randoms())
def test_seed_says_everything(seed, kinds, rng):
    """The same seed gives the same rounds, in whatever order the faults were named."""
    first = list(islice(plan(seed, kinds, SEATS), 40))
    rng.shuffle(kinds)
    assert list(islice(plan(seed, kinds, SEATS), 40)) == first


def test_other_seeds_give_other_rounds():
    """Nobody gets the same soak again and again."""
    starts = {tuple(islice(plan(seed, list(FaultKind), SEATS), 3)) for seed in range(50)}
    assert len(starts) == 50


@given(seeds, some_kinds)
def test_every_kind_comes_once_before_any_comes_again(seed, kinds):
    """However short a soak is, faults are spread evenly over it."""
    rounds = plan(seed, kinds, SEATS)
    for _ in range(3):
        assert {each.fault.kind for each in islice(rounds, len(kinds))} == set(kinds)


@given(seeds)
def test_faults_strike_whom_they_can(seed):
    """A target has the role that its fault is for, and rounds are counted from 1."""
    roles = {seat.name: seat.role for seat in SEATS}
    for number, each in enumerate(islice(plan(seed, list(FaultKind), SEATS), 60), start=1):
        assert each.number == number
        assert roles.get(each.fault.target) is TARGET_ROLES.get(each.fault.kind)
        assert each.fault.kind not in EARLY or each.fault.target == "prefill-1"
        everybody = FLEET if each.fault.kind is FaultKind.ROLL else ROUTER
        assert (each.fault.target == everybody) == (each.fault.kind not in TARGET_ROLES)
        assert 0 < each.fault.hold_s <= schedule.LONGEST_HOLD_S
        assert bool(each.fault.forgeries) == (each.fault.kind is FaultKind.FORGED_PARAMS)


@given(seeds)
def test_other_layout_is_another_one(seed):
    """An engine that is laid out anew has not the layout that it had."""
    placements = {seat.name: seat.placement for seat in SEATS}
    for each in islice(plan(seed, list(FaultKind), SEATS), 80):
        fault = each.fault
        assert (fault.placement is not None) == (fault.kind in RELAYOUTS)
        if fault.placement is not None:
            assert fault.placement in PLACEMENTS
            assert fault.placement != placements[fault.target]
            placements[fault.target] = fault.placement


@given(seeds)
def test_stopped_worker_outlasts_those_who_read_from_it(seed):
    """Else their requests would end because it goes on, and not because of a deadline.

    But it goes on before they cut the connection, over which it would be ended.
    """
    kinds = [FaultKind.STOP_PREFILL_WORKER]
    limit_s = FleetSettings().read_timeout_s
    for each in islice(plan(seed, kinds, SEATS), 5):
        assert limit_s < schedule.FAILED_READ_LIMIT_S < each.fault.hold_s
        assert each.fault.hold_s < limit_s + PEER_GRACE_S


def test_four_engines_have_four_layouts():
    """Two of each role, and no two of them alike."""
    assert len({seat.placement for seat in SEATS}) == len(SEATS) == 4
    assert [seat.role for seat in SEATS].count(Role.PREFILL) == 2

# SPDX-License-Identifier: Apache-2.0
"""Many small worlds in which everything goes wrong that may, and nothing that must not.

`RESHARD_SCHEDULES` says how many are run, and `RESHARD_FIRST_SEED` where they begin: a failure
names its seed, which repeats it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.v1.kv_connector.unit.reshard.simulation.running import (
    NUM_SCHEDULES_OF_MAKE_TEST,
    run,
    simulated,
)
from tests.v1.kv_connector.unit.reshard.simulation.schedule import Simulation
from tests.v1.kv_connector.unit.reshard.simulation.wire import Violation

NUM_SCHEDULES = int(os.environ.get("RESHARD_SCHEDULES", NUM_SCHEDULES_OF_MAKE_TEST))
FIRST_SEED = int(os.environ.get("RESHARD_FIRST_SEED", "0"))

CROWDED = {"prefill": 9.0, "read": 12.0, "fail_read": 1.0, "move": 6.0}
"""Many are read from at once, and a lane breaks now and then, which all of them share."""


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """Nothing is logged of what goes wrong on purpose."""
    with simulated():
        yield


def test_no_schedule_violates_an_invariant():
    """Bytes land where they may, requests end once and in time, and everything comes back."""
    counts: Counter[str] = Counter()
    for seed in range(FIRST_SEED, FIRST_SEED + NUM_SCHEDULES):
        simulation = run(seed, **(CROWDED if seed % 4 == 0 else {}))
        counts["received"] += simulation.num_received
        counts["failed"] += simulation.num_failed
        counts["neighbours served"] += simulation.num_neighbours_served
        counts["early"] += simulation.num_early
        counts["prefetched"] += simulation.num_prefetched
        counts["read packed"] += simulation.num_read_packed
    # Schedules in which nothing happens prove nothing.
    assert counts["early"] > NUM_SCHEDULES // 20, counts
    assert counts["prefetched"] > NUM_SCHEDULES // 100, counts
    assert counts["read packed"] > NUM_SCHEDULES // 10, counts
    # The rarest of these: some 15 in 1,000 crowded schedules, and one in 1,000 others.
    assert counts["neighbours served"] > NUM_SCHEDULES // 2500, counts
    assert min(counts["received"], counts["failed"]) > NUM_SCHEDULES // 3, counts


@pytest.mark.parametrize("seed", range(5))
def test_seed_repeats_a_schedule(seed):
    """Event by event: nothing depends on time, addresses, or the order of sets."""
    assert run(seed).trace == run(seed).trace


def test_failure_tells_its_seed_and_its_schedule(monkeypatch):
    """Whoever sees it can run it again."""

    def fail(self: Simulation) -> None:
        raise AssertionError("something is wrong")

    monkeypatch.setattr(Simulation, "_wait_until_over", fail)
    with pytest.raises(Violation, match=r"seed 7: AssertionError: something is wrong\nstarts pref"):
        run(7)

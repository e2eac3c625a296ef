# SPDX-License-Identifier: Apache-2.0
"""When an engine's core need take no steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.v1.kv_connector.unit.reshard.transport.channels import HOST, wait_until
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.scheduling.idling import (
    LONGEST_REST_S,
    Idling,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.doorbell import Ringer

STEPS = 2


class Core:
    """An engine's core, which says how long it may wait.

    Attributes:
        num_wakeups: how often it was woken.
    """

    def __init__(self, num_workers: int = 1) -> None:
        self.idling = Idling()
        self._num_workers = num_workers
        self.num_wakeups = 0
        self._ringers: list[Ringer] = []

    def begin(self, num_ringers: int = 1) -> None:
        """Let it rest, with so many workers that can wake it."""
        self.idling.begin(
            HOST, self._wake, num_workers=self._num_workers, max_concurrent_steps=STEPS
        )
        address = self.idling.take_address()
        assert address is not None and self.idling.take_address() is None
        self._ringers = [Ringer(address, f"worker {each}") for each in range(num_ringers)]
        wait_until(lambda: self.num_wakeups == num_ringers)
        # These were rings, too.
        assert self.idling.timeout_s(0, 0, 0) is None

    def ring(self) -> None:
        """Be woken by a worker."""
        num_wakeups = self.num_wakeups
        self._ringers[0].ring()
        wait_until(lambda: self.num_wakeups > num_wakeups)

    def step(
        self, waiting: int = 0, parked: int = 0, loading: int = 0, running: int = 0, idle=True
    ) -> float | None:
        """Take a step; returns how long it may wait after it."""
        for _ in range(parked):
            self.idling.defer()
        assert self.idling.end_schedule(is_idle=idle) == (idle and bool(self._ringers))
        return self.idling.timeout_s(running, waiting, loading)

    def rest(self, **requests: int) -> None:
        """Take steps until it may rest."""
        assert [self.step(**requests) for _ in range(STEPS)][-1] == LONGEST_REST_S

    def close(self) -> None:
        """End its sockets."""
        for each in self._ringers:
            each.close()
        self.idling.close()

    def _wake(self) -> None:
        self.num_wakeups += 1


@pytest.fixture
def core() -> Iterator[Core]:
    """One of one worker."""
    made = Core()
    yield made
    made.close()


@pytest.mark.parametrize(
    "requests",
    [{}, {"waiting": 2, "parked": 2}, {"waiting": 3, "parked": 1, "loading": 2}],
    ids=["blocks are held", "parked", "parked and loading"],
)
def test_rests_where_all_wait_for_workers(core, requests):
    """It does after as many idle steps as may be under way at once."""
    core.begin()
    assert [core.step(**requests) for _ in range(STEPS)] == [None] * (STEPS - 1) + [LONGEST_REST_S]


@pytest.mark.parametrize(
    "requests",
    [
        {"running": 1},
        {"waiting": 1},
        {"waiting": 2, "parked": 1},
        {"waiting": 1, "loading": 2},
        {"waiting": 1, "parked": 1, "idle": False},
    ],
    ids=[
        "computed",
        "waits for room",
        "one of two",
        "ended while it is read",
        "asks for more",
    ],
)
def test_does_not_rest_where_there_may_be_something_to_do(core, requests):
    """It takes steps as often as vLLM does."""
    core.begin()
    assert {core.step(**requests) for _ in range(5)} == {None}


def test_what_was_parked_in_an_earlier_step_does_not_count(core):
    """A request that found room is none that waits for another engine."""
    core.begin()
    core.rest(waiting=1, parked=1)
    assert core.step(waiting=1) is None


@pytest.mark.parametrize("news", ["rung", "heard", "computed"])
def test_news_are_followed_by_as_many_steps_as_tell_them(core, news):
    """One that is under way may have taken them along."""
    core.begin()
    core.rest()
    if news == "rung":
        core.ring()
    elif news == "heard":
        core.idling.hear()
    else:
        core.step(idle=False)
    if news == "rung":
        assert core.idling.timeout_s(0, 0, 0) is None
    core.rest()


def test_does_not_rest_before_all_workers_can_wake_it():
    """One that has not rung would not be heard."""
    core = Core(num_workers=2)
    core.begin(num_ringers=1)
    assert {core.step() for _ in range(5)} == {None}
    core.close()


def test_does_not_rest_where_nothing_ends_it(core):
    """As without the hook, which the plugin has not."""
    assert {core.step() for _ in range(5)} == {None}

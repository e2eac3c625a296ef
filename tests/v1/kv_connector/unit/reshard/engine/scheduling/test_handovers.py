# SPDX-License-Identifier: Apache-2.0
"""How long requests wait for their first token once their prompt is offered."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.scheduling.handovers import (
    Handovers,
)


class Clock:
    """A clock that a test sets."""

    now_s = 100.0

    def __call__(self) -> float:
        """What it shows."""
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    """Shows 100 s."""
    return Clock()


@pytest.fixture
def recorded() -> list[float]:
    """What was recorded."""
    return []


@pytest.fixture
def handovers(clock, recorded) -> Handovers:
    """A decode engine's."""
    return Handovers(recorded.append, clock)


def request(request_id: str = "a") -> SimpleNamespace:
    """One without a token."""
    return SimpleNamespace(request_id=request_id, num_output_tokens=0)


def test_serial_request_is_handed_over_from_its_arrival_on(handovers, clock, recorded):
    """Its prompt is offered by then, though workers hear of it later."""
    read = request()
    handovers.begin(read, is_early=False)
    clock.now_s += 2.0
    handovers.hear({"a": 0.5})
    handovers.advance()
    clock.now_s += 1.0
    handovers.advance()
    assert recorded == []
    read.num_output_tokens = 1
    handovers.advance()
    handovers.advance()
    assert recorded == [3.0] and len(handovers) == 0


def test_early_request_is_handed_over_from_its_offer_on(handovers, clock, recorded):
    """As long ago as a worker has seen it."""
    read = request()
    handovers.begin(read, is_early=True)
    clock.now_s += 60.0
    handovers.hear({"a": 0.25, "ended": 0.5})
    clock.now_s += 0.5
    read.num_output_tokens = 1
    handovers.advance()
    assert recorded == [0.75]


def test_first_worker_that_has_seen_the_offer_counts(handovers, clock, recorded):
    """Though the others tell of it in later steps."""
    read = request()
    handovers.begin(read, is_early=True)
    handovers.hear({"a": 0.5})
    clock.now_s += 0.25
    handovers.hear({"a": 0.25})
    read.num_output_tokens = 1
    handovers.advance()
    assert recorded == [0.75]


def test_request_that_ends_with_its_first_token_counts(handovers, clock, recorded):
    """No step follows in which it would be seen."""
    read = request()
    handovers.begin(read, is_early=False)
    handovers.hear({"a": 0.0})
    clock.now_s += 1.0
    read.num_output_tokens = 1
    handovers.finish("a")
    assert recorded == [1.0] and len(handovers) == 0


def test_request_without_a_token_does_not_count(handovers, recorded):
    """Its client has left."""
    handovers.begin(request(), is_early=False)
    handovers.hear({"a": 0.0})
    handovers.finish("a")
    assert recorded == [] and len(handovers) == 0


@pytest.mark.parametrize("has_failed", [False, True])
def test_request_that_is_computed_here_does_not_count(handovers, recorded, has_failed):
    """Nothing was left to be read of it, or one worker could not read it."""
    computed = request()
    handovers.begin(computed, is_early=True)
    if has_failed:
        handovers.hear({"a": 0.0})
        handovers.fail(["a", "another"])
    computed.num_output_tokens = 1
    handovers.advance()
    handovers.finish("a")
    assert recorded == [] and len(handovers) == 0

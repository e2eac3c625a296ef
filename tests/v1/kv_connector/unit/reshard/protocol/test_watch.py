# SPDX-License-Identifier: Apache-2.0
"""How a reader waits for a request that another engine computes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.board import State
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.watch import (
    BELIEVED_AFTER_S,
    COMPUTED_WITHIN_S,
    KNOWN_WITHIN_S,
    OFFERED_WITHIN_S,
    Watch,
)

GOOD = (State.KNOWN, State.LAST_CHUNK, State.OFFERED)
BAD = tuple(state for state in State if state.fault is not None)


def test_request_goes_on():
    """It has blocks from when its last chunk is computed."""
    watch = Watch(0.0)
    seen = []
    for at_s, state in enumerate((None, *GOOD)):
        assert watch.see(state, float(at_s)) is None and watch.overdue(float(at_s)) is None
        seen.append(watch.may_have_blocks)
    assert seen == [False, False, True, True]


@pytest.mark.parametrize("state", BAD)
@pytest.mark.parametrize("before", GOOD[:2])
def test_end_of_what_was_known_is_believed_at_once(before, state):
    """It is this request's."""
    watch = Watch(0.0)
    watch.see(before, 0.001)
    assert watch.see(state, 0.002) == state.fault


@pytest.mark.parametrize("state", BAD)
def test_end_that_is_seen_first_may_be_an_earlier_requests(state):
    """It is believed once the producer has had time to take it down."""
    watch = Watch(0.0)
    assert watch.see(state, 0.1) is None
    assert watch.see(state, BELIEVED_AFTER_S) == state.fault


def test_request_that_is_not_known_in_time():
    """The message says what to look at."""
    watch = Watch(0.0)
    assert watch.see(None, KNOWN_WITHIN_S - 0.01) is None
    assert watch.overdue(KNOWN_WITHIN_S - 0.01) is None
    assert "early_dispatch on both" in watch.overdue(KNOWN_WITHIN_S)


def test_engine_that_is_not_heard_of():
    """However far the request was."""
    watch = Watch(0.0)
    watch.see(State.LAST_CHUNK, 100.0)
    assert watch.overdue(100.0 + KNOWN_WITHIN_S - 0.01) is None
    assert "could not be looked at" in watch.overdue(100.0 + KNOWN_WITHIN_S)


def test_reader_that_stood_still_has_not_waited():
    """Nobody could look meanwhile."""
    watch = Watch(0.0)
    watch.stood_still(60.0)
    assert watch.overdue(60.0) is None
    assert watch.overdue(60.0 + KNOWN_WITHIN_S) is not None


def test_entry_that_was_there_and_is_not_is_gone():
    """It is never missing while it is changed."""
    watch = Watch(0.0)
    assert watch.see(None, 1.0) is None
    watch.see(State.LAST_CHUNK, 2.0)
    assert "not known there any more" in watch.see(None, 3.0)


def test_last_chunk_is_a_step_and_takes_no_longer():
    """A request has blocks meanwhile."""
    watch = Watch(0.0)
    watch.see(State.LAST_CHUNK, 100.0)
    watch.see(State.LAST_CHUNK, 100.0 + COMPUTED_WITHIN_S - 0.01)
    assert watch.overdue(100.0 + COMPUTED_WITHIN_S - 0.01) is None
    assert "last chunk" in watch.overdue(100.0 + COMPUTED_WITHIN_S)


def test_no_prompt_is_waited_for_for_ever():
    """Also where its engine is well."""
    watch = Watch(0.0)
    for at_s in range(int(OFFERED_WITHIN_S)):
        watch.see(State.KNOWN, float(at_s))
        assert watch.overdue(float(at_s)) is None
    assert "was not offered" in watch.overdue(OFFERED_WITHIN_S)


@given(st.lists(st.tuples(st.floats(0, 5), st.sampled_from([None, *GOOD])), max_size=40))
def test_looks_are_rare_and_never_too_late(looks):
    """A rest is between 1 and 10 ms; what is overdue is so at a time that was told before."""
    watch, now_s = Watch(0.0), 0.0
    for wait_s, state in looks:
        due_s = watch.due_s
        now_s += wait_s
        assert (watch.overdue(now_s) is not None) == (now_s >= due_s)
        if watch.overdue(now_s) or watch.see(state, now_s):
            return
        assert 1e-3 <= watch.rest_s <= 10e-3


@pytest.mark.parametrize("state", GOOD[:2])
def test_rest_is_a_fiftieth_of_the_time_that_a_state_has_lasted(state):
    """Looks are frequent after each change, and rarer the longer a state has lasted."""
    watch = Watch(0.0)
    watch.see(state, 2.0)
    rests_s = []
    for at_s in (2.0, 2.1, 2.3, 3.0):
        watch.see(state, at_s)
        rests_s.append(watch.rest_s)
    assert rests_s == pytest.approx([1e-3, 2e-3, 6e-3, 10e-3])

# SPDX-License-Identifier: Apache-2.0
"""The table of transitions."""

from __future__ import annotations

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.states import (
    READ_TRANSITIONS,
    ReadState,
    expect_transition,
)


def test_every_request_can_fail_until_it_has_ended_and_each_ends():
    """And none comes back."""
    assert set(READ_TRANSITIONS) == set(ReadState)
    for before, after in READ_TRANSITIONS.items():
        is_final = before in (ReadState.FAILED, ReadState.ENDED)
        assert (ReadState.FAILED in after) is not is_final
    assert READ_TRANSITIONS[ReadState.FAILED] == {ReadState.ENDED}
    assert not READ_TRANSITIONS[ReadState.ENDED]


def test_what_was_read_is_never_received_unchecked():
    """Only a check that has passed, or a failure, ends a request."""
    assert {before for before, after in READ_TRANSITIONS.items() if ReadState.ENDED in after} == {
        ReadState.CHECKING,
        ReadState.FAILED,
    }


def test_transition_that_is_not_in_the_table_raises():
    """It tells both states."""
    expect_transition(ReadState.WAITING, ReadState.READING)
    with pytest.raises(AssertionError, match="no transition: CHECKING to WAITING"):
        expect_transition(ReadState.CHECKING, ReadState.WAITING)

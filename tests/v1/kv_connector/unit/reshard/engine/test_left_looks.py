# SPDX-License-Identifier: Apache-2.0
"""Looks that nobody waits for: whatever becomes of them, their connections end."""

from __future__ import annotations

import pytest

from tests.v1.kv_connector.unit.reshard.engine.boards import Connection, Peers
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.left_looks import (
    LOOK_LIMIT_S,
    LeftLooks,
)


@pytest.fixture
def left():
    """One look, posted at 0, over a connection that is there."""
    peers, connection = Peers(), Connection()
    looks = LeftLooks(peers)
    looks.add(connection, connection.reader.post([0]), 0.0)
    return looks, peers, connection


def test_look_that_lands_is_taken_and_costs_nothing(left):
    """Its rows are free for others, and nobody looks after it any more."""
    looks, peers, connection = left
    assert looks.next_due_s <= 0.0
    looks.advance(0.0)
    assert looks.next_due_s > 0.0
    connection.reader.lands = True
    looks.advance(looks.next_due_s)
    assert looks.next_due_s == float("inf") and not peers.broken_off
    assert connection.reader.num_taken == 1


def test_look_that_neither_ends_nor_fails_ends_with_its_lane(left):
    """Else a lane would be open, and drain, for as long as there is one."""
    looks, peers, connection = left
    now_s = 0.0
    while now_s < LOOK_LIMIT_S:
        looks.advance(now_s)
        assert not peers.broken_off
        now_s = looks.next_due_s
    looks.advance(now_s)
    assert peers.broken_off == [connection]
    # It is looked after on, as it may still land; and it is broken off once.
    looks.advance(looks.next_due_s)
    assert peers.broken_off == [connection] and looks.next_due_s < float("inf")
    connection.is_connected = False
    looks.advance(looks.next_due_s)
    assert looks.next_due_s == float("inf")


def test_time_in_which_nobody_could_look_is_no_time(left):
    """The look has all of its time left."""
    looks, peers, _ = left
    looks.stood_still(LOOK_LIMIT_S)
    looks.advance(LOOK_LIMIT_S + 1.0)
    assert not peers.broken_off
    looks.advance(2 * LOOK_LIMIT_S)
    assert peers.broken_off


def test_look_that_fails_ends_with_its_lane(left):
    """It may still be written into."""
    looks, peers, connection = left
    connection.reader.fails = True
    looks.advance(0.0)
    assert peers.broken_off == [connection] and looks.next_due_s == float("inf")

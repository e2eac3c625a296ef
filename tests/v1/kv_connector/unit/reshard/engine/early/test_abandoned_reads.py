# SPDX-License-Identifier: Apache-2.0
"""Reads of boards that are not wanted any more: whatever becomes of them, their connections end."""

from __future__ import annotations

import pytest

from tests.v1.kv_connector.unit.reshard.engine.boards import Connection, Peers
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.early.abandoned_reads import (
    BOARD_READ_LIMIT_S,
    AbandonedReads,
)


@pytest.fixture
def abandoned():
    """One read, posted at 0, over a connection that is there."""
    peers, connection = Peers(), Connection()
    reads = AbandonedReads(peers)
    reads.add(connection, connection.reader.post([0]), 0.0)
    return reads, peers, connection


def test_read_that_lands_is_taken_and_costs_nothing(abandoned):
    """Its rows are free for others, and it is polled no more."""
    reads, peers, connection = abandoned
    assert reads.next_due_s <= 0.0
    reads.advance(0.0)
    assert reads.next_due_s > 0.0
    connection.reader.lands = True
    reads.advance(reads.next_due_s)
    assert reads.next_due_s == float("inf") and not peers.broken_off
    assert connection.reader.num_taken == 1


def test_read_that_neither_ends_nor_fails_ends_with_its_lane(abandoned):
    """Else a lane would be open, and drain, for as long as there is one."""
    reads, peers, connection = abandoned
    now_s = 0.0
    while now_s < BOARD_READ_LIMIT_S:
        reads.advance(now_s)
        assert not peers.broken_off
        now_s = reads.next_due_s
    reads.advance(now_s)
    assert peers.broken_off == [connection]
    # It is polled on, as it may still land; and it is broken off once.
    reads.advance(reads.next_due_s)
    assert peers.broken_off == [connection] and reads.next_due_s < float("inf")
    connection.is_connected = False
    reads.advance(reads.next_due_s)
    assert reads.next_due_s == float("inf")


def test_time_in_which_none_could_be_polled_is_no_time(abandoned):
    """The read has all of its time left."""
    reads, peers, _ = abandoned
    reads.stood_still(BOARD_READ_LIMIT_S)
    reads.advance(BOARD_READ_LIMIT_S + 1.0)
    assert not peers.broken_off
    reads.advance(2 * BOARD_READ_LIMIT_S)
    assert peers.broken_off


def test_read_that_fails_ends_with_its_lane(abandoned):
    """It may still be written into."""
    reads, peers, connection = abandoned
    connection.reader.fails = True
    reads.advance(0.0)
    assert peers.broken_off == [connection] and reads.next_due_s == float("inf")

# SPDX-License-Identifier: Apache-2.0
"""Whose leases are renewed, where, and how often."""

from __future__ import annotations

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.heartbeats import (
    BEATS_PER_LEASE,
    HeartbeatBook,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    Heartbeats,
    RemoteEngineAddress,
)

LEASE_S = 60.0
HERE = RemoteEngineAddress("prefill", "10.0.0.1", 5600)
ELSEWHERE = RemoteEngineAddress("prefill", "192.0.2.66", 5600)


@pytest.fixture
def book() -> HeartbeatBook:
    """A book without requests."""
    return HeartbeatBook(LEASE_S)


def test_requests_of_one_engine_share_a_heartbeat(book):
    """One message names all of them."""
    book.begin("d-a", HERE, "p-a")
    book.begin("d-b", HERE, "p-b")
    assert book.due(0.0) == [Heartbeats(HERE, frozenset({"p-a", "p-b"}))]


def test_a_wrong_address_takes_no_others_along(book):
    """One engine id at two addresses is two engines until one of them answers."""
    book.begin("wrong", ELSEWHERE, "p-x")
    book.begin("d-a", HERE, "p-a")
    assert book.due(0.0) == [
        Heartbeats(ELSEWHERE, frozenset({"p-x"})),
        Heartbeats(HERE, frozenset({"p-a"})),
    ]
    book.end("wrong")
    assert book.due(LEASE_S) == [Heartbeats(HERE, frozenset({"p-a"}))]


def test_heartbeats_keep_their_interval(book):
    """The first goes out at once, later ones often enough that some may be lost."""
    book.begin("d-a", HERE, "p-a")
    interval_s = LEASE_S / BEATS_PER_LEASE
    assert book.due(5.0)
    assert not book.due(5.0 + 0.9 * interval_s)
    assert book.due(5.0 + interval_s)


def test_request_that_another_still_reads_is_kept_alive(book):
    """Its name is sent until the last of those who wait for it has ended."""
    book.begin("d-a", HERE, "p-a")
    book.begin("d-b", HERE, "p-a")
    book.end("d-a")
    assert book.due(0.0) == [Heartbeats(HERE, frozenset({"p-a"}))]
    book.end("d-b")
    book.end("d-b")
    assert not book.due(LEASE_S)
    assert len(book) == 0

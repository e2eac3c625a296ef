# SPDX-License-Identifier: Apache-2.0
"""Which leases a worker renews, and when."""

from __future__ import annotations

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.reading.renewals import (
    RENEWALS_PER_LEASE,
    Renewals,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.settings import DEFAULT_LEASE_S
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    RemoteEngineAddress,
    RemoteRequest,
)

LEASE_S = 30.0
HERE = RemoteEngineAddress("prefill", "10.0.0.1", 5600)
ELSEWHERE = RemoteEngineAddress("prefill", "192.0.2.66", 5600)


@pytest.fixture
def renewals() -> Renewals:
    """None yet."""
    return Renewals(LEASE_S)


def test_requests_of_one_engine_are_renewed_together(renewals):
    """One message names all of them."""
    renewals.begin({"d-a": RemoteRequest(HERE, "p-a"), "d-b": RemoteRequest(HERE, "p-b")})
    assert renewals.take_due(0.0) == {HERE: {"p-a", "p-b"}}


def test_a_wrong_address_takes_no_others_along(renewals):
    """One engine id at two addresses is two engines until one of them answers."""
    renewals.begin({"wrong": RemoteRequest(ELSEWHERE, "p-x"), "d-a": RemoteRequest(HERE, "p-a")})
    assert renewals.take_due(0.0) == {ELSEWHERE: {"p-x"}, HERE: {"p-a"}}
    renewals.stop(["wrong"])
    assert renewals.take_due(LEASE_S) == {HERE: {"p-a"}}


def test_renewals_keep_their_interval(renewals):
    """The first goes out at once, later ones often enough that some may be lost."""
    renewals.begin({"d-a": RemoteRequest(HERE, "p-a")})
    interval_s = LEASE_S / RENEWALS_PER_LEASE
    assert renewals.next_due_s <= 5.0
    assert renewals.take_due(5.0)
    assert renewals.next_due_s == 5.0 + interval_s
    assert not renewals.take_due(5.0 + 0.9 * interval_s)
    assert renewals.take_due(5.0 + interval_s)


def test_request_that_another_still_reads_is_kept_alive(renewals):
    """Its name is sent until the last of those that wait for it has ended; then nothing is due."""
    renewals.begin({"d-a": RemoteRequest(HERE, "p-a"), "d-b": RemoteRequest(HERE, "p-a")})
    renewals.stop(["d-a"])
    assert renewals.take_due(0.0) == {HERE: {"p-a"}}
    renewals.stop(["d-b", "d-b"])
    assert not renewals.take_due(LEASE_S) and not renewals
    assert renewals.next_due_s == float("inf")


def test_a_long_lease_here_loses_no_shorter_one_elsewhere():
    """The holder's lease decides, which may be vLLM's default: a request that waits anew has it."""
    renewals = Renewals(10 * DEFAULT_LEASE_S)
    renewals.begin({"d-a": RemoteRequest(HERE, "p-a")})
    assert renewals.take_due(0.0)
    renewals.begin({"d-b": RemoteRequest(HERE, "p-b")})
    assert renewals.next_due_s <= DEFAULT_LEASE_S / RENEWALS_PER_LEASE
    assert renewals.take_due(DEFAULT_LEASE_S / RENEWALS_PER_LEASE) == {HERE: {"p-a", "p-b"}}

# SPDX-License-Identifier: Apache-2.0
"""Requests that a scheduler gives no blocks yet."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.parking import Parking
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    RemoteEngineAddress,
    RemoteRequest,
)

REQUEST = RemoteRequest(RemoteEngineAddress("prefill", "10.0.0.1", 5600), "x")


def test_request_waits_until_it_may_have_blocks():
    """Workers are told of it once."""
    parking = Parking()
    parking.park("a", REQUEST)
    assert parking.take() == {"a": REQUEST} and parking.take() == {}
    assert "a" in parking
    parking.hear(["b"], {})
    assert "a" in parking
    parking.hear(["a"], {})
    assert not len(parking) and parking.leave("a") is None


def test_request_that_will_not_be_read_waits_no_more():
    """The first reason is kept until it has blocks."""
    parking = Parking()
    parking.park("a", REQUEST)
    parking.hear([], {"a": "aborted"})
    parking.hear(["a"], {"a": "gone"})
    assert "a" not in parking and parking.leave("a") == "aborted"
    assert parking.leave("a") is None


def test_fault_of_what_has_blocks_is_its_workers():
    """They know of it already."""
    parking = Parking()
    parking.park("a", REQUEST)
    parking.hear(["a"], {})
    parking.hear([], {"a": "aborted", "never": "heard of"})
    assert parking.leave("a") is None and parking.leave("never") is None

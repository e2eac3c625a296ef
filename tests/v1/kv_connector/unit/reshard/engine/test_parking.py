# SPDX-License-Identifier: Apache-2.0
"""Requests that a scheduler gives no blocks yet."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.parking import Parking
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    RemoteEngineAddress,
    RemoteRequest,
)

REQUEST = RemoteRequest(RemoteEngineAddress("prefill", "10.0.0.1", 5600), "x")


def parked(*names: str, most_blocks: int = 0) -> Parking:
    """Requests that wait, each of three blocks, where so many may be held for computed prompts."""
    parking = Parking(most_blocks)
    for name in names:
        parking.park(name, REQUEST, 3)
    return parking


def test_request_waits_until_it_may_have_blocks():
    """Workers are told of it once."""
    parking = parked("a")
    assert parking.take() == {"a": REQUEST} and parking.take() == {}
    assert not parking.may_have_blocks("a")
    parking.hear([], ["b"], {})
    assert not parking.may_have_blocks("a")
    parking.hear([], ["a"], {})
    assert parking.may_have_blocks("a") and not len(parking) and parking.leave("a") is None


def test_request_that_will_not_be_read_waits_no_more():
    """The first reason is kept until it has blocks."""
    parking = parked("a")
    parking.hear([], [], {"a": "aborted"})
    parking.hear([], ["a"], {"a": "gone"})
    assert parking.may_have_blocks("a") and parking.leave("a") == "aborted"
    assert parking.leave("a") is None


def test_fault_of_what_has_blocks_is_its_workers():
    """They know of it already."""
    parking = parked("a")
    parking.hear([], ["a"], {})
    parking.hear([], [], {"a": "aborted", "never": "heard of"})
    assert parking.leave("a") is None and parking.leave("never") is None


def test_what_is_begun_has_blocks_as_far_as_there_is_room():
    """Whose last chunk is computed takes no room of others that are begun."""
    parking = parked("a", "b", "c", most_blocks=6)
    assert not parking.may_have_blocks("a")
    parking.hear("abc", [], {})
    for name in "ab":
        assert parking.may_have_blocks(name)
        parking.admit(name)
        assert parking.leave(name) is None
    assert not parking.may_have_blocks("c")
    parking.hear([], ["a"], {})
    assert parking.may_have_blocks("c")
    parking.admit("c")
    parking.park("d", REQUEST, 3)
    parking.hear("d", [], {})
    assert not parking.may_have_blocks("d")
    # Some of them will not be offered: they hold their blocks until nothing is read for them.
    parking.hear([], [], {"b": "aborted"})
    assert not parking.may_have_blocks("d")
    parking.forget("b")
    assert parking.may_have_blocks("d")


def test_no_room_is_none():
    """As in an engine whose cache has room for one prompt of the greatest length, or for none."""
    parking = parked("a", most_blocks=-5)
    parking.hear("a", [], {})
    assert not parking.may_have_blocks("a")


def test_request_that_ends_while_it_waits_is_forgotten():
    """A later one under its name waits until it is begun itself."""
    parking = parked("a", most_blocks=6)
    parking.hear("a", [], {})
    assert parking.leave("a") is None and not len(parking)
    parking.hear("a", [], {})
    parking.park("a", REQUEST, 3)
    assert not parking.may_have_blocks("a")

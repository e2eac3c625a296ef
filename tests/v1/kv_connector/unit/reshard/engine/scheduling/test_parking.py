# SPDX-License-Identifier: Apache-2.0
"""Requests that a scheduler gives no blocks yet."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.scheduling.parking import Parking
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    RemoteEngineAddress,
    RemoteRequest,
)

REQUEST = RemoteRequest(RemoteEngineAddress("prefill", "10.0.0.1", 5600), "x")


LONGEST_BLOCKS = 4


def parked(*names: str, most_blocks: int = 0) -> Parking:
    """Requests that wait, each of three blocks, where so many may be held for computed prompts."""
    parking = Parking(most_blocks + LONGEST_BLOCKS, LONGEST_BLOCKS)
    for name in names:
        parking.park(name, REQUEST, 3)
    return parking


def may_have_blocks(parking: Parking, name: str) -> bool:
    """Whether a request may have blocks, where enough are free."""
    return parking.may_have_blocks(name, 3 + LONGEST_BLOCKS)


def test_request_waits_until_it_may_have_blocks():
    """Workers are told of it once."""
    parking = parked("a")
    assert parking.take() == {"a": REQUEST} and parking.take() == {}
    assert not may_have_blocks(parking, "a")
    parking.hear([], ["b"], {})
    assert not may_have_blocks(parking, "a")
    parking.hear([], ["a"], {})
    assert may_have_blocks(parking, "a") and not len(parking) and parking.leave("a") is None


def test_request_that_will_not_be_read_waits_no_more():
    """The first reason is kept until it has blocks."""
    parking = parked("a")
    parking.hear([], [], {"a": "aborted"})
    parking.hear([], ["a"], {"a": "gone"})
    assert may_have_blocks(parking, "a") and parking.leave("a") == "aborted"
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
    assert not may_have_blocks(parking, "a")
    parking.hear("abc", [], {})
    for name in "ab":
        assert may_have_blocks(parking, name)
        parking.note_blocks(name)
        assert parking.leave(name) is None
    assert not may_have_blocks(parking, "c")
    parking.hear([], ["a"], {})
    assert may_have_blocks(parking, "c")
    parking.note_blocks("c")
    parking.park("d", REQUEST, 3)
    parking.hear("d", [], {})
    assert not may_have_blocks(parking, "d")
    # Some of them will not be offered: they hold their blocks until nothing is read for them.
    parking.hear([], [], {"b": "aborted"})
    assert not may_have_blocks(parking, "d")
    parking.forget("b")
    assert may_have_blocks(parking, "d")


def test_no_room_is_none():
    """As in an engine whose cache has room for one prompt of the greatest length, or for none."""
    parking = parked("a", most_blocks=-5)
    parking.hear("a", [], {})
    assert not may_have_blocks(parking, "a")


def test_request_that_ends_while_it_waits_is_forgotten():
    """A later one under its name waits until it is begun itself."""
    parking = parked("a", most_blocks=6)
    parking.hear("a", [], {})
    assert parking.leave("a") is None and not len(parking)
    parking.hear("a", [], {})
    parking.park("a", REQUEST, 3)
    assert not may_have_blocks(parking, "a")


def test_what_is_begun_has_blocks_only_where_others_find_some_beside_it():
    """Whoever is offered behind it would wait for what it waits for."""
    parking = parked("a", most_blocks=6)
    parking.hear("a", [], {})
    assert not parking.may_have_blocks("a", 2 + LONGEST_BLOCKS)
    assert parking.may_have_blocks("a", 3 + LONGEST_BLOCKS)
    parking.hear([], ["a"], {})
    assert parking.may_have_blocks("a", 0)

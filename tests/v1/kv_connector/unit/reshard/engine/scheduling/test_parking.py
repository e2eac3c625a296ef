# SPDX-License-Identifier: Apache-2.0
"""Requests of a decode engine whose prompts another engine computes."""

from __future__ import annotations

from types import SimpleNamespace

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.scheduling.parking import (
    Parked,
    Parking,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    RemoteEngineAddress,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.subscriptions import (
    Computed,
    Gone,
    Known,
    Leave,
    Offered,
)

PLACE = RemoteEngineAddress("prefill", "10.0.0.1", 5600)
LONGEST_BLOCKS = 4


class Asked:
    """In place of a subscriber: says what it was asked."""

    def __init__(self) -> None:
        self.left: list[str] = []

    def ask(self, place, question) -> None:
        """Ask for a request, or say that nobody reads it."""
        if isinstance(question, Leave):
            self.left.append(question.asker)


def parking(*names: str, most_blocks: int = 0) -> tuple[Parking, Asked, list[str]]:
    """Requests that wait, of three blocks each; and those that vLLM is told to come to."""
    asked, resumed = Asked(), []
    found = Parking(asked, most_blocks + LONGEST_BLOCKS, LONGEST_BLOCKS)
    for name in names:
        request = SimpleNamespace(request_id=name)
        resume = lambda name=name: resumed.append(name)  # noqa: E731
        found.park(Parked(request, name, PLACE, name, 0.0, 3, resume, 7, f"asks for {name}"))
    return found, asked, resumed


def computed(name: str) -> Computed:
    """A part of a request is computed."""
    return Computed(f"asks for {name}", "p", "10.0.0.1", 5600, "r", 0, 4, 8, [[1]])


def test_request_is_held_back_until_there_is_news_of_it():
    """And vLLM is told once to come to it."""
    waits, _, resumed = parking("a")
    assert waits.holds_back("b", 99) is None and waits.holds_back("a", 99)
    waits.deliver(Known("asks for a"))
    assert not resumed and waits.holds_back("a", 99)
    waits.deliver(computed("a"))
    waits.deliver(Offered("asks for a", {}, 0))
    assert resumed == ["a"] and waits.holds_back("a", 0) is False
    assert waits.take("a").news == Offered("asks for a", {}, 0) and not len(waits)


def test_news_that_comes_while_vllm_looks_is_not_lost():
    """It is told again to come to a request that it has held back since."""
    waits, _, resumed = parking("a")
    waits.deliver(computed("a"))
    assert waits.holds_back("a", 0)
    waits.deliver(Gone("asks for a", "aborted"))
    assert resumed == ["a", "a"] and waits.holds_back("a", 0) is False


def test_computed_parts_are_read_as_far_as_there_is_room():
    """For the longest prompt beside all of them, and for those behind."""
    waits, _, _ = parking("a", "b", "c", most_blocks=6)
    for name in "abc":
        waits.deliver(computed(name))
    assert waits.holds_back("a", 2 + LONGEST_BLOCKS)
    for name in "ab":
        assert waits.holds_back(name, 3 + LONGEST_BLOCKS) is False
        waits.get(name).block_ids = ([1, 2, 3],)
    assert waits.holds_back("c", 3 + LONGEST_BLOCKS)
    waits.deliver(Offered("asks for a", {}, 0))
    assert [each.request_id for each in waits.take_heard()] == ["a"] and not waits.take_heard()
    waits.take("a")
    assert waits.holds_back("c", 3 + LONGEST_BLOCKS) is False


def test_offer_of_who_has_left_is_given_up():
    """Whether it comes before its end here or after that; vLLM does not add the request."""
    waits, asked, resumed = parking("a", "b", "c")
    waits.deliver(Offered("asks for a", {"of": "a"}, 0))
    for name in "abc":
        assert waits.leave(name) is not None and waits.leave(name) is None
    assert asked.left == ["asks for b", "asks for c"]
    waits.deliver(Offered("asks for b", {"of": "b"}, 0))
    waits.deliver(Gone("asks for c", "nobody reads it"))
    for name in "abc":
        assert waits.holds_back(name, 99)
    assert waits.take_given_up() == [{"of": "a"}, {"of": "b"}] and not waits.has_given_up
    assert resumed == ["a", "b", "c"]
    assert waits.holds_back("a", 99) is None


def test_request_that_the_api_server_refuses_is_given_up_unseen():
    """It has no prompt that would tell it apart."""
    waits, asked, resumed = parking()
    request = SimpleNamespace(request_id="x")
    waits.park(Parked(request, "x", PLACE, "x", 0.0, 1, lambda: resumed.append("x"), None, "x"))
    assert asked.left == ["x"] and not len(waits)
    waits.deliver(Offered("x", {"of": "x"}, 0))
    assert resumed == ["x"] and waits.holds_back("x", 99)
    assert waits.take_given_up() == [{"of": "x"}]

# SPDX-License-Identifier: Apache-2.0
"""Requests of a decode engine whose blocks another engine holds or computes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.v1.kv_connector.unit.reshard.containers import largest
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.scheduling.remote_reads import (
    MAX_REMEMBERED,
    RemoteReads,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    Receive,
    RemoteEngineAddress,
    RemoteRequest,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.subscriptions import (
    Computed,
    Gone,
    Known,
    Leave,
    Offered,
)

PLACE = RemoteEngineAddress("prefill", "10.0.0.1", 5600)
REMOTE, OTHER = ("prefill", "p-a"), ("prefill", "p-b")
LONGEST_BLOCKS = 4


class Asked:
    """In place of a subscriber: knows its questions, and who has left."""

    def __init__(self) -> None:
        self.askers: dict[str, str] = {}
        self.left: list[str] = []

    def ask(self, place, question) -> None:
        """Ask for a request, or say that nobody reads it."""
        self.askers[question.name] = question.asker
        if isinstance(question, Leave):
            self.left.append(question.name)

    def computed(self, name: str) -> Computed:
        """News that a part of a request is computed."""
        return Computed(self.askers[name], "p", "10.0.0.1", 5600, "r", 0, 4, 8, [[1]])

    def offered(self, name: str) -> Offered:
        """News that a request is held."""
        params = {
            **dict(remote_engine_id="prefill", remote_request_id=f"p-{name}"),
            **dict(remote_host="10.0.0.1", remote_port=5600, remote_block_ids=[[1]]),
        }
        secret = {"remote_secret": f"{7:016x}", "do_remote_prefill": True}
        return Offered(self.askers[name], params | secret, 0)

    def gone(self, name: str) -> Gone:
        """News that a request will not be offered."""
        return Gone(self.askers[name], "aborted")


def request(name: str = "d-a"):
    """A request that does not end."""
    return SimpleNamespace(request_id=name, is_finished=lambda: False)


def reads(in_doubt: list[int] | None = None) -> RemoteReads:
    """A scheduler's, with nobody to ask."""
    return RemoteReads(Asked(), None, ([] if in_doubt is None else in_doubt).append)


def parked(*names: str, most_blocks: int = 0) -> tuple[RemoteReads, Asked, list[str]]:
    """Requests that wait, of three blocks each; and those that vLLM is told to come to."""
    asked, resumed = Asked(), []
    found = RemoteReads(asked, None, print, most_blocks + LONGEST_BLOCKS, LONGEST_BLOCKS)
    for name in names:
        resume = lambda name=name: resumed.append(name)  # noqa: E731
        found.park(request(name), PLACE, name, 7, 3, resume)
    return found, asked, resumed


def given_up(found: RemoteReads) -> list[str]:
    """Whose holders the next step tells that nobody reads them."""
    return [each.remote_request_id for each in found.take_outbox().given_up]


def test_request_is_held_back_until_there_is_news_of_it():
    """And vLLM is told once to come to it."""
    waits, asked, resumed = parked("a")
    assert waits.holds_back("b", 99) is None and waits.holds_back("a", 99)
    waits.deliver(Known(asked.askers["a"]))
    assert not resumed and waits.holds_back("a", 99)
    waits.deliver(asked.computed("a"))
    waits.deliver(asked.offered("a"))
    assert resumed == ["a"] and waits.holds_back("a", 0) is False
    read = waits.waiting("a")
    assert read.news == asked.offered("a")
    waits.settle(read)
    assert waits.waiting("a") is None and waits.holds_back("a", 99) is None


def test_news_that_comes_while_vllm_looks_is_not_lost():
    """It is told again to come to a request that it has held back since."""
    waits, asked, resumed = parked("a")
    waits.deliver(asked.computed("a"))
    assert waits.holds_back("a", 0)
    waits.deliver(asked.gone("a"))
    assert resumed == ["a", "a"] and waits.holds_back("a", 0) is False


def test_computed_parts_are_read_as_far_as_there_is_room():
    """For the longest prompt beside all of them, and for those behind."""
    waits, asked, _ = parked("a", "b", "c", most_blocks=6)
    for name in "abc":
        waits.deliver(asked.computed(name))
    assert waits.holds_back("a", 2 + LONGEST_BLOCKS)
    for name in "ab":
        assert waits.holds_back(name, 3 + LONGEST_BLOCKS) is False
        waits.begin(waits.waiting(name).request, ([1, 2, 3],))
    assert waits.holds_back("c", 3 + LONGEST_BLOCKS)
    waits.deliver(asked.offered("a"))
    (read,) = waits.take_heard()
    assert read.request_id == "a" and not waits.take_heard()
    waits.settle(read)
    assert waits.holds_back("c", 3 + LONGEST_BLOCKS) is False


def test_offer_of_who_has_left_is_given_up():
    """Whether it comes before its end here or after that; vLLM does not add the request."""
    waits, asked, resumed = parked("a", "b", "c")
    waits.deliver(asked.offered("a"))
    for name in "abc":
        waits.drop([name, name, "unknown"])
    assert asked.left == ["b", "c"]
    waits.deliver(asked.offered("b"))
    waits.deliver(asked.gone("c"))
    for name in "abc":
        assert waits.holds_back(name, 99)
    assert waits.has_work and given_up(waits) == ["p-a", "p-b"] and not waits.has_work
    assert resumed == ["a", "b", "c"]
    assert waits.holds_back("a", 99) is None and not len(waits)


def test_request_that_the_api_server_refuses_is_given_up_unseen():
    """It has no prompt that would tell it apart."""
    waits, asked, resumed = parked()
    waits.park(request("x"), PLACE, "x", None, 1, lambda: resumed.append("x"))
    assert asked.left == ["x"] and waits.waiting("x") is None
    waits.deliver(asked.offered("x"))
    assert resumed == ["x"] and waits.holds_back("x", 99)
    assert given_up(waits) == ["p-x"] and not len(waits)


@pytest.mark.parametrize("is_offered", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_prefetched_request_that_ends_is_read_no_further(is_offered, fails):
    """Its workers are told; its blocks are kept until they have drained, and its offer given up."""
    waits, asked, _ = parked("a", most_blocks=6)
    waits.deliver(asked.computed("a"))
    assert waits.holds_back("a", 99) is False
    read = waits.begin(waits.waiting("a").request, ([1, 2, 3],))
    waits.drop(["a"])
    assert waits.waiting("a") is read
    if fails:
        assert waits.fail(["a"]) == {"a"}
    assert waits.finish(read.request) is not fails
    assert asked.left == ["a"] and waits.waiting("a") is None and waits.is_written("a")
    assert waits.take_outbox().failed == {"a"}
    waits.deliver(asked.offered("a") if is_offered else asked.computed("a"))
    assert not waits.take_heard()
    assert given_up(waits) == ["p-a"] * is_offered
    read.request.is_finished = lambda: True
    assert [waits.receive({"a"}), waits.receive({"a"})] == [set(), {"a"}]
    assert not len(waits)


def test_one_request_reads_at_a_time():
    """Another one may when it has ended; the end of one that did not read changes nothing."""
    readers, first, second = reads(), request("d-a"), request("d-b")
    assert readers.claim(first, REMOTE) and readers.claim(second, OTHER)
    third = request("d-c")
    assert not readers.claim(third, REMOTE)
    readers.finish(third)
    assert not readers.claim(third, REMOTE) and readers.claim(first, REMOTE)
    readers.finish(first)
    assert readers.claim(third, REMOTE)


def offer(name: str, secret: int | None = 7) -> Receive:
    """What is held under a name."""
    return Receive(PLACE, name, (), [[1]], 0, 1, secret=secret)


def test_what_nobody_has_read_may_be_given_up():
    """And nothing else, as long as vLLM may be cleaning up after its reader."""
    readers, reader = reads(), request()
    assert readers.may_give_up(REMOTE)
    readers.claim(reader, REMOTE)
    assert not readers.may_give_up(REMOTE) and readers.may_give_up(OTHER)
    readers.finish(reader)
    assert not readers.may_give_up(REMOTE)


def test_holder_of_what_is_given_up_is_notified():
    """If there is a secret, without which it would not listen; again, if that was wrong."""
    readers = reads()
    readers.give_up(offer("p-a"))
    readers.give_up(offer("p-b", secret=None))
    readers.give_up(None)
    assert given_up(readers) == ["p-a"] and given_up(readers) == []
    assert readers.may_give_up(REMOTE)


def test_readers_that_have_ended_are_not_remembered_for_ever():
    """The oldest are forgotten first; one that has read again is not the oldest."""
    readers = reads()
    for remote in (REMOTE, OTHER, REMOTE, *(("prefill", str(n)) for n in range(MAX_REMEMBERED))):
        reader = request()
        readers.claim(reader, remote)
        readers.finish(reader)
        if remote == ("prefill", str(MAX_REMEMBERED - 2)):
            assert readers.may_give_up(OTHER) and not readers.may_give_up(REMOTE)
    assert largest(readers) == MAX_REMEMBERED


def test_workers_hear_once_whose_leases_they_renew():
    """However often the renewals end; others are nobody's concern."""
    renewed, asked = reads(), RemoteRequest(PLACE, "p-a")
    renewed.renew(request(), asked)
    assert renewed.has_work
    step = renewed.take_outbox()
    assert (step.awaited, step.ended) == ({"d-a": asked}, set()) and not renewed.has_work
    for _ in range(2):
        renewed.stop_renewal("d-a")
        renewed.stop_renewal("another")
    step = renewed.take_outbox()
    assert (step.awaited, step.ended) == ({}, {"d-a"})
    assert not renewed.take_outbox()


def test_workers_hear_nothing_of_a_request_that_has_ended_before_the_step():
    """Its lease is not renewed at all."""
    renewed, asked = reads(), request()
    renewed.renew(asked, RemoteRequest(PLACE, "p-a"))
    renewed.finish(asked)
    assert not renewed.take_outbox() and not len(renewed)


def test_blocks_at_the_end_of_a_sequence_are_reused_first():
    """As vLLM gives them back."""
    in_doubt, freed = [], []
    failing, asked = reads(in_doubt), request("a")
    failing.manager = SimpleNamespace(
        pop_blocks_for_free=lambda _: ["first", "second"],
        block_pool=SimpleNamespace(free_blocks=freed.extend),
    )
    failing.begin(asked, ([1, 2],))
    assert failing.fail({"a", "unknown"}) == {"a"}
    assert failing.fail({"a"}) == set()
    assert failing.take_outbox().failed == {"a"}
    assert failing.take_outbox().failed == set()
    assert failing.receive({"a", "others"}) == {"a", "others"}
    assert failing.num_taken_blocks == 2 and failing.is_written("a")
    assert failing.receive({"a"}) == set()
    assert freed == ["second", "first"] and in_doubt == [2, 0]
    assert not failing.is_written("a") and len(failing) == 1
    failing.finish(asked)
    assert not len(failing)

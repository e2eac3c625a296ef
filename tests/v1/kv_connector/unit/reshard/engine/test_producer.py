# SPDX-License-Identifier: Apache-2.0
"""What a worker holds, and whom it believes."""

from __future__ import annotations

import ctypes
import logging

import pytest

from tests.v1.kv_connector.unit.reshard.engine.producers import (
    LEASE_S,
    OFFER,
    OTHERS,
    SECRET,
    Producer,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.leases import (
    Held,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    Announcement,
    encode_renewals,
)


def test_one_notification_releases_many_requests():
    """Each on its own terms: one of them has another reader."""
    producer = Producer()
    producer.offer("a", "b", "c")
    producer.hear("a", "b")
    producer.hear("c", of=2)
    assert producer.side.collect_released(1.0) == {"a", "b"}
    assert [producer.is_entered(each) for each in "abc"] == [False, False, True]
    producer.hear("c", notifier="d1", of=2)
    assert producer.side.collect_released(2.0) == {"c"}


@pytest.mark.parametrize("fingerprint", OTHERS)
@pytest.mark.parametrize("early", [False, True])
def test_reader_of_something_else_costs_nobody_anything(fingerprint, early, caplog_vllm):
    """Who knows a request's name alone does not end it, and is told of once, at the offer or after.

    A right one of the same name still counts, and so does what else came with the wrong one.
    """
    producer = Producer()
    producer.offer("b")
    if early:
        producer.tell(admitted={"a"})
        producer.hear("a", fingerprint=fingerprint)
        assert producer.side.collect_released(1.0) == set()
        assert "Request a is held on" not in caplog_vllm.text
    producer.offer("a")
    for _ in range(3):
        producer.hear("a", fingerprint=fingerprint)
    producer.hear("b")
    assert producer.side.collect_released(1.0) == {"b"}
    assert producer.is_entered("a")
    assert caplog_vllm.text.count("Request a is held on: d0 is through with other tokens") == 1
    producer.hear("a")
    assert producer.side.collect_released(2.0) == {"a"}


@pytest.mark.parametrize("early", [False, True])
def test_secret_gives_an_offer_up(early, caplog_vllm):
    """At once, or with its offer; a wrong one frees nothing, and is told of once."""
    producer = Producer()
    producer.tell(admitted={"a"})
    if not early:
        producer.offer("a")
    for guess in (0, SECRET ^ 1, OFFER.content):
        producer.hear_that_gives_up("a", secret=guess)
    assert producer.side.collect_released(1.0) == set()
    if early:
        producer.offer("a")
        assert producer.side.collect_released(1.0) == set()
    assert caplog_vllm.text.count("Request a is held on: d0 is through with other tokens") == 1
    assert "or has another secret" in caplog_vllm.text
    assert producer.is_entered("a")
    producer.hear_that_gives_up("a")
    assert producer.side.collect_released(2.0) == {"a"}
    assert not producer.is_entered("a")


def test_secret_may_be_faster_than_the_offer():
    """The router knows it before workers do."""
    producer = Producer()
    producer.tell(admitted={"a"})
    producer.hear_that_gives_up("a")
    assert producer.side.collect_released(1.0) == set()
    producer.offer("a")
    assert producer.side.collect_released(2.0) == {"a"}


def test_secret_is_not_where_peers_read():
    """Whoever can read the table of leases cannot give up what is held for others."""
    producer = Producer()
    producer.offer(*(f"p-{number}" for number in range(100)))
    address = producer.side.table_address
    table = ctypes.string_at(address.address, address.size_bytes)
    assert OFFER.num_tokens.to_bytes(8, "little") in table
    for order in ("little", "big"):
        assert SECRET.to_bytes(8, order) not in table


def test_who_gives_up_late_is_not_told_of(caplog_vllm):
    """It has read nothing that could have been another's."""
    producer = Producer()
    producer.hear_that_gives_up("a", "b")
    assert producer.side.collect_released(1.0) == set()
    assert "too late" not in caplog_vllm.text
    assert not producer.stats.data["num_notifications_after_expiry"]


def test_reader_may_be_faster_than_the_offer():
    """What it says is kept until there is something to compare it with."""
    producer = Producer()
    producer.tell(admitted={"a"})
    producer.hear("a")
    assert producer.side.collect_released(1.0) == set()
    producer.offer("a")
    assert producer.side.collect_released(2.0) == {"a"}
    assert producer.stats.data["held_blocks"] == []


def test_offer_is_seen_before_its_step():
    """Readers believe what they read; but nobody is through with it before that step."""
    producer = Producer()
    producer.tell(admitted={"a", "b"}, num_offers=1)
    producer.side.apply_announcement(Announcement(2, "a", OFFER))
    assert producer.seen("a") == Held(True, OFFER)
    assert producer.seen("b") == Held(True, None)
    producer.hear("a")
    assert producer.side.collect_released(1.0) == set()
    assert producer.seen("a") == Held(True, OFFER)
    producer.offer("a")
    assert producer.side.collect_released(2.0) == {"a"}
    assert not producer.is_entered("a")


def test_lease_does_not_run_before_its_step():
    """What was announced expires no sooner than what was not."""
    producer = Producer()
    producer.tell(admitted={"a"})
    producer.side.apply_announcement(Announcement(1, "a", OFFER))
    assert producer.side.collect_released(10 * LEASE_S) == set()
    producer.offer("a", now_s=10 * LEASE_S)
    assert producer.side.collect_released(10.5 * LEASE_S) == set()
    assert producer.side.collect_released(12 * LEASE_S) == {"a"}


def test_announcement_that_comes_late_is_none():
    """After its step the name may be another request's, whose blocks are others."""
    producer = Producer()
    producer.offer("a", num_offers=1)
    producer.hear("a")
    assert producer.side.collect_released(1.0) == {"a"}
    producer.tell(admitted={"a"}, num_offers=1)
    producer.side.apply_announcement(Announcement(1, "a", OFFER))
    assert producer.seen("a") == Held(True, None)


def test_nothing_is_announced_of_what_is_not_held():
    """Where the table had no room, readers see as little as before."""
    producer = Producer()
    producer.side.apply_announcement(Announcement(1, "a", OFFER))
    assert producer.seen("a") == Held(False, None)


def test_late_readers_are_told_of_in_one_line(caplog_vllm):
    """However many requests they come late for; each is counted."""
    producer = Producer()
    producer.hear("a", "b", "c")
    assert producer.side.collect_released(1.0) == set()
    assert "d0 was too late for the blocks of request a and of 2 more, which" in caplog_vllm.text
    assert len(producer.stats.data["num_notifications_after_expiry"]) == 3


def test_strangers_bytes_cost_a_line(caplog_vllm):
    """What came before and after them is heard."""
    producer = Producer()
    producer.offer("a", "b")
    producer.hear("a")
    producer.agent.arrived.append(("stranger", b"request:1"))
    producer.hear("b")
    assert producer.side.collect_released(1.0) == {"a", "b"}
    assert "From stranger: a notification of 9 bytes is not understood" in caplog_vllm.text


def test_renewed_lease_outlives_its_term():
    """And ends after that."""
    producer = Producer()
    producer.offer("a")
    producer.agent.arrived += [("peer", message) for message in encode_renewals(["a"])]
    assert producer.side.collect_released(LEASE_S - 1) == set()
    assert producer.side.collect_released(LEASE_S + 1) == set()
    assert producer.side.collect_released(2 * LEASE_S) == {"a"}
    assert not producer.is_entered("a")


def test_lease_lasts_as_much_longer_as_nobody_could_be_heard():
    """Its readers may have renewed it, or could not: nobody knows."""
    producer = Producer()
    producer.offer("a")
    producer.side.extend_deadlines(2 * LEASE_S)
    assert producer.side.collect_released(3 * LEASE_S - 1) == set()
    assert producer.side.collect_released(3 * LEASE_S) == {"a"}


def test_held_blocks_are_counted_as_they_change():
    """By released, expired, withdrawn and repeated requests, and only where the sum is another."""
    producer = Producer()
    producer.offer("a", "b", num_blocks=3)
    producer.side.collect_released(1.0)
    assert producer.stats.data["held_blocks"] == [6]
    producer.stats.reset()
    producer.offer("a", num_blocks=5)
    producer.hear("b")
    producer.side.collect_released(2.0)
    assert producer.stats.data["held_blocks"] == [5]
    producer.stats.reset()
    producer.side.collect_released(3.0)
    assert producer.stats.data["held_blocks"] == []
    producer.tell(withdrawn={"a"})
    producer.side.collect_released(4.0)
    assert producer.stats.data["held_blocks"] == [0]


class CountedBlocks(int):
    """A number of blocks that counts how often it is added up."""

    additions = 0

    def __radd__(self, other):
        CountedBlocks.additions += 1
        return int(self) + other

    def __sub__(self, other):
        return CountedBlocks(int(self) - other)


def test_steps_do_not_add_up_what_is_held():
    """Each request is added once, when it is offered, however many steps it is held for."""
    producer = Producer()
    request_ids = [str(number) for number in range(1000)]
    producer.offer(*request_ids, num_blocks=CountedBlocks(3))
    producer.side.collect_released(1.0)
    counted = CountedBlocks.additions
    assert counted <= 1000
    for step in range(10):
        producer.side.collect_released(2.0 + step)
    assert CountedBlocks.additions == counted
    assert producer.stats.data["held_blocks"] == [3000]


def test_log_tells_which_reader_has_ended_an_offer(caplog_vllm):
    """And how long the request was in each state."""
    caplog_vllm.set_level(logging.DEBUG, "vllm")
    producer = Producer()
    producer.tell(1.0, admitted={"a"})
    producer.offer("a", now_s=3.0)
    producer.hear("a")
    assert producer.side.collect_released(5.5) == {"a"}
    assert "Request a: released, with 3 blocks, after 2.500 s as offered, last read by d0." in (
        caplog_vllm.text
    )
    producer.offer("b", now_s=6.0)
    producer.side.collect_released(6.0 + LEASE_S)
    assert "Request b: expired, with 3 blocks, after 30.000 s as offered." in caplog_vllm.text


@pytest.mark.parametrize("reads", [False, True])
def test_offers_that_nobody_reads_are_told_of_once(reads, caplog_vllm):
    """A router that sends nothing on looks well, but for blocks that are held in vain."""
    producer = Producer()
    if reads:
        producer.offer("read")
        producer.hear("read")
        producer.side.collect_released(0.0)
    for turn in range(3):
        names = [f"{turn}-{number}" for number in range(15)]
        producer.offer(*names)
        assert producer.side.collect_released(2 * LEASE_S * (turn + 1)) == set(names)
        told = caplog_vllm.text.count("None of the first 20 requests that were held was read")
        assert told == (turn > 0 and not reads)


@pytest.mark.parametrize(
    ("request_id", "remedy"),
    [
        ("cmpl-a-0-0123abcd", "Give readers longer with kv_lease_duration, if they are alive."),
        (
            "1_cmpl-a-0-0123abcd",
            "Of several answers one is read: have the router ask prefill engines for n 1.",
        ),
    ],
)
def test_line_of_a_lease_knows_answers_that_nobody_reads(request_id, remedy, caplog_vllm):
    """A longer lease would make it worse where a prompt has several answers."""
    producer = Producer()
    producer.offer(request_id)
    assert producer.side.collect_released(LEASE_S + 1.0) == {request_id}
    (line,) = (each.getMessage() for each in caplog_vllm.records if each.levelno > logging.INFO)
    assert line.startswith(f"Freeing the blocks of request {request_id}: ")
    assert line.endswith(remedy)

# SPDX-License-Identifier: Apache-2.0
"""What a worker holds, and whom it believes."""

from __future__ import annotations

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.metadata import (
    ReshardConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.producer import ProducerSide
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.stats import ReshardStats
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.fingerprint import (
    OfferFingerprint,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.leases import (
    Held,
    LeaseTable,
    entry_of,
    look_up,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    Announcement,
    DoneEntry,
    encode_done,
    encode_renewals,
)

OFFER = OfferFingerprint(48, 1, 2)
OTHERS = [OfferFingerprint(47, 1, 2), OfferFingerprint(48, 9, 2), OfferFingerprint(48, 1, 9)]
LEASE_S = 30.0


class Agent:
    """An agent at which notifications arrive."""

    def __init__(self) -> None:
        self.arrived: list[tuple[str, bytes]] = []

    def register(self, regions, memory) -> None:
        """Nobody reads here."""

    def take_notifications(self) -> list[tuple[str, bytes]]:
        """What has arrived."""
        arrived, self.arrived = self.arrived, []
        return arrived


class Desk:
    """A producer, with what its scheduler and its peers would do."""

    def __init__(self) -> None:
        self.agent, self.stats = Agent(), ReshardStats()
        self.producer = ProducerSide(self.agent, LEASE_S, self.stats)

    def tell(self, now_s: float = 0.0, **metadata) -> None:
        """What the scheduler asks for in a step."""
        self.producer.apply_metadata(ReshardConnectorMetadata(**metadata), now_s)

    def offer(
        self, *request_ids: str, num_blocks: int = 3, now_s: float = 0.0, num_offers: int = 0
    ) -> None:
        """Requests were computed."""
        self.tell(now_s, admitted=set(request_ids))
        self.tell(
            now_s,
            num_offers=num_offers,
            offered=dict.fromkeys(request_ids, LEASE_S),
            offered_blocks=dict.fromkeys(request_ids, num_blocks),
            fingerprints=dict.fromkeys(request_ids, OFFER),
        )

    def hear(
        self,
        *request_ids: str,
        fingerprint: OfferFingerprint = OFFER,
        notifier: str = "d0",
        of: int = 1,
    ) -> None:
        """A reader is through with some requests."""
        entries = [DoneEntry.of(request_id, of, fingerprint) for request_id in request_ids]
        self.agent.arrived += [("peer", message) for message in encode_done(notifier, entries)]

    def seen(self, request_id: str) -> Held:
        """What readers see of a request."""
        table: LeaseTable = self.producer._table
        bucket, name = entry_of(request_id, table.address.num_buckets)
        return look_up(table._entries[bucket].ravel(), name)

    def is_entered(self, request_id: str) -> bool:
        """Whether readers see that the request is held."""
        return self.seen(request_id).entered


def test_one_notification_releases_many_requests():
    """Each on its own terms: one of them has another reader."""
    desk = Desk()
    desk.offer("a", "b", "c")
    desk.hear("a", "b")
    desk.hear("c", of=2)
    assert desk.producer.collect_released(1.0) == {"a", "b"}
    assert [desk.is_entered(each) for each in "abc"] == [False, False, True]
    desk.hear("c", notifier="d1", of=2)
    assert desk.producer.collect_released(2.0) == {"c"}


@pytest.mark.parametrize("fingerprint", OTHERS)
@pytest.mark.parametrize("early", [False, True])
def test_reader_of_something_else_costs_nobody_anything(fingerprint, early, caplog_vllm):
    """Who knows a request's name alone does not end it, and is told of once, at the offer or after.

    A right one of the same name still counts, and so does what else came with the wrong one.
    """
    desk = Desk()
    desk.offer("b")
    if early:
        desk.tell(admitted={"a"})
        desk.hear("a", fingerprint=fingerprint)
        assert desk.producer.collect_released(1.0) == set()
        assert "Request a is held on" not in caplog_vllm.text
    desk.offer("a")
    for _ in range(3):
        desk.hear("a", fingerprint=fingerprint)
    desk.hear("b")
    assert desk.producer.collect_released(1.0) == {"b"}
    assert desk.is_entered("a")
    assert caplog_vllm.text.count("Request a is held on: d0 is through with other tokens") == 1
    desk.hear("a")
    assert desk.producer.collect_released(2.0) == {"a"}


def test_reader_may_be_faster_than_the_offer():
    """What it says is kept until there is something to compare it with."""
    desk = Desk()
    desk.tell(admitted={"a"})
    desk.hear("a")
    assert desk.producer.collect_released(1.0) == set()
    desk.offer("a")
    assert desk.producer.collect_released(2.0) == {"a"}
    assert desk.stats.data["held_blocks"] == []


def test_offer_is_seen_before_its_step():
    """Readers believe what they read; but nobody is through with it before that step."""
    desk = Desk()
    desk.tell(admitted={"a", "b"}, num_offers=1)
    desk.producer.apply_announcement(Announcement(2, "a", OFFER))
    assert desk.seen("a") == Held(True, OFFER)
    assert desk.seen("b") == Held(True, None)
    desk.hear("a")
    assert desk.producer.collect_released(1.0) == set()
    assert desk.seen("a") == Held(True, OFFER)
    desk.offer("a")
    assert desk.producer.collect_released(2.0) == {"a"}
    assert not desk.is_entered("a")


def test_lease_does_not_run_before_its_step():
    """What was announced expires no sooner than what was not."""
    desk = Desk()
    desk.tell(admitted={"a"})
    desk.producer.apply_announcement(Announcement(1, "a", OFFER))
    assert desk.producer.collect_released(10 * LEASE_S) == set()
    desk.offer("a", now_s=10 * LEASE_S)
    assert desk.producer.collect_released(10.5 * LEASE_S) == set()
    assert desk.producer.collect_released(12 * LEASE_S) == {"a"}


def test_announcement_that_comes_late_is_none():
    """After its step the name may be another request's, whose blocks are others."""
    desk = Desk()
    desk.offer("a", num_offers=1)
    desk.hear("a")
    assert desk.producer.collect_released(1.0) == {"a"}
    desk.tell(admitted={"a"}, num_offers=1)
    desk.producer.apply_announcement(Announcement(1, "a", OFFER))
    assert desk.seen("a") == Held(True, None)


def test_nothing_is_announced_of_what_is_not_held():
    """Where the table had no room, readers see as little as before."""
    desk = Desk()
    desk.producer.apply_announcement(Announcement(1, "a", OFFER))
    assert desk.seen("a") == Held(False, None)


def test_late_readers_are_told_of_in_one_line(caplog_vllm):
    """However many requests they come late for; each is counted."""
    desk = Desk()
    desk.hear("a", "b", "c")
    assert desk.producer.collect_released(1.0) == set()
    assert "d0 was too late for the blocks of request a and of 2 more, which" in caplog_vllm.text
    assert len(desk.stats.data["num_notifications_after_expiry"]) == 3


def test_strangers_bytes_cost_a_line(caplog_vllm):
    """What came before and after them is heard."""
    desk = Desk()
    desk.offer("a", "b")
    desk.hear("a")
    desk.agent.arrived.append(("stranger", b"request:1"))
    desk.hear("b")
    assert desk.producer.collect_released(1.0) == {"a", "b"}
    assert "From stranger: a notification of 9 bytes is not understood" in caplog_vllm.text


def test_renewed_lease_outlives_its_term():
    """And ends after that."""
    desk = Desk()
    desk.offer("a")
    desk.agent.arrived += [("peer", message) for message in encode_renewals(["a"])]
    assert desk.producer.collect_released(LEASE_S - 1) == set()
    assert desk.producer.collect_released(LEASE_S + 1) == set()
    assert desk.producer.collect_released(2 * LEASE_S) == {"a"}
    assert not desk.is_entered("a")


def test_held_blocks_are_counted_as_they_change():
    """By released, expired, withdrawn and repeated requests, and only where the sum is another."""
    desk = Desk()
    desk.offer("a", "b", num_blocks=3)
    desk.producer.collect_released(1.0)
    assert desk.stats.data["held_blocks"] == [6]
    desk.stats.reset()
    desk.offer("a", num_blocks=5)
    desk.hear("b")
    desk.producer.collect_released(2.0)
    assert desk.stats.data["held_blocks"] == [5]
    desk.stats.reset()
    desk.producer.collect_released(3.0)
    assert desk.stats.data["held_blocks"] == []
    desk.tell(withdrawn={"a"})
    desk.producer.collect_released(4.0)
    assert desk.stats.data["held_blocks"] == [0]


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
    desk = Desk()
    request_ids = [str(number) for number in range(1000)]
    desk.offer(*request_ids, num_blocks=CountedBlocks(3))
    desk.producer.collect_released(1.0)
    counted = CountedBlocks.additions
    assert counted <= 1000
    for step in range(10):
        desk.producer.collect_released(2.0 + step)
    assert CountedBlocks.additions == counted
    assert desk.stats.data["held_blocks"] == [3000]

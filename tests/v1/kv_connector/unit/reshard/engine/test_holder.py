# SPDX-License-Identifier: Apache-2.0
"""What a worker holds, and whom it believes."""

from __future__ import annotations

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.envelopes import (
    ReshardConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.holder import Holder
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.stats import ReshardStats
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.binding import Binding
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.leases import (
    Held,
    LeaseTable,
    entry_of,
    look_up,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    Announcement,
    Release,
    releases,
    renewals,
)

OFFER = Binding(48, 1, 2)
OTHERS = [Binding(47, 1, 2), Binding(48, 9, 2), Binding(48, 1, 9)]
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
    """A holder, with what its scheduler and its peers would do."""

    def __init__(self) -> None:
        self.agent, self.stats = Agent(), ReshardStats()
        self.holder = Holder(self.agent, LEASE_S, self.stats)

    def tell(self, now_s: float = 0.0, **metadata) -> None:
        """What the scheduler asks for in a step."""
        self.holder.take_up(ReshardConnectorMetadata(**metadata), now_s)

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
            bindings=dict.fromkeys(request_ids, OFFER),
        )

    def hear(
        self, *request_ids: str, binding: Binding = OFFER, notifier: str = "d0", of: int = 1
    ) -> None:
        """A reader is through with some requests."""
        entries = [Release.of(request_id, of, binding) for request_id in request_ids]
        self.agent.arrived += [("peer", message) for message in releases(notifier, entries)]

    def seen(self, request_id: str) -> Held:
        """What readers see of a request."""
        table: LeaseTable = self.holder._table
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
    assert desk.holder.let_go(1.0) == {"a", "b"}
    assert [desk.is_entered(each) for each in "abc"] == [False, False, True]
    desk.hear("c", notifier="d1", of=2)
    assert desk.holder.let_go(2.0) == {"c"}


@pytest.mark.parametrize("binding", OTHERS)
@pytest.mark.parametrize("early", [False, True])
def test_reader_of_something_else_costs_nobody_anything(binding, early, caplog_vllm):
    """Who knows a request's name alone does not end it, and is told of once, at the offer or after.

    A right one of the same name still counts, and so does what else came with the wrong one.
    """
    desk = Desk()
    desk.offer("b")
    if early:
        desk.tell(admitted={"a"})
        desk.hear("a", binding=binding)
        assert desk.holder.let_go(1.0) == set()
        assert "Request a is held on" not in caplog_vllm.text
    desk.offer("a")
    for _ in range(3):
        desk.hear("a", binding=binding)
    desk.hear("b")
    assert desk.holder.let_go(1.0) == {"b"}
    assert desk.is_entered("a")
    assert caplog_vllm.text.count("Request a is held on: d0 is through with other tokens") == 1
    desk.hear("a")
    assert desk.holder.let_go(2.0) == {"a"}


def test_reader_may_be_faster_than_the_offer():
    """What it says is kept until there is something to compare it with."""
    desk = Desk()
    desk.tell(admitted={"a"})
    desk.hear("a")
    assert desk.holder.let_go(1.0) == set()
    desk.offer("a")
    assert desk.holder.let_go(2.0) == {"a"}
    assert desk.stats.data["held_blocks"] == []


def test_offer_is_seen_before_its_step():
    """Readers believe what they read; but nobody is through with it before that step."""
    desk = Desk()
    desk.tell(admitted={"a", "b"}, num_offers=1)
    desk.holder.hear_ahead(Announcement(2, "a", OFFER))
    assert desk.seen("a") == Held(True, OFFER)
    assert desk.seen("b") == Held(True, None)
    desk.hear("a")
    assert desk.holder.let_go(1.0) == set()
    assert desk.seen("a") == Held(True, OFFER)
    desk.offer("a")
    assert desk.holder.let_go(2.0) == {"a"}
    assert not desk.is_entered("a")


def test_lease_does_not_run_before_its_step():
    """What was announced expires no sooner than what was not."""
    desk = Desk()
    desk.tell(admitted={"a"})
    desk.holder.hear_ahead(Announcement(1, "a", OFFER))
    assert desk.holder.let_go(10 * LEASE_S) == set()
    desk.offer("a", now_s=10 * LEASE_S)
    assert desk.holder.let_go(10.5 * LEASE_S) == set()
    assert desk.holder.let_go(12 * LEASE_S) == {"a"}


def test_announcement_that_comes_late_is_none():
    """After its step the name may be another request's, whose blocks are others."""
    desk = Desk()
    desk.offer("a", num_offers=1)
    desk.hear("a")
    assert desk.holder.let_go(1.0) == {"a"}
    desk.tell(admitted={"a"}, num_offers=1)
    desk.holder.hear_ahead(Announcement(1, "a", OFFER))
    assert desk.seen("a") == Held(True, None)


def test_nothing_is_announced_of_what_is_not_held():
    """Where the table had no room, readers see as little as before."""
    desk = Desk()
    desk.holder.hear_ahead(Announcement(1, "a", OFFER))
    assert desk.seen("a") == Held(False, None)


def test_late_readers_are_told_of_in_one_line(caplog_vllm):
    """However many requests they come late for; each is counted."""
    desk = Desk()
    desk.hear("a", "b", "c")
    assert desk.holder.let_go(1.0) == set()
    assert "d0 was too late for the blocks of request a and of 2 more, which" in caplog_vllm.text
    assert len(desk.stats.data["num_notifications_after_expiry"]) == 3


def test_strangers_bytes_cost_a_line(caplog_vllm):
    """What came before and after them is heard."""
    desk = Desk()
    desk.offer("a", "b")
    desk.hear("a")
    desk.agent.arrived.append(("stranger", b"request:1"))
    desk.hear("b")
    assert desk.holder.let_go(1.0) == {"a", "b"}
    assert "From stranger: a notification of 9 bytes is not understood" in caplog_vllm.text


def test_renewed_lease_outlives_its_term():
    """And ends after that."""
    desk = Desk()
    desk.offer("a")
    desk.agent.arrived += [("peer", message) for message in renewals(["a"])]
    assert desk.holder.let_go(LEASE_S - 1) == set()
    assert desk.holder.let_go(LEASE_S + 1) == set()
    assert desk.holder.let_go(2 * LEASE_S) == {"a"}
    assert not desk.is_entered("a")


def test_held_blocks_are_counted_as_they_change():
    """By released, expired, withdrawn and repeated requests, and only where the sum is another."""
    desk = Desk()
    desk.offer("a", "b", num_blocks=3)
    desk.holder.let_go(1.0)
    assert desk.stats.data["held_blocks"] == [6]
    desk.stats.reset()
    desk.offer("a", num_blocks=5)
    desk.hear("b")
    desk.holder.let_go(2.0)
    assert desk.stats.data["held_blocks"] == [5]
    desk.stats.reset()
    desk.holder.let_go(3.0)
    assert desk.stats.data["held_blocks"] == []
    desk.tell(withdrawn={"a"})
    desk.holder.let_go(4.0)
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
    desk.holder.let_go(1.0)
    counted = CountedBlocks.additions
    assert counted <= 1000
    for step in range(10):
        desk.holder.let_go(2.0 + step)
    assert CountedBlocks.additions == counted
    assert desk.stats.data["held_blocks"] == [3000]

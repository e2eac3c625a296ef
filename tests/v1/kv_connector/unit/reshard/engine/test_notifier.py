# SPDX-License-Identifier: Apache-2.0
"""What a worker tells those who hold blocks for it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.notifier import Notifier
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.stats import ReshardStats
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import TransferError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    Done,
    Renew,
    decode_notification,
)


class Holders:
    """A connection with an engine, some of whose workers can be reached."""

    engine = SimpleNamespace(releases=[("p0", 1), ("p1", 3)])

    def __init__(self, *unreachable: str) -> None:
        self.unreachable = unreachable
        self.sent: list[tuple[str, object]] = []

    def notify(self, peer: str, message: bytes) -> None:
        """Send a notification."""
        if peer in self.unreachable:
            raise TransferError(f"{peer} cannot be told")
        self.sent.append((peer, decode_notification(message)))


def test_every_holder_is_told_how_many_it_must_hear():
    """The number is the plan's for each holder, and the name is this worker's."""
    holders, stats = Holders(), ReshardStats()
    Notifier("d0", stats).release("p-a", holders)
    assert holders.sent == [("p0", Done("p-a", "d0", 1)), ("p1", Done("p-a", "d0", 3))]
    assert stats.data["notifications_sent"] == [2]


def test_every_holder_is_asked_to_hold_on():
    """One notification to each, whatever the number of requests."""
    holders = Holders()
    Notifier("d0", ReshardStats()).renew(["b", "a"], holders)
    assert holders.sent == [("p0", Renew(["a", "b"])), ("p1", Renew(["a", "b"]))]


@pytest.mark.parametrize("known", [True, False])
def test_holder_that_cannot_be_told_costs_the_others_nothing(known, caplog_vllm):
    """It is counted, and told in the log unless it is no news."""
    holders, stats = Holders("p0"), ReshardStats()
    Notifier("d0", stats).release("p-a", holders, known_as_broken=known)
    assert [peer for peer, _ in holders.sent] == ["p1"]
    assert stats.data["num_failed_notifications"] == [1.0]
    assert ("p0 cannot be told" in caplog_vllm.text) is not known

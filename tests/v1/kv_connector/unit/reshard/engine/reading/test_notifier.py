# SPDX-License-Identifier: Apache-2.0
"""What a worker tells those who hold blocks for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.v1.kv_connector.unit.reshard.engine.connections import (
    OFFER,
    RecordingConnection,
    read_of,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.reading.notifier import Notifier
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.stats import ReshardStats
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.mesh import ParallelMesh
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.reshard import plan_reshard
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import shard_model
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    Done,
    DoneEntry,
    GaveUp,
    GaveUpEntry,
    Renew,
)


def test_every_producer_is_told_how_many_it_must_hear():
    """The number is the plan's for each producer, and the name is this worker's."""
    producers, stats = RecordingConnection(), ReshardStats()
    notifier = Notifier("d0", stats)
    notifier.release(read_of("p-a"), producers)
    assert producers.sent == []
    notifier.flush()
    assert producers.sent == [
        ("p0", Done("d0", [DoneEntry.of("p-a", 1, OFFER)])),
        ("p1", Done("d0", [DoneEntry.of("p-a", 3, OFFER)])),
    ]
    assert stats.data["notifications_sent"] == [2]


def test_every_producer_is_told_what_is_given_up():
    """Beside what was read, with the secret."""
    producers, stats = RecordingConnection(), ReshardStats()
    notifier = Notifier("d0", stats)
    notifier.release(read_of("p-a"), producers)
    notifier.release(replace(read_of("p-b"), secret=7), producers)
    notifier.flush()
    assert producers.sent == [
        ("p0", Done("d0", [DoneEntry.of("p-a", 1, OFFER)])),
        ("p0", GaveUp("d0", [GaveUpEntry("p-b", 1, 7)])),
        ("p1", Done("d0", [DoneEntry.of("p-a", 3, OFFER)])),
        ("p1", GaveUp("d0", [GaveUpEntry("p-b", 3, 7)])),
    ]
    assert stats.data["notifications_sent"] == [4]


def test_producer_is_told_nothing_of_what_cannot_be_named():
    """Without a secret or a fingerprint, what is held under a name may be another's."""
    producers, notifier = RecordingConnection(), Notifier("d0", ReshardStats())
    notifier.release(replace(read_of("p-a"), fingerprint=None), producers)
    notifier.flush()
    assert producers.sent == []


def test_what_was_sent_is_not_sent_again():
    """A poll in which nothing ends costs nothing."""
    producers = RecordingConnection()
    notifier = Notifier("d0", ReshardStats())
    notifier.release(read_of("p-a"), producers)
    notifier.flush()
    producers.sent.clear()
    notifier.flush()
    assert producers.sent == []


def test_requests_of_one_turn_share_a_notification():
    """128 producers and ten requests: 128 notifications, where each took as many before."""
    src = shard_model(ParallelMesh(8, 16), 16, 16)
    dst = shard_model(ParallelMesh(1, 1), 16, 16)
    counts = [(str(each.src_rank), len(each.notifiers)) for each in plan_reshard(src, dst).releases]
    producers = RecordingConnection(releases=counts)
    notifier = Notifier("d0", ReshardStats())
    for number in range(10):
        notifier.release(read_of(f"p-{number}"), producers)
    notifier.flush()
    assert len(producers.sent) == len({peer for peer, _ in producers.sent}) == 128
    for _, done in producers.sent:
        assert [release.request_id for release in done.releases] == [f"p-{n}" for n in range(10)]


def test_every_producer_is_asked_to_hold_on():
    """One notification to each, whatever the number of requests."""
    producers = RecordingConnection()
    Notifier("d0", ReshardStats()).renew(["b", "a"], producers)
    assert producers.sent == [("p0", Renew(["a", "b"])), ("p1", Renew(["a", "b"]))]


@pytest.mark.parametrize("is_second", [False, True])
def test_producer_that_cannot_be_told_costs_the_others_nothing(is_second, caplog_vllm):
    """What it was to be told is given back once; the second time it is left to its lease."""
    producers, stats = RecordingConnection("p0"), ReshardStats()
    notifier, receives = Notifier("d0", stats), [read_of("p-a"), replace(read_of("p-b"), secret=7)]
    for receive in receives:
        notifier.release(receive, producers, is_second=is_second)
    lost = {} if is_second else {each.remote_request_id: each for each in receives}
    assert notifier.flush() == {producers: lost}
    assert {peer for peer, _ in producers.sent} == {"p1"}
    assert stats.data["num_failed_notifications"] == [1.0]
    warnings = [each for each in caplog_vllm.records if each.levelname == "WARNING"]
    assert sum("p0 cannot be told" in each.getMessage() for each in warnings) == is_second
    assert notifier.flush() == {}


def test_request_is_given_back_once_for_all_producers_that_cannot_be_told():
    """It is released at all of them again, and not as often as there are producers."""
    producers, receive = RecordingConnection("p0", "p1"), read_of("p-a")
    notifier = Notifier("d0", ReshardStats())
    notifier.release(receive, producers)
    assert notifier.flush() == {producers: {"p-a": receive}}


def test_producer_that_cannot_be_told_is_tried_once_a_turn():
    """What would take several notifications is given up with the first of them."""
    producers, stats = RecordingConnection("p0", "p1"), ReshardStats()
    notifier = Notifier("d0", stats)
    for number in range(1000):
        notifier.release(read_of(f"p-{number}"), producers)
    notifier.flush()
    assert stats.data["num_failed_notifications"] == [1.0, 1.0]

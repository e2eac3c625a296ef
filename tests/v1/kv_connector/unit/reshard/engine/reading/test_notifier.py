# SPDX-License-Identifier: Apache-2.0
"""What a worker tells those who hold blocks for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.v1.kv_connector.unit.reshard.engine.connections import (
    OFFER,
    Producers,
    RecordingConnection,
    read_of,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.reading.notifier import (
    RENEWALS_PER_LEASE,
    Notifier,
    Renewals,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.settings import DEFAULT_LEASE_S
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.stats import ReshardStats
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.reshard import plan_reshard
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import (
    ParallelMesh,
    shard_model,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    Done,
    DoneEntry,
    GaveUp,
    GaveUpEntry,
    RemoteEngineAddress,
    RemoteRequest,
    Renew,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.tasks import Tasks

LEASE_S = 30.0
HERE = RemoteEngineAddress("prefill", "10.0.0.1", 5600)
ELSEWHERE = RemoteEngineAddress("prefill", "192.0.2.66", 5600)


def telling(stats: ReshardStats, *connections: RecordingConnection) -> tuple[Notifier, Tasks]:
    """A worker that tells the producers of one engine, over one connection after the other."""
    tasks = Tasks()
    return Notifier("d0", stats, Producers(*connections), tasks), tasks


def test_every_producer_is_told_how_many_it_must_hear():
    """The number is the plan's for each producer, and the name is this worker's."""
    producers, stats = RecordingConnection(), ReshardStats()
    notifier, _ = telling(stats)
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
    notifier, _ = telling(stats)
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
    producers, (notifier, _) = RecordingConnection(), telling(ReshardStats())
    notifier.release(replace(read_of("p-a"), fingerprint=None), producers)
    notifier.flush()
    assert producers.sent == []


def test_what_was_sent_is_not_sent_again():
    """A poll in which nothing ends costs nothing."""
    producers = RecordingConnection()
    notifier, _ = telling(ReshardStats())
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
    notifier, _ = telling(ReshardStats())
    for number in range(10):
        notifier.release(read_of(f"p-{number}"), producers)
    notifier.flush()
    assert len(producers.sent) == len({peer for peer, _ in producers.sent}) == 128
    for _, done in producers.sent:
        assert [release.request_id for release in done.releases] == [f"p-{n}" for n in range(10)]


def test_every_producer_is_asked_to_hold_on():
    """One notification to each, whatever the number of requests."""
    producers = RecordingConnection()
    notifier, tasks = telling(ReshardStats(), producers)
    notifier.renew(read_of("p-a").source, ["b", "a"])
    tasks.run(0.0)
    assert producers.sent == [("p0", Renew(["a", "b"])), ("p1", Renew(["a", "b"]))]


def test_producer_that_cannot_be_told_is_told_over_the_next_connection():
    """And the others once more, as often as there are requests."""
    first, second, stats = RecordingConnection("p0", "p1"), RecordingConnection(), ReshardStats()
    notifier, tasks = telling(stats, first, second)
    for receive in (read_of("p-a"), replace(read_of("p-b"), secret=7)):
        notifier.release(receive, first)
    notifier.flush()
    assert stats.data["num_failed_notifications"] == [1.0, 1.0]
    tasks.run(0.0)
    notifier.flush()
    assert first.sent == [] and len(second.sent) == 4
    assert second.sent[:2] == [
        ("p0", Done("d0", [DoneEntry.of("p-a", 1, OFFER)])),
        ("p0", GaveUp("d0", [GaveUpEntry("p-b", 1, 7)])),
    ]


def test_producer_that_cannot_be_told_twice_costs_the_others_nothing(caplog_vllm):
    """What it was to be told is left to its lease."""
    connections, stats = [RecordingConnection("p0"), RecordingConnection("p0")], ReshardStats()
    notifier, tasks = telling(stats, *connections)
    notifier.release(read_of("p-a"))
    for _ in range(3):
        tasks.run(0.0)
        notifier.flush()
    assert [peer for each in connections for peer, _ in each.sent] == ["p1", "p1"]
    assert stats.data["num_failed_notifications"] == [1.0, 1.0]
    (warning,) = [each for each in caplog_vllm.records if each.levelname == "WARNING"]
    assert "p0 cannot be told: its blocks are freed" in warning.getMessage()


def test_producer_that_cannot_be_told_is_tried_once_a_turn():
    """What would take several notifications is given up with the first of them."""
    producers, stats = RecordingConnection("p0", "p1"), ReshardStats()
    notifier, _ = telling(stats, producers, RecordingConnection())
    for number in range(1000):
        notifier.release(read_of(f"p-{number}"), producers)
    notifier.flush()
    assert stats.data["num_failed_notifications"] == [1.0, 1.0]


@pytest.fixture
def renewals() -> Renewals:
    """None yet."""
    return Renewals(LEASE_S)


def test_requests_of_one_engine_are_renewed_together(renewals):
    """One message names all of them."""
    renewals.begin({"d-a": RemoteRequest(HERE, "p-a"), "d-b": RemoteRequest(HERE, "p-b")})
    assert renewals.take_due(0.0) == {HERE: {"p-a", "p-b"}}


def test_a_wrong_address_takes_no_others_along(renewals):
    """One engine id at two addresses is two engines until one of them answers."""
    renewals.begin({"wrong": RemoteRequest(ELSEWHERE, "p-x"), "d-a": RemoteRequest(HERE, "p-a")})
    assert renewals.take_due(0.0) == {ELSEWHERE: {"p-x"}, HERE: {"p-a"}}
    renewals.stop(["wrong"])
    assert renewals.take_due(LEASE_S) == {HERE: {"p-a"}}


def test_renewals_keep_their_interval(renewals):
    """The first goes out at once, later ones often enough that some may be lost."""
    renewals.begin({"d-a": RemoteRequest(HERE, "p-a")})
    interval_s = LEASE_S / RENEWALS_PER_LEASE
    assert renewals.next_due_s <= 5.0
    assert renewals.take_due(5.0)
    assert renewals.next_due_s == 5.0 + interval_s
    assert not renewals.take_due(5.0 + 0.9 * interval_s)
    assert renewals.take_due(5.0 + interval_s)


def test_request_that_another_still_reads_is_kept_alive(renewals):
    """Its name is sent until the last of those that wait for it has ended; then nothing is due."""
    renewals.begin({"d-a": RemoteRequest(HERE, "p-a"), "d-b": RemoteRequest(HERE, "p-a")})
    renewals.stop(["d-a"])
    assert renewals.take_due(0.0) == {HERE: {"p-a"}}
    renewals.stop(["d-b", "d-b"])
    assert not renewals.take_due(LEASE_S) and not renewals
    assert renewals.next_due_s == float("inf")


def test_a_long_lease_here_loses_no_shorter_one_elsewhere():
    """The holder's lease decides, which may be vLLM's default: a request that waits anew has it."""
    renewals = Renewals(10 * DEFAULT_LEASE_S)
    renewals.begin({"d-a": RemoteRequest(HERE, "p-a")})
    assert renewals.take_due(0.0)
    renewals.begin({"d-b": RemoteRequest(HERE, "p-b")})
    assert renewals.next_due_s <= DEFAULT_LEASE_S / RENEWALS_PER_LEASE
    assert renewals.take_due(DEFAULT_LEASE_S / RENEWALS_PER_LEASE) == {HERE: {"p-a", "p-b"}}

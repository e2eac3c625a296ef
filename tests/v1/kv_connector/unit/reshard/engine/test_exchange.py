# SPDX-License-Identifier: Apache-2.0
"""Turns of a worker's exchange; whole workers are in `test_worker`, and many in `simulation`."""

from __future__ import annotations

from concurrent.futures import Future
from random import Random
from types import SimpleNamespace

import pytest
import torch

from tests.v1.kv_connector.unit.reshard.engine.test_worker import (
    Progress,
    assert_received,
    engines,
    fill,
    receive,
    wait_until,
)
from tests.v1.kv_connector.unit.reshard.simulation.wire import Wire
from tests.v1.kv_connector.unit.reshard.test_operation_counts import calls
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.envelopes import (
    ReshardConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.exchange import (
    Exchange,
    Report,
    Step,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.holder import Holder
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.notifier import Notifier
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.peers import PeerTable
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.reads import RequestReads
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.stats import ReshardStats
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.worker import ReshardWorker
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.lifetimes import Lifetime
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    RemoteEngineAddress,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.transfers import Transfers

__all__ = ["engines"]


def test_reports_add_up():
    """What nobody has collected yet, and what has ended since."""
    first, second = ReshardStats(), ReshardStats()
    first.record_notification()
    second.record_notification()
    report = Report(sent={"a"}, failed={"b": frozenset({1})}, stats=first)
    report.add(Report(received={"b"}, stats=second))
    report.add(Report())
    assert (report.sent, report.received, report.failed) == ({"a"}, {"b"}, {"b": frozenset({1})})
    assert sum(report.stats.data["notifications_sent"]) == 2
    assert report and not Report()


@pytest.mark.parametrize("engines", ["direct", "staged"], indirect=True)
def test_nothing_is_read_into_what_a_step_in_flight_writes(engines, monkeypatch):
    """Reads of a step wait until the device has computed what came before it."""
    event = SimpleNamespace(over=False)
    event.query = lambda: event.over
    monkeypatch.setattr(ReshardWorker, "_computed_before", lambda *_: event)
    p, d = engines("prefill", tp=2), engines("decode")
    (worker,) = d.workers.values()
    address = p.serve()
    whole = fill(p, [5, 2, 9])
    p.offer("p-a")
    progress = Progress(p, d)
    d.start(receive={"d-a": receive(address, [3, 4, 1], [5, 2, 9])})
    wait_until(lambda: worker._exchange._incoming, progress.step)
    for _ in range(20):
        progress.step()
    assert len(worker._transfers) == len(worker._exchange.reads) == 0
    assert not worker._exchange.peers.num_opening
    event.over = True
    progress.until(d, received="d-a")
    assert_received(d, [3, 4, 1], whole)


@pytest.mark.parametrize("role", ["kv_consumer", "kv_both", "kv_producer"])
def test_reads_wait_for_the_device_in_any_role(engines, monkeypatch, role):
    """New blocks may be zeroed, or copied into, at the start of the step that reads into them."""
    (worker,) = engines("decode").workers.values()
    worker._vllm_config.kv_transfer_config.kv_role = role
    recorded = []
    event = SimpleNamespace(record=lambda: recorded.append("now"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    address = RemoteEngineAddress("prefill", "p.example", 5600)
    reading = ReshardConnectorMetadata(receive={"d-a": receive(address, [3], [5])})
    assert worker._computed_before(reading) is None
    monkeypatch.setattr(worker, "_on_cpu", False)
    assert worker._computed_before(reading) is event and recorded == ["now"]
    assert worker._computed_before(ReshardConnectorMetadata()) is None


class Connection:
    """A generation with which nothing is under way."""

    def __init__(self) -> None:
        self.lifetime = Lifetime(100.0)
        self.leases: list[str] = []


def idle_exchange(num_peers: int) -> Exchange:
    """A worker's exchange that is connected with some engines, and reads nothing."""
    agent, stats = Wire(Random(0)).open("holder", lambda _: None), ReshardStats()

    def open_at_once(_: RemoteEngineAddress) -> Future:
        answered = Future()
        answered.set_result(Connection())
        return answered

    peers, transfers = PeerTable(open_at_once, 600.0), Transfers()
    notifier = Notifier("worker", stats)
    reads = RequestReads(peers, transfers, notifier, stats, 60.0)
    holder = Holder(agent, 30.0, stats)
    exchange = Exchange(agent, holder, peers, transfers, reads, notifier, stats)
    for number in range(num_peers):
        peers.want(RemoteEngineAddress(f"engine{number}", f"p{number}.example", 5600), 0.0)
    exchange.turn([], 0.0)
    exchange.turn([], 0.0)
    assert all(peer.generation is not None for peer in peers._peers.values())
    return exchange


def test_reads_that_nobody_wants_are_looked_at_now_and_then(monkeypatch):
    """Nobody waits for them, and their blocks are nobody's until they have ended."""
    exchange = idle_exchange(1)
    monkeypatch.setattr(Transfers, "is_lingering", True)
    assert not exchange.is_moving
    assert 1.0 < exchange.next_due_s(1.0) <= 1.1


@pytest.mark.parametrize("ticks", [False, True])
def test_turn_costs_nothing_for_idle_peers(ticks):
    """Three hundred connections that nothing is read with are as one."""
    counts = []
    for num_peers in (1, 300):
        exchange = idle_exchange(num_peers)
        steps = [Step()] * ticks

        def turn(exchange: Exchange = exchange, steps: list[Step] = steps) -> None:
            exchange.turn(steps, 1.0)
            assert not (exchange.is_moving or exchange.is_talking or exchange.has_backlog)
            assert exchange.next_due_s(1.0) == 600.0

        counts.append(calls(turn))
    assert counts[0] == counts[1]

# SPDX-License-Identifier: Apache-2.0
"""One worker's transfer engine; whole workers are in `test_worker`, and many in `simulation`."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import Future
from random import Random
from types import SimpleNamespace

import pytest
import torch

from tests.v1.kv_connector.unit.reshard.engine.workers import (
    Progress,
    assert_received,
    fill,
    lost_blocks,
    receive,
    wait_until,
)
from tests.v1.kv_connector.unit.reshard.profiling import calls
from tests.v1.kv_connector.unit.reshard.simulation.wire import Wire
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine import worker as worker_module
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.connecting.peers import PeerTable
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.producer import ProducerSide
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.reading.consumer import (
    ConsumerSide,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.reading.notifier import (
    RENEWALS_PER_LEASE,
    Notifier,
    Renewals,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.stats import ReshardStats
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.transfer_engine import (
    SchedulerStep,
    TransferEngine,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.worker import CacheDevice
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import (
    ConnectorThreadError,
    InDoubtError,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import MeshRank
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.lifetimes import Lifetime
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    RemoteEngineAddress,
    RemoteRequest,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.tasks import Tasks
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport import limits
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.lane import Lane, Lanes
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.limits import listeners
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.transfers import Transfers

LEASE_S = 30.0


@pytest.mark.parametrize("engines", ["direct", "staged"], indirect=True)
def test_nothing_is_read_into_what_a_step_in_flight_writes(engines, monkeypatch):
    """Reads of a step wait until the device has computed what came before it."""
    event = SimpleNamespace(over=False)
    event.query = lambda: event.over
    monkeypatch.setattr(CacheDevice, "computed_before", lambda *_: event)
    p, d = engines("prefill", tp=2), engines("decode")
    (transfer_engine,) = d.transfer_engines.values()
    address = p.serve()
    whole = fill(p, [5, 2, 9])
    p.offer("p-a")
    progress = Progress(p, d)
    d.start(receive={"d-a": receive(address, [3, 4, 1], [5, 2, 9])})
    # A step that waits is moving, though nothing is read.
    wait_until(lambda: transfer_engine.is_moving, progress.step)
    for _ in range(20):
        progress.step()
    assert transfer_engine.is_moving
    assert len(transfer_engine.transfers) == len(transfer_engine.consumer) == 0
    assert not any(peer.is_opening for peer in transfer_engine.peers)
    event.over = True
    progress.until(d, received="d-a")
    assert_received(d, [3, 4, 1], whole)


def test_worker_that_lacks_descriptors_says_so(engines, monkeypatch):
    """To its scheduler, and in the metrics, when it takes part in a step."""
    monkeypatch.setattr(limits, "count_files", lambda: 81)
    monkeypatch.setattr(limits, "file_limit", lambda: 100)
    p = engines("prefill")
    (worker,) = p.workers.values()
    p.start(admitted={"p-a"})
    told, stats = {}, ReshardStats()

    def has_told() -> bool:
        told.update(worker.collect().take_shortages())
        if (taken := worker.report.take_stats()) is not None:
            stats.aggregate(taken)
        return bool(told and stats.data["open_files"])

    wait_until(has_told)
    assert list(told.values()) == ["81 of 100 files are open"]
    assert stats.data["open_files"] == [0.81]


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_worker_that_none_can_read_from_any_more_ends(engines, role):
    """Its engine ends with the reason, at its next step, instead of looking well."""
    engine = engines("one", role=role)
    (transfer_engine,) = engine.transfer_engines.values()
    with socket.create_server(("127.0.0.1", 0)) as opened:
        closed = next(each for each in listeners() if each[0] == opened.fileno())
        # A worker that only reads needs none.
        assert bool(transfer_engine.files._needed) == (role == "kv_producer")
        if role == "kv_producer":
            transfer_engine.files.need([closed])
    (worker,) = engine.workers.values()

    def ends() -> bool:
        engine.start()
        try:
            worker.collect()
        except ConnectorThreadError as error:
            assert f"UCX has closed its port {closed[1]}" in str(error)
            return True
        return role == "kv_consumer"

    wait_until(ends)


@pytest.mark.parametrize("role", ["kv_consumer", "kv_both", "kv_producer"])
def test_reads_wait_for_the_device_in_any_role(engines, monkeypatch, role):
    """New blocks may be zeroed, or copied into, at the start of the step that reads into them."""
    monkeypatch.setattr(worker_module, "CacheDevice", lambda **_: CacheDevice(on_cpu=False))
    recorded = []
    event = SimpleNamespace(record=lambda: recorded.append("now"), query=lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    d = engines("decode", role=role)
    d.start(admitted={"p-a"})
    assert recorded == []
    address = RemoteEngineAddress("prefill", "p.example", 5600)
    d.start(receive={"d-a": receive(address, [3], [5])})
    assert recorded == ["now"]
    # It is held back by the event.
    (transfer_engine,) = d.transfer_engines.values()
    wait_until(lambda: transfer_engine.is_moving)
    assert len(transfer_engine.consumer) == 0


class Connection:
    """A connection with which nothing is under way."""

    def __init__(self) -> None:
        self.lifetime = Lifetime(100.0)
        self.leases: list[str] = []
        self.is_drained = True

    def connect_next(self) -> bool:
        """All of its workers are connected."""
        return True


def idle_transfer_engine(num_peers: int) -> TransferEngine:
    """A worker's transfer engine that is connected with some engines, and reads nothing."""
    agent, stats = Wire(Random(0)).open("producer", lambda _: None), ReshardStats()

    def at_once(made: object) -> Future:
        answered: Future = Future()
        answered.set_result(made)
        return answered

    lanes = Lanes(lambda: at_once(Lane(agent)))
    lowered = SimpleNamespace(num_ranks=1, rank=MeshRank(0, 0), summary="reads nothing")
    peers = PeerTable(lambda _: at_once(lowered), lambda *_: Connection(), lanes, 600.0)
    transfers = Transfers()
    tasks = Tasks()
    notifier = Notifier("worker", stats, peers, tasks)
    reads = ConsumerSide(peers, transfers, notifier, stats, tasks, 60.0)
    producer = ProducerSide(agent, 30.0, stats)
    transfer_engine = TransferEngine(
        agent, producer, peers, transfers, reads, notifier, Renewals(30.0), stats
    )
    for number in range(num_peers):
        peers.get_or_connect(
            RemoteEngineAddress(f"engine{number}", f"p{number}.example", 5600), 0.0
        )
    transfer_engine.poll([], 0.0)
    transfer_engine.poll([], 0.0)
    assert len(peers) == num_peers and not any(peer.is_opening for peer in peers)
    return transfer_engine


def test_reads_that_nobody_wants_are_looked_at_now_and_then(monkeypatch):
    """Nobody waits for them, and their blocks are nobody's until they have ended."""
    transfer_engine = idle_transfer_engine(1)
    monkeypatch.setattr(Transfers, "is_lingering", True)
    assert not transfer_engine.is_moving
    assert 1.0 < transfer_engine.next_due_s(1.0) <= 1.1


@pytest.mark.parametrize("ticks", [False, True])
def test_turn_costs_nothing_for_idle_peers(ticks):
    """Three hundred connections that nothing is read with are as one."""
    counts = []
    for num_peers in (1, 300):
        transfer_engine = idle_transfer_engine(num_peers)
        steps = [SchedulerStep()] * ticks

        def poll(
            transfer_engine: TransferEngine = transfer_engine, steps: list[SchedulerStep] = steps
        ) -> None:
            transfer_engine.poll(steps, 1.0)
            assert not (transfer_engine.is_moving or transfer_engine.has_backlog)
            assert transfer_engine.next_due_s(1.0) == 600.0

        counts.append(calls(poll))
    assert counts[0] == counts[1]


def test_threads_choose_the_device_of_the_caches(engines, monkeypatch):
    """The connector's and the dialer's."""
    choose, threads = CacheDevice.choose, []

    def choose_in_thread(device: CacheDevice) -> None:
        threads.append(threading.current_thread().name.partition("_")[0])
        choose(device)

    monkeypatch.setattr(CacheDevice, "choose", choose_in_thread)
    engines("decode")
    # It makes lanes once the caches are registered.
    wait_until(lambda: {*threads} == {"reshard-connector", "reshard-dialer"})


@pytest.mark.parametrize("renews", [False, True])
def test_connection_that_died_while_it_was_idle_costs_nothing(engines, monkeypatch, renews):
    """The lease's first renewal or the read is refused; the request is read with the next one."""
    later_s = 0.0
    p, d = (
        engines("prefill"),
        engines("decode", lease_s=LEASE_S, clock=lambda: time.monotonic() + later_s),
    )
    address = p.serve()
    progress = Progress(p, d)
    (transfer_engine,) = d.transfer_engines.values()

    def read(name: str, blocks: list[int]) -> None:
        whole = fill(p, [5, 2, 9])
        p.offer(name)
        wanted = receive(address, blocks, [5, 2, 9], remote_request_id=name)
        awaited = {name: RemoteRequest(address, name)} if renews else {}
        d.start(receive={name: wanted}, awaited=awaited)
        progress.until(d, received=name)
        assert_received(d, blocks, whole)

    read("first", [3, 4, 1])
    (peer,) = transfer_engine.peers
    died = peer.connection

    def refuse(*_: object) -> None:
        raise InDoubtError("NIXL_ERR_REMOTE_DISCONNECT")

    # Leases are renewed a few times in their time; it is over by the next request.
    later_s = LEASE_S / RENEWALS_PER_LEASE
    for call in ("notify", "read"):
        monkeypatch.setattr(died.lane.agent, call, refuse)
    read("second", [2, 6, 5])
    (worker,) = d.workers.values()
    assert not lost_blocks(worker)
    assert peer.connection is not died and died.lifetime.is_retired

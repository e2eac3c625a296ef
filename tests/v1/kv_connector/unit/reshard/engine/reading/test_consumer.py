# SPDX-License-Identifier: Apache-2.0
"""Which requests begin in a poll; what is read of them is tested with whole workers."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.v1.kv_connector.unit.reshard.containers import sizes
from tests.v1.kv_connector.unit.reshard.transport.memory_agent import MemoryAgent
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.connecting.peers import (
    STEADY_S,
    Peer,
    PeerTable,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.metadata import WorkerReport
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.reading import consumer
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.reading.consumer import (
    ConsumerSide,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.reading.endings import (
    BlocksInDoubt,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.reading.notifier import Notifier
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.stats import (
    ReshardStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.staging import Strategy
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.fingerprint import (
    OfferFingerprint,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.leases import LeaseTable
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.lifetimes import Lifetime
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    Receive,
    RemoteEngineAddress,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.request_blocks import (
    RequestBlocks,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.tasks import Tasks, suspended
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import TransferState
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.budget import UNLIMITED, Budget
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.lane import Lane, Lanes
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.lease_check import (
    LeaseChecker,
    LeaseCheckFailure,
    LeaseError,
    PreparedTable,
    prepare_table,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.parts import (
    Arrived,
    PartError,
    RequestReads,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.transfers import Transfers


class Connection:
    """A connection over which there is nothing to read: requests end when they begin."""

    def __init__(self, lane: Lane | None = None) -> None:
        self.lane = lane
        self.lifetime = Lifetime(100.0)
        self.leases = SimpleNamespace(
            give_up=lambda: None, advance=lambda: None, is_busy=False, is_broken=False
        )
        self.is_connected = self.is_drained = True
        self.legs: list[object] = []
        self.lease_tables: dict[str, object] = {}
        self.releases: list[tuple[str, int]] = []
        self.num_verified, self.mistake = 0, None
        self.unreached: list[object] = []

    def connect_next(self) -> bool:
        """All of its workers are connected."""
        return True


def lanes() -> Lanes:
    """One lane, which is made at once."""

    def make() -> Future[Lane]:
        made: Future[Lane] = Future()
        made.set_result(Lane(MemoryAgent(f"lane-{uuid.uuid4()}")))
        return made

    return Lanes(make)


class Read:
    """A part of a request, read from the worker `p`."""

    leg = SimpleNamespace(remote=SimpleNamespace(peer="p"))
    connection: Connection


class Worker:
    """Reads from engines that answer when the test says so."""

    def __init__(self) -> None:
        self.handshakes: list[Future] = []
        self.connections: list[Connection] = []
        self.failed: list[str] = []
        self.peers = PeerTable(self._dial, self._connect, lanes(), 600.0)
        transfers, self.stats = Transfers(), ReshardStats()
        tasks = Tasks()
        notifier = Notifier("me", self.stats, self.peers, tasks)
        self.reads = ConsumerSide(self.peers, transfers, notifier, self.stats, tasks, 600.0)
        cache = SimpleNamespace(num_block_ids=1000)
        self.reads.set_local_cache(SimpleNamespace(cache=cache, window_groups=frozenset()))

    def ask(self, peer: int, *request_ids: str, now_s: float = 0.0) -> None:
        """Ask for requests."""
        source = RemoteEngineAddress(f"engine{peer}", f"p{peer}.example", 5600)
        for request_id in request_ids:
            receive = Receive(source, request_id, [[1]], [[1]], 1, 1, OfferFingerprint(1, 2, 3))
            self.reads.start_request(request_id, receive, now_s)

    def answer(self) -> None:
        """All engines that were asked answer."""
        for handshake in self.handshakes:
            if not handshake.done():
                handshake.set_result(SimpleNamespace())

    def poll(self, budget: Budget = UNLIMITED, now_s: float = 0.0) -> list[str]:
        """Which requests begin in a poll."""
        for peer, error in self.peers.advance(now_s):
            assert error is None
            self.reads.on_connected(peer)
        self.reads.begin(now_s, budget)
        report = WorkerReport()
        self.reads.report_to(report)
        self.failed += report.failed
        return sorted(report.received)

    def _dial(self, address: RemoteEngineAddress) -> Future:
        self.handshakes.append(Future())
        return self.handshakes[-1]

    def _connect(self, lane: Lane, _: object) -> Connection:
        self.connections.append(Connection(lane))
        return self.connections[-1]


@pytest.fixture
def worker() -> Worker:
    """A worker that knows nobody."""
    return Worker()


def pieces(number: int) -> Callable[[], Budget]:
    """Budgets for so many pieces of work."""
    return lambda: Budget(number, partial(next, count()))


def test_what_waited_for_a_handshake_begins_in_many_turns(worker):
    """A thousand requests are some each poll, and all of them in the end, in their order."""
    names = [f"r{number:03}" for number in range(1000)]
    worker.ask(0, *names)
    assert worker.poll() == [] and not worker.reads.has_backlog
    worker.answer()
    budget, begun, polls = pieces(10), [], 0
    while len(begun) < len(names):
        # Only the last one of a poll's pieces is seen to be too much.
        some = worker.poll(budget())
        assert 0 < len(some) <= 11
        begun += some
        polls += 1
        assert worker.reads.has_backlog == (len(begun) < len(names))
    assert begun == names and polls >= 90


def test_peers_take_turns(worker):
    """Whoever has many requests waiting does not hold up those who have few."""
    worker.ask(0, *(f"a{number}" for number in range(9)))
    worker.ask(1, "b0", "b1")
    worker.ask(2, "c0")
    worker.poll()
    worker.answer()
    order = [name for _ in range(12) for name in worker.poll(pieces(1)())]
    assert order[:6] == ["a0", "b0", "c0", "a1", "b1", "a2"]
    assert order[6:] == [f"a{number}" for number in range(3, 9)]


def test_what_still_waits_is_read_with_the_next_connection(worker):
    """A connection that breaks in the meantime costs only what was begun with it."""
    worker.ask(0, "a", "b")
    worker.poll()
    worker.answer()
    assert worker.poll(pieces(1)()) == ["a"]
    worker.peers.break_off(worker.connections[0], 0.0)
    assert worker.poll() == [] and len(worker.handshakes) == 2
    worker.answer()
    assert worker.poll() == ["b"]


def test_only_an_engine_that_broke_lately_is_not_read_while_much_is_in_doubt(worker, monkeypatch):
    """What another one holds up is not paid for by one that has been steady since."""
    monkeypatch.setattr(BlocksInDoubt, "are_too_many", True)
    for now_s, request_id, fails in (
        (0.0, "never broke", False),
        (1.0, "broke", True),
        (1.0 + STEADY_S, "was steady", False),
    ):
        if fails:
            worker.peers.break_off(worker.connections[-1], now_s)
        worker.ask(0, request_id, now_s=now_s)
        ended = worker.poll(now_s=now_s)
        worker.answer()
        assert ended + worker.poll(now_s=now_s) == [request_id]
        assert (request_id in worker.failed) is fails


def test_request_that_cannot_be_taken_up_fails_alone(worker, monkeypatch):
    """Those that were asked for in the same step are read."""
    get_or_connect, faults = worker.peers.get_or_connect, [ValueError("nobody thought of this")]

    def fail_once(address: RemoteEngineAddress, now_s: float) -> Peer:
        if faults:
            raise faults.pop()
        return get_or_connect(address, now_s)

    monkeypatch.setattr(worker.peers, "get_or_connect", fail_once)
    worker.ask(0, "odd", "good")
    assert worker.poll() == worker.failed == ["odd"]
    worker.answer()
    assert worker.poll() == ["good"] and worker.failed == ["odd"]


def test_request_that_is_copied_after_its_connection_has_ended_fails(worker, monkeypatch):
    """Its lease cannot be looked up any more; it does not wait for its deadline to hear that."""
    part = Read()
    monkeypatch.setattr(RequestBlocks, "select", lambda *_: ["something"])
    monkeypatch.setattr(consumer, "cut", lambda *_: [part])
    started: list[RequestReads] = []

    def start(_, reads, parts, connection) -> None:
        reads.parts.update(dict.fromkeys(parts))
        started.append(reads)

    monkeypatch.setattr(Transfers, "start", start)
    worker.ask(0, "a")
    worker.poll()
    worker.answer()
    worker.peers.advance(0.0)
    (connection,) = worker.connections
    connection.legs, connection.lease_tables = [part], {"p": PreparedTable(None, 64)}
    connection.leases = LeaseChecker(connection.lane.checks, connection.lane.agent)
    assert worker.poll() == []
    connection.leases.give_up()
    started[0].drain(part)
    worker.reads.advance(1.0, UNLIMITED)
    assert worker.poll(now_s=1.0) == worker.failed == ["a"]


class Prefetching:
    """A request of which half is read while its prompt is computed, with reads that land late."""

    def __init__(self, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.worker = worker
        # Whether each part that was started is prefetched.
        self.started: list[bool] = []
        self.parts: list[tuple[RequestReads, Read]] = []
        self.given_up: list[str] = []
        self.promoted: list[str] = []
        self.selected: list[Receive] = []
        leg = SimpleNamespace(
            per_sequence=False,
            planes_by_groups=[((0, 0), None)],
            src=SimpleNamespace(tokens_per_id=4),
            dst=SimpleNamespace(tokens_per_id=4),
            read=SimpleNamespace(
                src_tokens=SimpleNamespace(num_shares=1), dst_tokens=SimpleNamespace(num_shares=1)
            ),
        )
        self.leg = SimpleNamespace(leg=leg, remote=SimpleNamespace(peer="p"))
        monkeypatch.setattr(
            RequestBlocks,
            "select",
            lambda blocks, _: self.selected.append(blocks._receive) or ["something"],
        )
        monkeypatch.setattr(consumer, "cut", lambda *_: [Read()])
        monkeypatch.setattr(Transfers, "start", self._start)
        monkeypatch.setattr(
            Transfers, "give_up", lambda _, reads: self.given_up.append(reads.request_id)
        )
        monkeypatch.setattr(
            Transfers, "promote", lambda _, reads: self.promoted.append(reads.request_id)
        )
        self.source = RemoteEngineAddress("engine0", "p0.example", 5600)
        self.early = Receive(self.source, "x", [[7, 8]], [], 8, 8)
        peer = worker.peers.get_or_connect(self.source, 0.0)
        worker.poll()
        worker.answer()
        worker.poll()
        self.connection = peer.connection
        self.connection.legs = [self.leg]
        self.looked_up: list[tuple] = []
        self.connection.leases.confirm = self._confirm
        self.connection.lease_tables = {"p": None}

    def compute(self, num_tokens: int, attempt: int = 1) -> None:
        """The source has computed some of the prompt."""
        told = [[5, 6][: num_tokens // 4]]
        part = replace(self.early, remote_block_ids=told, remote_tokens=num_tokens, attempt=attempt)
        part = replace(part, remote_request_id="p-x")
        self.worker.reads.prefetch("d", part, 0.0)

    def offer(self, attempt: int = 1) -> None:
        """It is offered."""
        bound = OfferFingerprint(1, 2, 3)
        whole = replace(
            self.early,
            remote_request_id="p-x",
            remote_block_ids=[[5, 6]],
            fingerprint=bound,
            attempt=attempt,
        )
        self.worker.reads.start_request("d", whole, 1.0)
        self.worker.poll()

    def arrive(self, number: int, num_bytes: int = 0) -> list[str]:
        """A part has arrived; returns what is received then."""
        reads, part = self.parts[number]
        if num_bytes:
            telemetry = SimpleNamespace(
                totalBytes=num_bytes, xferDuration=1, postDuration=1, descCount=1
            )
            reads.arrived.append(Arrived(part, Strategy.DIRECT, telemetry))
        reads.drain(part)
        return self.advance()

    def fail(self, number: int) -> list[str]:
        """A part has failed, and may still be written."""
        self.parts[number][0].fail(PartError("NIXL could not read", is_local=True))
        return self.advance()

    def advance(self) -> list[str]:
        """Have a poll; returns what is received then."""
        self.worker.reads.advance(1.0, UNLIMITED)
        return self.worker.poll()

    def _start(self, reads, parts, connection, *, is_prefetch=False) -> None:
        for part in parts:
            part.connection = connection
            reads.parts[part] = None
            self.parts.append((reads, part))
            self.started.append(is_prefetch)

    async def _confirm(self, *what: object) -> None:
        self.looked_up.append(what)
        while True:
            await suspended()


@pytest.fixture
def prefetching(worker, monkeypatch) -> Prefetching:
    """A request whose prompt is computed by an engine that is connected."""
    return Prefetching(worker, monkeypatch)


def test_rest_of_a_prefetched_request_need_not_wait_for_the_first_of_it(prefetching):
    """It is looked up when the last part has arrived, whichever that is."""
    prefetching.compute(5)
    assert prefetching.started == [True] and prefetching.selected[-1].local_block_ids == [[7]]
    prefetching.offer()
    assert prefetching.started == [True, False] and prefetching.promoted == ["d"]
    assert prefetching.selected[-1].local_block_ids == [[8]]
    assert prefetching.arrive(1) == [] and not prefetching.looked_up
    assert prefetching.arrive(0) == [] and len(prefetching.looked_up) == 1


def test_request_that_was_prefetched_whole_is_only_looked_up(prefetching, monkeypatch):
    """Where nothing is left to be read, its lease is what is left to be seen."""
    prefetching.compute(8)
    prefetching.arrive(0)
    monkeypatch.setattr(consumer, "cut", lambda *_: [])
    prefetching.offer()
    assert prefetching.started == [True] and len(prefetching.looked_up) == 1


def test_request_is_not_read_anew_while_something_else_writes_into_its_blocks(prefetching):
    """What was read of an attempt that was given up lands where the next one's is to be."""
    prefetching.compute(5)
    prefetching.offer(attempt=2)
    assert prefetching.started == [True] and prefetching.given_up == ["d"]
    assert prefetching.arrive(0) == []
    assert prefetching.started == [True, False]
    assert prefetching.selected[-1].local_block_ids == [[7, 8]]
    assert prefetching.arrive(1) == [] and len(prefetching.looked_up) == 1


def test_part_that_fails_before_the_offer_fails_no_request(prefetching):
    """All of it is read, once what has failed cannot write any more."""
    prefetching.compute(5)
    assert prefetching.fail(0) == []
    prefetching.compute(8)
    assert prefetching.started == [True] and not prefetching.worker.failed
    prefetching.offer()
    assert prefetching.started == [True]
    assert prefetching.arrive(0) == []
    assert prefetching.started == [True, False]


def test_part_that_fails_after_the_offer_fails_its_request(prefetching):
    """The rest counts on it."""
    prefetching.compute(5)
    prefetching.offer()
    assert prefetching.fail(0) == []
    assert prefetching.worker.failed == ["d"]
    assert prefetching.arrive(0) == [] and prefetching.arrive(1) == ["d"]


def test_prompt_that_takes_long_is_not_late(prefetching):
    """A request's time begins with its offer."""
    prefetching.compute(5)
    reads = prefetching.worker.reads
    assert reads.next_due_s is None
    prefetching.offer()
    assert reads.next_due_s == 601.0


def test_exception_while_something_is_prefetched_is_not_the_requests_end(prefetching, monkeypatch):
    """It is read once it is offered."""
    prefetching.compute(5)
    with monkeypatch.context() as patch:
        patch.setattr(Transfers, "start", lambda *_, **__: 1 / 0)
        prefetching.compute(8)
    assert not prefetching.worker.failed and prefetching.given_up == ["d"]
    prefetching.offer()
    assert prefetching.started == [True]
    assert prefetching.arrive(0) == []
    assert prefetching.started == [True, False]


def test_part_that_was_not_begun_does_not_count_as_read(prefetching, monkeypatch):
    """Where an exception comes up before its reads, also those of the first part."""
    with monkeypatch.context() as patch:
        patch.setattr(Transfers, "start", lambda *_, **__: 1 / 0)
        prefetching.compute(5)
    prefetching.offer()
    assert prefetching.selected[-1].local_block_ids == [[7, 8]]


def test_request_that_fails_while_it_is_prefetched_does_not_wait_for_ever(prefetching, monkeypatch):
    """Its read may hang with an engine that is there: it has a deadline, and is broken off then."""
    prefetching.compute(5)
    reads = prefetching.worker.reads
    reads.start_request("d", replace(prefetching.early, fault="its prefill was aborted"), 1.0)
    assert prefetching.advance() == [] and prefetching.worker.failed == ["d"]
    assert reads.next_due_s == 601.0
    broken_off: list = []
    monkeypatch.setattr(
        prefetching.worker.peers, "break_off", lambda connection, _: broken_off.append(connection)
    )
    reads.advance(601.0, UNLIMITED)
    assert broken_off == [prefetching.connection]


def test_offer_whose_beginning_fails_is_its_requests_failure_alone(prefetching, monkeypatch):
    """What was prefetched of it is accounted for already."""
    prefetching.compute(5)
    monkeypatch.setattr(Transfers, "promote", lambda *_: 1 / 0)
    prefetching.offer()
    assert prefetching.worker.failed == ["d"]
    assert prefetching.arrive(0) == ["d"]


def test_log_tells_how_many_bytes_were_read(prefetching, caplog_vllm):
    """Also where no client traces anything: before the offer, and in all."""
    caplog_vllm.set_level(logging.DEBUG, "vllm")
    prefetching.compute(5)
    prefetching.arrive(0, num_bytes=600)
    prefetching.offer()
    prefetching.arrive(1, num_bytes=400)
    assert "being read while its prompt is computed, 600 bytes so far." in caplog_vllm.text
    assert "ms of being read, 1000 bytes so far." in caplog_vllm.text


def test_request_that_was_received_in_time_costs_no_connection(worker):
    """Where its deadline passes before it is reported: nothing is waited for any more."""
    worker.ask(0, "a")
    worker.poll()
    worker.answer()
    for peer, _ in worker.peers.advance(0.0):
        worker.reads.on_connected(peer)
    worker.reads.begin(0.0, UNLIMITED)
    broken_off: list = []
    worker.peers.break_off = lambda connection, now_s: broken_off.append(connection)
    worker.reads.advance(600.0, UNLIMITED)
    report = WorkerReport()
    worker.reads.report_to(report)
    assert (report.failed, report.received) == ({}, {"a"})
    assert not broken_off and worker.reads.next_due_s is None


class Checked:
    """A request that was read completely, and what its holder's table is looked up with.

    Args:
        prefetching: The worker that read it.
        monkeypatch: Records what is broken off.
    """

    def __init__(self, prefetching: Prefetching, monkeypatch: pytest.MonkeyPatch) -> None:
        holder, self.table, self.now_s = MemoryAgent(f"holder-{uuid.uuid4()}"), LeaseTable(64), 1.0
        holder.register([(self.table.address.address, self.table.address.size_bytes, 0)])
        self.table.add("p-x")
        self.connection, self.worker = prefetching.connection, prefetching.worker
        self.agent = self.connection.lane.agent
        name = self.agent.connect(holder.metadata())
        checks = self.connection.lane.checks
        self.connection.leases = LeaseChecker(checks, self.agent, lambda: self.now_s)
        # The part's worker.
        tables = {"p": prepare_table(self.agent, self.table.address, name)}
        self.connection.lease_tables = tables
        self.broken_off: list = []
        monkeypatch.setattr(
            self.worker.peers, "break_off", lambda *what: self.broken_off.append(what)
        )
        prefetching.compute(8)
        prefetching.arrive(0)
        monkeypatch.setattr(consumer, "cut", lambda *_: [])
        prefetching.offer()
        assert self.worker.reads.next_due_s == 601.0

    def advance(self, *at_s: float) -> None:
        """Advance at some times."""
        for self.now_s in at_s:
            self.worker.reads.advance(self.now_s, UNLIMITED)


@pytest.fixture
def checked(prefetching, monkeypatch) -> Checked:
    """A request whose check is queued."""
    return Checked(prefetching, monkeypatch)


@pytest.mark.parametrize("last_look_at_s", [1.0, 600.5], ids=["long before", "just before"])
def test_request_that_is_not_offered_in_time_costs_no_connection(checked, last_look_at_s):
    """Its producer answers: other requests are read from it as before."""
    checked.advance(1.0, 1.0, last_look_at_s)
    assert checked.connection.leases.is_busy
    checked.advance(601.0)
    assert checked.worker.poll(now_s=601.0) == checked.worker.failed == ["d"]
    assert checked.worker.stats.data["read_failures"] == ["lease"]
    assert not checked.broken_off and not checked.connection.leases.is_busy


@pytest.mark.parametrize("hangs", [False, True])
def test_only_a_look_that_hangs_costs_the_connection(checked, monkeypatch, hangs):
    """One that is under way when its request is due may have been posted just before."""
    checked.advance(1.0, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(checked.agent, "poll", lambda _: TransferState.IN_FLIGHT)
        checked.advance(600.9995, 601.0)
        assert checked.worker.poll(now_s=601.0) == checked.worker.failed == ["d"]
        assert checked.worker.stats.data["read_failures"] == ["deadline"]
        checked.advance(610.0)
        assert not checked.broken_off and len(checked.connection.leases) == 1
        if hangs:
            checked.advance(611.0)
    checked.advance(610.5, 610.5)
    assert bool(checked.broken_off) is hangs and not checked.connection.leases.is_busy


@pytest.mark.parametrize(
    ("is_connected", "waited_for"), [(False, "{} to be connected"), (True, "its turn at {}")]
)
def test_line_of_a_request_that_was_not_begun_in_time(
    worker, is_connected, waited_for, caplog_vllm
):
    """It tells whether the engine was the one to wait for, or the requests before it."""
    worker.ask(0, "a")
    worker.poll()
    if is_connected:
        worker.answer()
        worker.peers.advance(0.0)
    worker.reads.advance(600.0, UNLIMITED)
    report = WorkerReport()
    worker.reads.report_to(report)
    assert set(report.failed) == {"a"}
    assert "waited 600 s for " + waited_for.format("engine0 at p0.example:5600") in caplog_vllm.text


def test_reader_forgets_what_it_has_read(worker):
    """Well or not, and whatever was waited for."""
    worker.ask(0, "first")
    worker.poll()
    worker.answer()
    assert worker.poll() == ["first"]
    worker.reads.advance(0.0, UNLIMITED)
    worker.stats.reset()
    before = sizes(worker.reads)
    for number in range(1000):
        name = str(number)
        worker.ask(0, name, now_s=float(number))
        if number % 2:
            worker.reads.abandon([name])
        assert worker.poll(now_s=float(number)) == [name]
        worker.reads.advance(float(number), UNLIMITED)
        worker.stats.reset()
    assert sizes(worker.reads) == before


class AnyOrder(RuleBasedStateMachine):
    """Requests end once, when nothing writes any more, and rightly, whatever happens when."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(RequestBlocks, "select", lambda *_: ["something"])
        self.worker = Worker()
        self.worker.ask(0, "first")
        self.worker.poll()
        self.worker.answer()
        self.worker.poll()
        (self.connection,) = self.worker.connections
        self.connection.legs = [SimpleNamespace(leg=SimpleNamespace(per_sequence=False))]
        self.connection.lease_tables = {"p": None}
        self.connection.leases = SimpleNamespace(
            confirm=self._confirm,
            advance=lambda: None,
            is_busy=False,
            is_broken=False,
        )
        self.patch.setattr(consumer, "cut", lambda *_: [Read() for _ in range(self.num_parts)])
        self.patch.setattr(Transfers, "start", self._start)
        self.patch.setattr(Transfers, "give_up", lambda *_: None)
        self.num_parts = 0
        self.reads: dict[str, RequestReads] = {}
        self.begun: set[str] = set()
        self.checks: dict[str, list[str]] = {}
        self.failed: set[str] = set()
        self.ended: set[str] = set()

    def teardown(self) -> None:
        """Undo the patches."""
        self.patch.undo()

    @rule(num_parts=st.integers(0, 3))
    def begin(self, num_parts: int) -> None:
        """A request of so many parts is read."""
        self.num_parts = num_parts
        request_id = f"request {len(self.begun)}"
        self.begun.add(request_id)
        self.worker.ask(0, request_id)
        self._poll()

    @precondition(lambda self: any(each.parts for each in self.reads.values()))
    @rule(data=st.data(), fails=st.booleans())
    def end_part(self, data: st.DataObject, fails: bool) -> None:
        """A part arrives or fails; one that has failed may be written until it is drained."""
        open_reads = sorted(key for key, each in self.reads.items() if each.parts)
        request_id = data.draw(st.sampled_from(open_reads))
        reads = self.reads[request_id]
        if fails:
            reads.fail(PartError("lost"))
            self.failed.add(request_id)
        else:
            reads.drain(next(iter(reads.parts)))
        self._poll()

    @precondition(lambda self: self.checks)
    @rule(data=st.data(), holds=st.booleans())
    def end_check(self, data: st.DataObject, holds: bool) -> None:
        """The lease of what was read has held, or not."""
        request_id = data.draw(st.sampled_from(sorted(self.checks)))
        if request_id not in self.failed:
            self.checks[request_id].append("holds" if holds else "is over")
            self.failed |= {request_id} if not holds else set()
            self.worker.reads._requests[request_id].task.wake()
        del self.checks[request_id]
        self._poll()

    @precondition(lambda self: self.begun)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        """Another worker could not read it."""
        request_id = data.draw(st.sampled_from(sorted(self.begun)))
        if request_id not in self.ended:
            self.failed.add(request_id)
        self.worker.reads.abandon([request_id])
        self._poll()

    @invariant()
    def all_is_reported_in_time(self) -> None:
        """A failure at once; the end once no part is left and it has failed or was checked."""
        assert set(self.worker.failed) == self.failed
        assert len(self.worker.failed) == len(self.failed)
        waiting = {key for key in self.checks if key not in self.failed}
        reading = {key for key, each in self.reads.items() if each.parts}
        assert self.ended == self.begun - reading - waiting

    def _poll(self) -> None:
        self.worker.reads.advance(0.0, UNLIMITED)
        received = self.worker.poll()
        assert not self.ended & set(received)
        self.ended |= set(received)

    def _start(self, reads: RequestReads, parts: list[Read], connection: Connection) -> None:
        self.reads[reads.request_id] = reads
        reads.parts.update(dict.fromkeys(parts))

    async def _confirm(self, _: object, request_id: str, *more: object) -> None:
        answers = self.checks[request_id] = []
        while not answers:
            await suspended()
        if answers != ["holds"]:
            raise LeaseError(LeaseCheckFailure.LEASE, "its lease is over")


TestAnyOrder = AnyOrder.TestCase

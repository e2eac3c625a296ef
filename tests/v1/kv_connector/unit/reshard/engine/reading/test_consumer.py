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

from tests.v1.kv_connector.unit.reshard.transport.memory_agent import MemoryAgent
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.connecting.peers import (
    STEADY_S,
    Peer,
    PeerTable,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.early.watched_requests import (
    Refusal,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.reading.completions import (
    Completions,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.reading.consumer import (
    ConsumerSide,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.reading.doubt import BlocksInDoubt
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.reading.notifier import Notifier
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.reading.readings import Readings
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.stats import (
    ReadFailure,
    ReshardStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.strategy import Strategy
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.fingerprint import (
    OfferFingerprint,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.leases import LeaseTable
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.ledgers import ConsumerLedger
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.lifetimes import Lifetime
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    Receive,
    RemoteEngineAddress,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.request_blocks import (
    RequestBlocks,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.states import ReadState
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import TransferState
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.budget import UNLIMITED, Budget
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.lane import Lane, Lanes
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.lease_check import (
    LeaseChecker,
    prepare_table,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.transfers import (
    PartDrained,
    PartFailed,
    Transfers,
)


class Connection:
    """A connection over which there is nothing to read: requests end when they begin."""

    def __init__(self, lane: Lane | None = None) -> None:
        self.lane = lane
        self.lifetime = Lifetime(100.0)
        self.leases: list[str] = []
        self.is_connected = self.is_drained = True
        self.legs: list[object] = []
        self.lease_tables: dict[str, object] = {}
        self.releases: list[tuple[str, int]] = []

    def connect_next(self) -> bool:
        """All of its workers are connected."""
        return True


def lanes() -> Lanes:
    """One lane, which is made at once."""

    def make() -> Future[Lane]:
        made: Future[Lane] = Future()
        made.set_result(Lane(MemoryAgent(f"lane-{uuid.uuid4()}")))
        return made

    return Lanes(make, 1)


class Worker:
    """Reads from engines that answer when the test says so."""

    def __init__(self) -> None:
        self.handshakes: list[Future] = []
        self.connections: list[Connection] = []
        self.failed: list[str] = []
        self.peers = PeerTable(self._dial, self._connect, lanes(), 600.0)
        transfers, self.stats = Transfers(), ReshardStats()
        notifier = Notifier("me", self.stats)
        self.reads = ConsumerSide(self.peers, transfers, notifier, self.stats, 600.0)
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
        completions = self.reads.take_completions()
        self.failed += completions.failed
        return sorted(completions.received)

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
    part = SimpleNamespace(leg=SimpleNamespace(remote=SimpleNamespace(peer="p")))
    monkeypatch.setattr(RequestBlocks, "select", lambda *_: ["something"])
    monkeypatch.setattr(Transfers, "cut", lambda *_: [part])
    monkeypatch.setattr(Transfers, "start", lambda *_, **__: None)
    worker.ask(0, "a")
    worker.poll()
    worker.answer()
    worker.peers.advance(0.0)
    (connection,) = worker.connections
    connection.legs, connection.lease_tables = [part], {"p": None}
    assert worker.poll() == []
    connection.is_connected = False
    copied = PartDrained("a", 0, Strategy.STAGED)
    monkeypatch.setattr(Transfers, "advance", lambda *_: [copied])
    worker.reads.advance(1.0, UNLIMITED)
    assert worker.poll(now_s=1.0) == worker.failed == ["a"]


class Prefetching:
    """A request of which half is read while its prompt is computed, with reads that land late."""

    def __init__(self, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.worker, self.events, self.started = worker, [], []
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
        self.part = SimpleNamespace(leg=self.leg)
        monkeypatch.setattr(
            RequestBlocks,
            "select",
            lambda blocks, _: self.selected.append(blocks._receive) or ["something"],
        )
        monkeypatch.setattr(Transfers, "cut", lambda *_: [self.part])
        monkeypatch.setattr(Transfers, "start", self._start)
        monkeypatch.setattr(Transfers, "give_up", lambda _, each: self.given_up.append(each))
        monkeypatch.setattr(Transfers, "advance", lambda *_: self._take_events())
        monkeypatch.setattr(Transfers, "promote", lambda _, each: self.promoted.append(each))
        self.source = RemoteEngineAddress("engine0", "p0.example", 5600)
        self.early = Receive(self.source, "x", [[7, 8]], [], 8, 8, is_early=True)
        peer = worker.peers.get_or_connect(self.source, 0.0)
        worker.poll()
        worker.answer()
        worker.poll()
        self.connection = peer.connection
        self.connection.legs = [self.leg]
        self.looked_up: list[tuple] = []
        self.connection.leases = SimpleNamespace(
            check_later=lambda *what: self.looked_up.append(what), advance=list
        )
        self.connection.lease_tables = {"p": None}

    def compute(self, num_tokens: int, attempt: int = 1) -> None:
        """The source has computed some of the prompt."""
        told = [[5, 6][: num_tokens // 4]]
        part = replace(self.early, remote_block_ids=told, remote_tokens=num_tokens, attempt=attempt)
        part = replace(part, remote_request_id="p-x", is_early=False)
        self.worker.reads.prefetch("d", self.early, part, 0.0)

    def offer(self, attempt: int = 1) -> None:
        """It is offered."""
        bound = OfferFingerprint(1, 2, 3)
        whole = replace(
            self.early,
            remote_request_id="p-x",
            remote_block_ids=[[5, 6]],
            fingerprint=bound,
            is_early=False,
            attempt=attempt,
        )
        self.worker.reads.start_request("d", whole, 1.0)
        self.worker.poll()

    def see(self, *events: object) -> list[str]:
        """Some parts have got on; returns what is received then."""
        self.events += events
        self.worker.reads.advance(1.0, UNLIMITED)
        return self.worker.poll()

    def _start(self, request_id, parts, connection, *, first_key=0, is_prefetch=False) -> None:
        self.started += [(key + first_key, is_prefetch) for key in range(len(parts))]

    def _take_events(self) -> list:
        events, self.events[:] = list(self.events), []
        return events


def done(key: int) -> PartDrained:
    """A part that has arrived."""
    return PartDrained("d", key, Strategy.DIRECT)


def telemetry(num_bytes: int) -> SimpleNamespace:
    """What NIXL has measured of a part."""
    return SimpleNamespace(totalBytes=num_bytes, xferDuration=1, postDuration=1, descCount=1)


@pytest.fixture
def prefetching(worker, monkeypatch) -> Prefetching:
    """A request whose prompt is computed by an engine that is connected."""
    return Prefetching(worker, monkeypatch)


def test_rest_of_a_prefetched_request_need_not_wait_for_the_first_of_it(prefetching):
    """It is looked up when the last part has arrived, whichever that is."""
    prefetching.compute(5)
    assert prefetching.started == [(0, True)] and prefetching.selected[-1].local_block_ids == [[7]]
    prefetching.offer()
    assert prefetching.started == [(0, True), (1, False)] and prefetching.promoted == ["d"]
    assert prefetching.selected[-1].local_block_ids == [[8]]
    assert prefetching.see(done(1)) == [] and not prefetching.looked_up
    assert prefetching.see(done(0)) == [] and len(prefetching.looked_up) == 1


def test_request_that_was_prefetched_whole_is_only_looked_up(prefetching, monkeypatch):
    """Where nothing is left to be read, its lease is what is left to be seen."""
    prefetching.compute(8)
    prefetching.see(done(0))
    monkeypatch.setattr(Transfers, "cut", lambda *_: [])
    prefetching.offer()
    assert prefetching.started == [(0, True)] and len(prefetching.looked_up) == 1


def test_request_is_not_read_anew_while_something_else_writes_into_its_blocks(prefetching):
    """What was read of an attempt that was given up lands where the next one's is to be."""
    prefetching.compute(5)
    prefetching.offer(attempt=2)
    assert prefetching.started == [(0, True)] and prefetching.given_up == ["d"]
    assert prefetching.see(done(0)) == []
    assert prefetching.started == [(0, True), (1, False)]
    assert prefetching.selected[-1].local_block_ids == [[7, 8]]
    assert prefetching.see(done(1)) == [] and len(prefetching.looked_up) == 1


def test_part_that_fails_before_the_offer_fails_no_request(prefetching):
    """All of it is read, once what has failed cannot write any more."""
    prefetching.compute(5)
    assert prefetching.see(PartFailed("d", "NIXL could not read", local=True)) == []
    prefetching.compute(8)
    assert prefetching.started == [(0, True)] and not prefetching.worker.failed
    prefetching.offer()
    assert prefetching.started == [(0, True)]
    assert prefetching.see(done(0)) == []
    assert prefetching.started == [(0, True), (1, False)]


def test_part_that_fails_after_the_offer_fails_its_request(prefetching):
    """The rest counts on it."""
    prefetching.compute(5)
    prefetching.offer()
    assert prefetching.see(PartFailed("d", "NIXL could not read", local=True)) == []
    assert prefetching.worker.failed == ["d"]
    assert prefetching.see(done(0)) == [] and prefetching.see(done(1)) == ["d"]


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
    assert prefetching.started == [(0, True)]
    assert prefetching.see(done(0)) == []
    assert prefetching.started == [(0, True), (2, False)]


def test_part_that_was_not_begun_does_not_count_as_read(prefetching, monkeypatch):
    """Where an exception comes up before its reads, also those of the first part."""
    with monkeypatch.context() as patch:
        patch.setattr(ConsumerLedger, "prefetch", lambda *_: 1 / 0)
        prefetching.compute(5)
    prefetching.offer()
    assert prefetching.selected[-1].local_block_ids == [[7, 8]]


def test_request_that_fails_while_it_is_prefetched_does_not_wait_for_ever(prefetching, monkeypatch):
    """Its read may hang with an engine that is there: it has a deadline, and is broken off then."""
    prefetching.compute(5)
    reads = prefetching.worker.reads
    state = ReadState.IN_LAST_CHUNK
    refusal = Refusal("d", prefetching.early, "its prefill was aborted", None, state, 0.5)
    reads.refuse(refusal, 1.0)
    assert prefetching.see() == [] and prefetching.worker.failed == ["d"]
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
    monkeypatch.setattr(Readings, "offer", lambda *_: 1 / 0)
    prefetching.offer()
    assert prefetching.worker.failed == ["d"]
    assert prefetching.see(done(0)) == ["d"]


def test_line_of_a_request_that_is_not_offered_tells_what_it_waited_for(worker, caplog_vllm):
    """And for how long: not that it waited for its peer, since just now."""
    source = RemoteEngineAddress("engine0", "p0.example", 5600)
    early = Receive(source, "x", [[7, 8]], [], 8, 8, is_early=True)
    state, failure = ReadState.AWAITING_PREFILL, ReadFailure.PREFILL
    refusal = Refusal("d", early, "it was not offered there within 600 s", failure, state, 5.0)
    worker.reads.refuse(refusal, 605.0)
    assert worker.poll(now_s=605.0) == worker.failed == ["d"]
    assert (
        "KV cache of request d could not be read from engine engine0 (waiting for its prefill for "
        "600.0 s): it was not offered there within 600 s" in caplog_vllm.text
    )


def test_log_tells_how_many_bytes_were_read(prefetching, caplog_vllm):
    """Also where no client traces anything: before the offer, and in all."""
    caplog_vllm.set_level(logging.DEBUG, "vllm")
    prefetching.compute(5)
    prefetching.see(replace(done(0), telemetry=telemetry(600)))
    prefetching.offer()
    prefetching.see(replace(done(1), telemetry=telemetry(400)))
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
    assert worker.reads.take_completions() == Completions({}, {"a"}, {"a": 0.0})
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
        tables = {name: prepare_table(self.agent, self.table.address, name)}
        self.connection.lease_tables = tables
        self.broken_off: list = []
        monkeypatch.setattr(
            self.worker.peers, "break_off", lambda *what: self.broken_off.append(what)
        )
        prefetching.compute(8)
        prefetching.see(done(0))
        monkeypatch.setattr(Transfers, "cut", lambda *_: [])
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
    assert len(checked.connection.leases) == 1
    checked.advance(601.0)
    assert checked.worker.poll(now_s=601.0) == checked.worker.failed == ["d"]
    assert checked.worker.stats.data["read_failures"] == ["lease"]
    assert not checked.broken_off and not checked.connection.leases


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
    assert bool(checked.broken_off) is hangs and not checked.connection.leases


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
    assert set(worker.reads.take_completions().failed) == {"a"}
    assert "waited 600 s for " + waited_for.format("engine0 at p0.example:5600") in caplog_vllm.text

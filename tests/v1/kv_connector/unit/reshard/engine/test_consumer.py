# SPDX-License-Identifier: Apache-2.0
"""Which requests begin in a turn; what is read of them is tested with whole workers."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import count
from types import SimpleNamespace

import pytest

from tests.v1.kv_connector.unit.reshard.transport.memory_agent import MemoryAgent
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine import consumer as consumer_module
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.consumer import (
    ConsumerSide,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.doubt import BlocksInDoubt
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.notifier import Notifier
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.peers import (
    STEADY_S,
    Peer,
    PeerTable,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.stats import ReshardStats
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.strategy import Strategy
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.fingerprint import (
    OfferFingerprint,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.lifetimes import Lifetime
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    Receive,
    RemoteEngineAddress,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.budget import UNLIMITED, Budget
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.lane import Lane, Lanes
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.transfers import (
    PartDrained,
    Transfers,
)


class Connection:
    """A connection over which there is nothing to read: requests end when they begin."""

    def __init__(self, lane: Lane | None = None) -> None:
        self.lane = lane
        self.lifetime = Lifetime(100.0)
        self.leases: list[str] = []
        self.is_connected = self.is_drained = True
        self.engine = SimpleNamespace(legs=[], lease_tables={}, releases=[])

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
        self.peers = PeerTable(self._ask, self._connect, lanes(), 600.0)
        transfers, stats = Transfers(), ReshardStats()
        self.reads = ConsumerSide(self.peers, transfers, Notifier("me", stats), stats, 600.0)
        cache = SimpleNamespace(num_block_ids=1000)
        self.reads.set_local_cache(SimpleNamespace(cache=cache))

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

    def turn(self, budget: Budget = UNLIMITED, now_s: float = 0.0) -> list[str]:
        """Which requests begin in a turn."""
        for peer, error in self.peers.advance(now_s):
            assert error is None
            self.reads.on_connected(peer)
        self.reads.begin(now_s, budget)
        self.failed += self.reads.take_failed()
        return sorted(self.reads.take_received())

    def _ask(self, address: RemoteEngineAddress) -> Future:
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
    """A thousand requests are some each turn, and all of them in the end, in their order."""
    names = [f"r{number:03}" for number in range(1000)]
    worker.ask(0, *names)
    assert worker.turn() == [] and not worker.reads.has_backlog
    worker.answer()
    budget, begun, turns = pieces(10), [], 0
    while len(begun) < len(names):
        # Only the last one of a turn's pieces is seen to be too much.
        some = worker.turn(budget())
        assert 0 < len(some) <= 11
        begun += some
        turns += 1
        assert worker.reads.has_backlog == (len(begun) < len(names))
    assert begun == names and turns >= 90


def test_peers_take_turns(worker):
    """Whoever has many requests waiting does not hold up those who have few."""
    worker.ask(0, *(f"a{number}" for number in range(9)))
    worker.ask(1, "b0", "b1")
    worker.ask(2, "c0")
    worker.turn()
    worker.answer()
    order = [name for _ in range(12) for name in worker.turn(pieces(1)())]
    assert order[:6] == ["a0", "b0", "c0", "a1", "b1", "a2"]
    assert order[6:] == [f"a{number}" for number in range(3, 9)]


def test_what_still_waits_is_read_with_the_next_connection(worker):
    """A connection that breaks in the meantime costs only what was begun with it."""
    worker.ask(0, "a", "b")
    worker.turn()
    worker.answer()
    assert worker.turn(pieces(1)()) == ["a"]
    worker.peers.break_off(worker.connections[0], 0.0)
    assert worker.turn() == [] and len(worker.handshakes) == 2
    worker.answer()
    assert worker.turn() == ["b"]


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
        ended = worker.turn(now_s=now_s)
        worker.answer()
        assert ended + worker.turn(now_s=now_s) == [request_id]
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
    assert worker.turn() == worker.failed == ["odd"]
    worker.answer()
    assert worker.turn() == ["good"] and worker.failed == ["odd"]


def test_request_that_is_copied_after_its_connection_has_ended_fails(worker, monkeypatch):
    """Its lease cannot be looked up any more; it does not wait for its deadline to hear that."""
    part = SimpleNamespace(leg=SimpleNamespace(remote=SimpleNamespace(peer="p")))
    monkeypatch.setattr(consumer_module.RequestBlocks, "select", lambda *_: ["something"])
    monkeypatch.setattr(Transfers, "cut", lambda *_: [part])
    monkeypatch.setattr(Transfers, "start", lambda *_, **__: None)
    worker.ask(0, "a")
    worker.turn()
    worker.answer()
    worker.peers.advance(0.0)
    (connection,) = worker.connections
    connection.engine.legs, connection.engine.lease_tables = [part], {"p": None}
    assert worker.turn() == []
    connection.is_connected = False
    copied = PartDrained("a", 0, Strategy.STAGED)
    monkeypatch.setattr(Transfers, "advance", lambda *_: [copied])
    worker.reads.advance(1.0, UNLIMITED)
    assert set(worker.reads.take_failed()) == {"a"} and worker.turn() == ["a"]

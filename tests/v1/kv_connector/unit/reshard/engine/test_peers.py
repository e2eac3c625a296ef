# SPDX-License-Identifier: Apache-2.0
"""When a worker shakes hands with another engine, tries again, and forgets it."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.peers import (
    FIRST_RETRY_S,
    LAST_RETRY_S,
    STEADY_S,
    PeerTable,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import RemoteLayoutError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    RemoteEngineAddress,
)

IDLE_LIMIT_S = 600.0
ADDRESS = RemoteEngineAddress("engine", "prefill.example", 5600)


class Engine:
    """A connected engine that notes when it is closed."""

    closed = False

    def close(self) -> None:
        """Note it."""
        self.closed = True


class Network:
    """The executor, and the two functions that a table is given."""

    def __init__(self) -> None:
        self.handshakes: list[Future] = []
        self.engines: list[Engine] = []
        self.refusal: Exception | None = None
        self.began_s: list[float] = []

    def submit(self, function, *arguments) -> Future:
        """Begin a handshake, which ends when the test says so."""
        self.handshakes.append(Future())
        return self.handshakes[-1]

    def connect(self, descriptions, began_s) -> Engine:
        """Connect, or refuse."""
        self.began_s.append(began_s)
        if self.refusal is not None:
            raise self.refusal
        self.engines.append(Engine())
        return self.engines[-1]

    def answer(self) -> None:
        """The handshake under way succeeds."""
        self.handshakes[-1].set_result(())

    def fail(self) -> None:
        """The handshake under way fails."""
        self.handshakes[-1].set_exception(RemoteLayoutError("unreachable"))


@pytest.fixture
def network() -> Network:
    """A network without engines."""
    return Network()


@pytest.fixture
def table(network) -> PeerTable:
    """A table without peers."""
    return PeerTable(network, lambda _: (), network.connect, IDLE_LIMIT_S)


def outcomes(news):
    """What happened to which engine."""
    return [(peer.address.engine_id, error and str(error)) for peer, error in news]


def connected(table, network, address=ADDRESS, now_s=0.0):
    """A peer that has answered."""
    peer = table.want(address, now_s)
    table.advance(now_s)
    network.answer()
    table.advance(now_s)
    return peer


def test_requests_wait_for_one_handshake(table, network):
    """However many want an engine, it is asked once, and all of them begin together."""
    for request_id in ("a", "b"):
        table.want(ADDRESS, 0.0).waiting.append((request_id, None))
        assert table.advance(0.0) == []
    assert len(network.handshakes) == 1
    network.answer()
    ((peer, error),) = table.advance(0.1)
    assert error is None
    assert peer.engine is network.engines[0]
    assert [request_id for request_id, _ in peer.take_waiting()] == ["a", "b"]
    assert table.advance(0.2) == []


def test_connected_engine_is_used_at_once(table, network):
    """A later request does not shake hands again."""
    connected(table, network)
    table.want(ADDRESS, 1.0).waiting.append(("a", None))
    assert outcomes(table.advance(1.0)) == [("engine", None)]
    assert len(network.handshakes) == 1


def test_handshake_is_timed_from_when_it_began(table, network):
    """Not from when the engine was wanted during the back-off, nor from an attempt that failed."""
    table.want(ADDRESS, 0.0)
    table.advance(0.0)
    network.fail()
    table.advance(0.5)
    table.want(ADDRESS, 1.0)
    table.advance(5.0)
    network.answer()
    table.advance(7.0)
    assert network.began_s == [5.0]


def test_failed_handshake_is_told_and_tried_again_later(table, network):
    """Those who waited are told; the next request waits for the back-off, and then is served."""
    table.want(ADDRESS, 0.0).waiting.append(("a", None))
    table.advance(0.0)
    network.fail()
    news = table.advance(0.0)
    assert outcomes(news) == [("engine", "unreachable")]
    news[0][0].take_waiting()

    table.want(ADDRESS, 0.1).waiting.append(("b", None))
    table.advance(FIRST_RETRY_S - 0.01)
    assert len(network.handshakes) == 1
    table.advance(FIRST_RETRY_S)
    assert len(network.handshakes) == 2
    network.answer()
    assert outcomes(table.advance(FIRST_RETRY_S)) == [("engine", None)]


def test_back_off_grows_to_a_limit(table, network):
    """An engine that stays away is asked ever more rarely, but is asked."""
    now_s, delays = 0.0, []
    for _ in range(8):
        peer = table.want(ADDRESS, now_s)
        table.advance(now_s)
        network.fail()
        table.advance(now_s)
        delays.append(peer.retry_at_s - now_s)
        now_s = peer.retry_at_s
    assert delays[0] == FIRST_RETRY_S
    assert delays[-1] == LAST_RETRY_S
    assert delays == sorted(delays)


def test_nobody_asks_for_an_engine_that_nobody_wants(table, network):
    """A failed handshake is repeated for a request, not for its own sake; then it is forgotten."""
    table.want(ADDRESS, 0.0)
    table.advance(0.0)
    network.fail()
    table.advance(0.0)
    assert len(table) == 1
    table.advance(FIRST_RETRY_S)
    assert len(network.handshakes) == 1
    assert len(table) == 0


def test_heartbeats_during_a_handshake_that_fails_begin_no_other(table, network):
    """They were sent for requests that have failed with it."""
    peer = table.want(ADDRESS, 0.0)
    peer.waiting.append(("a", None))
    table.advance(0.0)
    table.want(ADDRESS, 5.0)
    network.fail()
    table.advance(10.0)
    peer.take_waiting()
    table.advance(10.0 + LAST_RETRY_S)
    assert len(network.handshakes) == 1


def test_layout_that_does_not_fit_is_a_failure(table, network):
    """What the answer says may be refused."""
    network.refusal = RemoteLayoutError("no source rank holds heads")
    table.want(ADDRESS, 0.0).waiting.append(("a", None))
    table.advance(0.0)
    network.answer()
    assert outcomes(table.advance(0.0)) == [("engine", "no source rank holds heads")]


def test_any_error_of_a_handshake_is_that_peers(table, network):
    """What nobody thought of fails the requests of one engine, and nothing else."""
    table.want(ADDRESS, 0.0).waiting.append(("a", None))
    table.advance(0.0)
    network.handshakes[-1].set_exception(OSError("too many open files"))
    assert outcomes(table.advance(0.0)) == [("engine", "too many open files")]


def test_broken_engine_is_connected_anew_when_nothing_is_in_flight(table, network):
    """After a failed read new requests wait until the old ones have ended."""
    peer = connected(table, network)
    peer.in_flight = 1
    peer.break_off(1.0)
    table.want(ADDRESS, 1.0).waiting.append(("a", None))
    assert table.advance(1.0) == []
    assert not network.engines[0].closed
    peer.in_flight = 0
    table.advance(2.0)
    assert network.engines[0].closed
    assert len(network.handshakes) == 2
    network.answer()
    assert outcomes(table.advance(2.0)) == [("engine", None)]
    assert peer.engine is network.engines[1]


def reconnected(table, network, now_s):
    """The peer after a read that has failed, and how long it was not asked for."""
    peer = table.want(ADDRESS, now_s)
    peer.break_off(now_s)
    table.advance(now_s)
    # Whoever wanted it has failed meanwhile: its past is kept all the same.
    peer.wanted = False
    table.advance(peer.retry_at_s)
    assert table.want(ADDRESS, peer.retry_at_s) is peer
    table.advance(peer.retry_at_s)
    network.answer()
    table.advance(peer.retry_at_s)
    assert peer.engine is network.engines[-1]
    return peer, peer.retry_at_s - now_s


def test_engine_that_breaks_again_and_again_is_asked_ever_more_rarely(table, network):
    """It answers every handshake, and no read from it succeeds; at first it is asked at once."""
    peer = connected(table, network)
    now_s, delays = 1.0, []
    for _ in range(8):
        peer, delay_s = reconnected(table, network, now_s)
        delays.append(delay_s)
        now_s = peer.retry_at_s + 0.5
    assert delays[:3] == [0.0, FIRST_RETRY_S, 2 * FIRST_RETRY_S]
    assert delays[-1] == LAST_RETRY_S
    assert delays == sorted(delays)


def test_engine_that_was_steady_for_long_has_no_past(table, network):
    """What broke an hour ago does not delay anybody now."""
    connected(table, network)
    peer, _ = reconnected(table, network, 1.0)
    peer, delay_s = reconnected(table, network, peer.retry_at_s + 1.0)
    assert delay_s == FIRST_RETRY_S
    _, delay_s = reconnected(table, network, peer.retry_at_s + STEADY_S)
    assert delay_s == 0.0


def test_reads_that_fail_together_are_one_break(table, network):
    """All legs of a request, and all requests, fail with the engine that they are read from."""
    peer = connected(table, network)
    peer.in_flight = 3
    for now_s in (1.0, 1.5, 2.0):
        peer.break_off(now_s)
    assert (peer.breaks, peer.retry_at_s) == (1, 1.0)


def test_broken_engine_is_forgotten_after_its_past(table, network):
    """State of engines that are gone does not pile up either."""
    peer = connected(table, network)
    peer.break_off(1.0)
    peer.wanted = False
    table.advance(1.0)
    assert network.engines[0].closed
    table.advance(STEADY_S)
    assert len(table) == 1
    table.advance(1.0 + STEADY_S)
    assert len(table) == 0


def test_restarted_engine_replaces_the_one_before(table, network):
    """Another engine id at the same address means that the old engine is gone."""
    old = connected(table, network)
    restarted = RemoteEngineAddress("restarted", ADDRESS.host, ADDRESS.port)
    new = connected(table, network, restarted, now_s=1.0)
    assert old.broken and not new.broken
    old.wanted = False
    table.advance(2.0)
    assert network.engines[0].closed and not network.engines[1].closed
    assert len(table) == 1


def test_engine_elsewhere_is_not_concerned(table, network):
    """Replicas at other addresses live side by side."""
    one = connected(table, network)
    other = connected(table, network, RemoteEngineAddress("other", ADDRESS.host, 5601), 1.0)
    assert not one.broken and not other.broken


def test_silent_engine_is_forgotten(table, network):
    """State of engines that nobody asks for does not pile up."""
    connected(table, network)
    table.advance(IDLE_LIMIT_S)
    assert len(table) == 1
    table.advance(IDLE_LIMIT_S + 1)
    assert len(table) == 0
    assert network.engines[0].closed


@pytest.mark.parametrize("idle_limit_s", [0.0, -1.0])
def test_engines_are_kept_for_ever_without_a_limit(network, idle_limit_s):
    """As with upstream's `engine_ttl`."""
    table = PeerTable(network, lambda _: (), network.connect, idle_limit_s)
    connected(table, network)
    table.advance(1e9)
    assert len(table) == 1


def test_engine_with_reads_in_flight_is_kept(table, network):
    """However long a read takes, its lists stay."""
    peer = connected(table, network)
    peer.in_flight = 1
    table.advance(IDLE_LIMIT_S + 1)
    assert len(table) == 1
    assert not network.engines[0].closed


def test_closing_gives_everything_back(table, network):
    """Nothing stays prepared."""
    connected(table, network)
    table.close()
    assert network.engines[0].closed
    assert len(table) == 0


def test_wrong_address_costs_nobody_else(table, network):
    """A request that names another host for an engine fails alone; the engine is used as before."""
    elsewhere = RemoteEngineAddress(ADDRESS.engine_id, "elsewhere.example", 5600)
    table.want(elsewhere, 0.0).waiting.append(("wrong", None))
    table.want(ADDRESS, 0.0).waiting.append(("right", None))
    table.advance(0.0)
    network.handshakes[0].set_exception(RemoteLayoutError("unreachable"))
    network.handshakes[1].set_result(())
    (wrong, error), (right, nothing) = table.advance(0.1)
    assert [request_id for request_id, _ in wrong.take_waiting()] == ["wrong"]
    assert [request_id for request_id, _ in right.take_waiting()] == ["right"]
    assert (str(error), nothing) == ("unreachable", None)


def test_invented_engine_does_not_replace_a_real_one(table, network):
    """Another id at an engine's address is believed only once it has answered."""
    real = connected(table, network)
    table.want(RemoteEngineAddress("invented", ADDRESS.host, ADDRESS.port), 1.0)
    table.advance(1.0)
    network.fail()
    table.advance(1.1)
    assert not real.broken
    assert real.engine is network.engines[0]
    assert not real.engine.closed

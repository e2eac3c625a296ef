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
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.lifetimes import Lifetime
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    RemoteEngineAddress,
)

IDLE_LIMIT_S = 600.0
HUNG_GRACE_S = 100.0
ADDRESS = RemoteEngineAddress("engine", "prefill.example", 5600)


class Connection:
    """A connection in which nothing happens but what the test says."""

    def __init__(self) -> None:
        self.lifetime = Lifetime(HUNG_GRACE_S)
        self.leases: list[str] = []
        self.closed = False

    def close(self) -> None:
        """Note it."""
        self.lifetime.close()
        self.closed = True


class Network:
    """Opens connections when the test says so."""

    def __init__(self) -> None:
        self.handshakes: list[Future] = []
        self.opened: list[Connection] = []

    def open(self, address: RemoteEngineAddress) -> Future:
        """Begin a handshake."""
        self.handshakes.append(Future())
        return self.handshakes[-1]

    def answer(self) -> None:
        """The handshake under way succeeds."""
        self.opened.append(Connection())
        self.handshakes[-1].set_result(self.opened[-1])

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
    return PeerTable(network.open, IDLE_LIMIT_S)


def outcomes(news):
    """What happened to which engine."""
    return [(peer.address.engine_id, error and str(error)) for peer, error in news]


def connected(table, network, address=ADDRESS, now_s=0.0):
    """A peer that has answered."""
    peer = table.get_or_connect(address, now_s)
    table.advance(now_s)
    network.answer()
    table.advance(now_s)
    return peer


def test_requests_wait_for_one_handshake(table, network):
    """However many want an engine, it is asked once, and all of them begin together."""
    for request_id in ("a", "b"):
        table.get_or_connect(ADDRESS, 0.0).waiting.append((request_id, None))
        assert table.advance(0.0) == []
    assert len(network.handshakes) == 1
    network.answer()
    ((peer, error),) = table.advance(0.1)
    assert error is None
    assert peer.connection is network.opened[0]
    assert [request_id for request_id, _ in peer.take_waiting()] == ["a", "b"]
    assert table.advance(0.2) == []


def test_connected_engine_is_used_at_once(table, network):
    """A later request does not shake hands again."""
    connected(table, network)
    table.get_or_connect(ADDRESS, 1.0).waiting.append(("a", None))
    assert outcomes(table.advance(1.0)) == [("engine", None)]
    assert len(network.handshakes) == 1


def test_handshake_is_timed_from_when_it_began(table, network):
    """Not from when the engine was wanted during the back-off, nor from an attempt that failed."""
    table.get_or_connect(ADDRESS, 0.0)
    table.advance(0.0)
    network.fail()
    table.advance(0.5)
    table.get_or_connect(ADDRESS, 1.0)
    table.advance(5.0)
    network.answer()
    table.advance(7.0)
    assert table.take_handshakes_s() == [2.0] and table.take_handshakes_s() == []


def test_failed_handshake_is_told_and_tried_again_later(table, network):
    """Those who waited are told; the next request waits for the back-off, and then is served."""
    table.get_or_connect(ADDRESS, 0.0).waiting.append(("a", None))
    table.advance(0.0)
    network.fail()
    news = table.advance(0.0)
    assert outcomes(news) == [("engine", "unreachable")]
    news[0][0].take_waiting()

    table.get_or_connect(ADDRESS, 0.1).waiting.append(("b", None))
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
        peer = table.get_or_connect(ADDRESS, now_s)
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
    table.get_or_connect(ADDRESS, 0.0)
    table.advance(0.0)
    network.fail()
    table.advance(0.0)
    assert len(table) == 1
    table.advance(FIRST_RETRY_S)
    assert len(network.handshakes) == 1
    assert len(table) == 0


def test_heartbeats_during_a_handshake_that_fails_begin_no_other(table, network):
    """They were sent for requests that have failed with it."""
    peer = table.get_or_connect(ADDRESS, 0.0)
    peer.waiting.append(("a", None))
    table.advance(0.0)
    table.get_or_connect(ADDRESS, 5.0)
    network.fail()
    table.advance(10.0)
    peer.take_waiting()
    table.advance(10.0 + LAST_RETRY_S)
    assert len(network.handshakes) == 1


def test_any_error_of_a_handshake_is_that_peers(table, network):
    """What nobody thought of fails the requests of one engine, and nothing else."""
    table.get_or_connect(ADDRESS, 0.0).waiting.append(("a", None))
    table.advance(0.0)
    network.handshakes[-1].set_exception(OSError("too many open files"))
    assert outcomes(table.advance(0.0)) == [("engine", "too many open files")]


def close_due(table, now_s):
    """Close what is due, as the connector's thread does."""
    for connection in table.take_due(now_s):
        connection.close()


def test_broken_engine_is_connected_anew_beside_what_drains(table, network):
    """After a failed read new requests wait for the next handshake, not for the old reads."""
    peer = connected(table, network)
    old = peer.connection
    old.lifetime.begin()
    table.break_off(old, 1.0)
    table.get_or_connect(ADDRESS, 1.0).waiting.append(("a", None))
    assert table.advance(1.0) == [] and len(network.handshakes) == 2
    network.answer()
    assert outcomes(table.advance(2.0)) == [("engine", None)]
    assert peer.connection is network.opened[1]
    assert table.take_just_retired() == [old] and table.take_just_retired() == []
    close_due(table, 2.0)
    assert table.retired == (old,) and not old.closed
    old.lifetime.done()
    close_due(table, 2.0)
    assert old.closed and table.retired == ()


def test_connection_that_is_still_to_be_asked_is_kept(table, network):
    """Whoever has read all of his blocks is told whether they were held."""
    peer = connected(table, network)
    old = peer.connection
    old.leases.append("a lookup")
    table.break_off(old, 1.0)
    close_due(table, 1.0)
    assert not old.closed
    old.leases.clear()
    close_due(table, 1.0)
    assert old.closed


def test_hung_connection_is_closed_after_its_grace(table, network):
    """Nothing waits without a deadline."""
    peer = connected(table, network)
    old = peer.connection
    old.lifetime.begin()
    table.break_off(old, 1.0)
    close_due(table, HUNG_GRACE_S)
    assert not old.closed
    close_due(table, 1.0 + HUNG_GRACE_S)
    assert old.closed


def test_failure_of_a_connection_that_drains_concerns_nobody_else(table, network):
    """What has taken its place is not broken by it."""
    peer = connected(table, network)
    old = peer.connection
    table.break_off(old, 1.0)
    table.get_or_connect(ADDRESS, 1.0)
    table.advance(1.0)
    network.answer()
    table.advance(1.0)
    table.break_off(old, 2.0)
    assert peer.connection is network.opened[1] and not peer.broken and peer.breaks == 1


def reconnected(table, network, now_s):
    """The peer after a read that has failed, and how long it was not asked for."""
    peer = table.get_or_connect(ADDRESS, now_s)
    table.break_off(peer.connection, now_s)
    table.advance(now_s)
    # Whoever wanted it has failed meanwhile: its past is kept all the same.
    peer.wanted = False
    table.advance(peer.retry_at_s)
    assert table.get_or_connect(ADDRESS, peer.retry_at_s) is peer
    table.advance(peer.retry_at_s)
    network.answer()
    table.advance(peer.retry_at_s)
    assert peer.connection is network.opened[-1]
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
    connection = peer.connection
    for now_s in (1.0, 1.5, 2.0):
        table.break_off(connection, now_s)
    assert (peer.breaks, peer.retry_at_s) == (1, 1.0)


def test_broken_engine_is_forgotten_after_its_past(table, network):
    """State of engines that are gone does not pile up either."""
    peer = connected(table, network)
    table.break_off(peer.connection, 1.0)
    peer.wanted = False
    table.advance(1.0)
    close_due(table, 1.0)
    assert network.opened[0].closed
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
    close_due(table, 2.0)
    assert network.opened[0].closed and not network.opened[1].closed
    assert len(table) == 1


def test_engine_elsewhere_is_not_concerned(table, network):
    """Replicas at other addresses live side by side."""
    one = connected(table, network)
    other = connected(table, network, RemoteEngineAddress("other", ADDRESS.host, 5601), 1.0)
    assert not one.broken and not other.broken


def test_silent_engine_is_forgotten(table, network):
    """State of engines that nobody asks for does not pile up."""
    connected(table, network)
    table.advance(IDLE_LIMIT_S - 1)
    assert len(table) == 1 and table.next_due_s == IDLE_LIMIT_S
    table.advance(IDLE_LIMIT_S)
    assert len(table) == 0
    close_due(table, IDLE_LIMIT_S)
    assert network.opened[0].closed


@pytest.mark.parametrize("idle_limit_s", [0.0, -1.0])
def test_engines_are_kept_for_ever_without_a_limit(network, idle_limit_s):
    """As with upstream's `engine_ttl`."""
    table = PeerTable(network.open, idle_limit_s)
    connected(table, network)
    table.advance(1e9)
    assert len(table) == 1


def test_engine_with_reads_in_flight_is_kept(table, network):
    """However long a read takes, its lists stay."""
    peer = connected(table, network)
    peer.connection.lifetime.begin()
    table.advance(IDLE_LIMIT_S + 1)
    assert len(table) == 1
    assert peer.connection is network.opened[0]


def test_closing_hands_every_connection_over(table, network):
    """Those in use, those that drain, and those that answer too late."""
    peer = connected(table, network)
    table.break_off(peer.connection, 1.0)
    connected(table, network, RemoteEngineAddress("other", ADDRESS.host, 5601), 1.0)
    late = table.get_or_connect(RemoteEngineAddress("late", ADDRESS.host, 5602), 1.0)
    table.advance(1.0)
    late.handshake.set_running_or_notify_cancel()
    assert table.close(2.0) == network.opened[:2]
    assert len(table) == 0
    network.answer()
    assert network.opened[2].closed


def test_wrong_address_costs_nobody_else(table, network):
    """A request that names another host for an engine fails alone; the engine is used as before."""
    elsewhere = RemoteEngineAddress(ADDRESS.engine_id, "elsewhere.example", 5600)
    table.get_or_connect(elsewhere, 0.0).waiting.append(("wrong", None))
    table.get_or_connect(ADDRESS, 0.0).waiting.append(("right", None))
    table.advance(0.0)
    network.handshakes[0].set_exception(RemoteLayoutError("unreachable"))
    network.handshakes[1].set_result(Connection())
    (wrong, error), (right, nothing) = table.advance(0.1)
    assert [request_id for request_id, _ in wrong.take_waiting()] == ["wrong"]
    assert [request_id for request_id, _ in right.take_waiting()] == ["right"]
    assert (str(error), nothing) == ("unreachable", None)


def test_invented_engine_does_not_replace_a_real_one(table, network):
    """Another id at an engine's address is believed only once it has answered."""
    real = connected(table, network)
    table.get_or_connect(RemoteEngineAddress("invented", ADDRESS.host, ADDRESS.port), 1.0)
    table.advance(1.0)
    network.fail()
    table.advance(1.1)
    assert not real.broken
    assert real.connection is network.opened[0]


def test_connection_alone_is_enough_to_break_off(table, network):
    """Who looks leases up knows no peer; what is of the past breaks nothing off."""
    peer = connected(table, network)
    old = peer.connection
    table.break_off(old, 1.0)
    assert peer.broken and peer.connection is None and table.retired == (old,)
    table.get_or_connect(ADDRESS, 1.0)
    table.advance(1.0)
    network.answer()
    table.advance(1.0)
    table.break_off(old, 2.0)
    assert peer.connection is network.opened[1] and not peer.broken

# SPDX-License-Identifier: Apache-2.0
"""When a worker shakes hands with another engine, tries again, and forgets it."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future

import pytest

from tests.v1.kv_connector.unit.reshard.transport.checks import Check
from tests.v1.kv_connector.unit.reshard.transport.remotes import (
    HUNG_GRACE_S,
    OFFER,
    Reader,
    RemoteEngineStub,
    open_lists,
    read_block,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.connecting import (
    peers as peers_module,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.connecting.peers import (
    FIRST_RETRY_S,
    IDLE_LANE_S,
    LAST_RETRY_S,
    MAX_CONNECTIONS,
    STEADY_S,
    Peer,
    PeerTable,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import (
    RemoteLayoutError,
    TransferError,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.lifetimes import PEER_GRACE_S
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    RemoteEngineAddress,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport import limits
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.connection import PeerConnection
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.lane import (
    MAX_DRAINING_LANES,
    Lane,
    Lanes,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.remote import LoweredEngine

IDLE_LIMIT_S = 600.0
ADDRESS = RemoteEngineAddress("engine", "prefill.example", 5600)


def at(number: int, engine_id: str | None = None) -> RemoteEngineAddress:
    """Where the engine of a number listens."""
    return RemoteEngineAddress(engine_id or f"engine {number}", "prefill.example", 5600 + number)


class Network:
    """Engines that answer, and lanes that are made, when the test says so.

    Attributes:
        handshakes: All questions, the last one last.
        lanes: All lanes that were asked for.
        opened: All connections that were begun.
        now_s: The clock of the connections.
        makes_lanes: Lanes are there as soon as they are asked for.
    """

    def __init__(
        self,
        idle_limit_s: float = IDLE_LIMIT_S,
        awaited: Collection[RemoteEngineAddress] = (),
    ) -> None:
        self.reader = Reader()
        self.handshakes: list[Future[LoweredEngine]] = []
        self.lanes: list[Future[Lane]] = []
        self.opened: list[PeerConnection] = []
        self.engines: list[RemoteEngineStub] = []
        self.now_s = 0.0
        self.makes_lanes = True
        lanes = Lanes(self._make_lane)
        self.table = PeerTable(self._dial, self._connect, lanes, idle_limit_s, lambda: awaited)

    def answer(self, handshake: Future | None = None, tp_size: int = 1) -> RemoteEngineStub:
        """A handshake succeeds, by default the last one."""
        engine = RemoteEngineStub(tp_size)
        self.engines.append(engine)
        (handshake or self.handshakes[-1]).set_result(self.reader.lowered(engine))
        return engine

    def fail(self) -> None:
        """The handshake under way fails."""
        self.handshakes[-1].set_exception(RemoteLayoutError("unreachable"))

    def make_lane(self) -> None:
        """The lane that was asked for last is there."""
        self.lanes[-1].set_result(self.reader.make_lane())

    def _dial(self, address: RemoteEngineAddress) -> Future[LoweredEngine]:
        self.handshakes.append(Future())
        return self.handshakes[-1]

    def _make_lane(self) -> Future[Lane]:
        self.lanes.append(Future())
        if self.makes_lanes:
            self.make_lane()
        return self.lanes[-1]

    def _connect(self, lane: Lane, lowered: LoweredEngine) -> PeerConnection:
        connection = PeerConnection(lane, lowered, HUNG_GRACE_S, lambda: self.now_s)
        self.opened.append(connection)
        return connection


@pytest.fixture
def network() -> Network:
    """No engine that is known."""
    return Network()


@pytest.fixture
def table(network) -> PeerTable:
    """A table without peers."""
    return network.table


def outcomes(news):
    """What happened to which engine."""
    return [(peer.address.engine_id, error and str(error)) for peer, error in news]


def take_waiting(peer: Peer) -> list[str]:
    """Requests that wait for it, which are failed or begun now."""
    waiting = [request_id for request_id, _ in peer.waiting]
    peer.waiting.clear()
    return waiting


def connected(table, network, address=ADDRESS, now_s=0.0, *, is_proven=False):
    """A peer that has answered."""
    peer = table.get_or_connect(address, now_s)
    peer.is_proven |= is_proven
    table.advance(now_s)
    network.answer()
    table.advance(now_s)
    assert peer.connection is network.opened[-1]
    return peer


def close_due(table, now_s):
    """Close what is due, as the connector's thread does."""
    for connection in table.take_drained():
        connection.close()
    for lane in table.lanes.take_due(now_s):
        lane.close()


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
    assert take_waiting(peer) == ["a", "b"]
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
    ((address, lowered, duration_s),) = table.take_handshakes()
    assert (address, lowered.num_ranks, duration_s) == (ADDRESS, 1, 2.0)
    assert table.take_handshakes() == []


def test_failed_handshake_is_told_and_tried_again_later(table, network):
    """Those who waited are told; the next request waits for the back-off, and then is served."""
    table.get_or_connect(ADDRESS, 0.0).waiting.append(("a", None))
    table.advance(0.0)
    network.fail()
    news = table.advance(0.0)
    assert outcomes(news) == [("engine", "unreachable")]
    take_waiting(news[0][0])

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
    take_waiting(peer)
    table.advance(10.0 + LAST_RETRY_S)
    assert len(network.handshakes) == 1


def test_any_error_of_a_handshake_is_that_peers(table, network):
    """What nobody thought of fails the requests of one engine, and nothing else."""
    table.get_or_connect(ADDRESS, 0.0).waiting.append(("a", None))
    table.advance(0.0)
    network.handshakes[-1].set_exception(OSError("too many open files"))
    assert outcomes(table.advance(0.0)) == [("engine", "too many open files")]


def test_broken_engine_is_connected_anew_beside_what_drains(table, network):
    """After a failed read new requests wait for the next handshake, not for the old reads."""
    peer = connected(table, network)
    old = peer.connection
    transfer = read_block(old)
    table.break_off(old, 1.0)
    assert list(table.broken) == [old]
    table.get_or_connect(ADDRESS, 1.0).waiting.append(("a", None))
    assert table.advance(1.0) == [] and len(network.handshakes) == 2
    network.answer()
    assert outcomes(table.advance(2.0)) == [("engine", None)]
    assert peer.connection is network.opened[1] and peer.connection.lane is not old.lane
    close_due(table, 2.0)
    assert table.retired == (old,) and old.is_connected
    for _ in range(2):
        state = old.poll(transfer)
    assert state.value == "done"
    old.release(transfer)
    close_due(table, 2.0)
    assert not old.is_connected and not old.lane.agent.is_open and table.retired == ()


def test_connection_that_is_still_to_be_asked_is_kept(table, network):
    """Whoever has read all of his blocks is told whether they were held."""
    peer = connected(table, network)
    old = peer.connection
    (lease_table,) = old.lease_tables.values()
    check = Check(old.leases, "r", OFFER, [lease_table])
    table.break_off(old, 1.0)
    close_due(table, 1.0)
    assert old.is_connected
    while not check.is_over():
        pass
    assert check.error is None
    close_due(table, 1.0)
    assert not old.is_connected


def test_hung_connection_is_closed_after_its_grace(table, network):
    """Nothing waits without a deadline."""
    peer = connected(table, network)
    old = peer.connection
    read_block(old)
    table.break_off(old, 1.0)
    assert table.lanes.next_due_s == 1.0 + HUNG_GRACE_S
    close_due(table, HUNG_GRACE_S)
    assert old.is_connected
    close_due(table, 1.0 + HUNG_GRACE_S)
    assert not old.is_connected and not old.lane.agent.is_open


def test_failure_of_a_connection_that_drains_concerns_nobody_else(table, network):
    """What has taken its place is not broken by it."""
    peer = connected(table, network)
    old = peer.connection
    read_block(old)
    table.break_off(old, 1.0)
    assert peer.broken and peer.connection is None and table.retired == (old,)
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
    close_due(table, now_s)
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
    assert not network.opened[0].is_connected
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
    assert not network.opened[0].is_connected and network.opened[1].is_connected
    assert network.opened[0].lane is network.opened[1].lane
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
    assert not network.opened[0].is_connected and not network.opened[0].lane.is_retired


@pytest.mark.parametrize("idle_limit_s", [0.0, -1.0])
def test_engines_are_kept_for_ever_without_a_limit(idle_limit_s):
    """As with upstream's `engine_ttl`."""
    network = Network(idle_limit_s=idle_limit_s)
    table = network.table
    connected(table, network)
    table.advance(1e9)
    assert len(table) == 1


def test_engine_with_reads_in_flight_is_kept(table, network):
    """However long a read takes, its lists stay."""
    peer = connected(table, network)
    read_block(peer.connection)
    table.advance(IDLE_LIMIT_S + 1)
    assert len(table) == 1
    assert peer.connection is network.opened[0]


def test_closing_hands_every_lane_over(table, network):
    """Those in use, those that drain, and those that are made too late."""
    peer = connected(table, network)
    table.break_off(peer.connection, 1.0)
    network.makes_lanes = False
    late = table.get_or_connect(at(1), 1.0)
    table.advance(1.0)
    handshake = late.handshake
    # A second peer's question is answered, and it waits for the lane.
    table.get_or_connect(at(2), 1.0)
    table.advance(1.0)
    network.answer()
    table.advance(1.0)
    assert len(network.lanes) == 2
    network.lanes[-1].set_running_or_notify_cancel()
    lanes = table.close(2.0)
    assert lanes == [network.lanes[0].result()]
    assert len(table) == 0 and handshake.cancelled()
    network.make_lane()
    assert not network.lanes[-1].result().agent.is_open


def test_wrong_address_costs_nobody_else(table, network):
    """A request that names another host for an engine fails alone; the engine is used as before."""
    elsewhere = RemoteEngineAddress(ADDRESS.engine_id, "elsewhere.example", 5600)
    table.get_or_connect(elsewhere, 0.0).waiting.append(("wrong", None))
    table.get_or_connect(ADDRESS, 0.0).waiting.append(("right", None))
    table.advance(0.0)
    network.handshakes[0].set_exception(RemoteLayoutError("unreachable"))
    network.answer(network.handshakes[1])
    (wrong, error), (right, nothing) = table.advance(0.1)
    assert take_waiting(wrong) == ["wrong"]
    assert take_waiting(right) == ["right"]
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


# Peers that share a lane.


@pytest.fixture
def neighbours(table, network):
    """Two peers that are connected over one lane, and have given good reads."""
    peers = [connected(table, network, at(number)) for number in range(2)]
    for peer in peers:
        peer.is_proven = True
    assert peers[0].connection.lane is peers[1].connection.lane
    return peers


def finish(connection, transfer):
    """A read comes to its end."""
    for _ in range(2):
        state = connection.poll(transfer)
    assert state.value == "done"
    connection.release(transfer)


def reconnect(table, peer, now_s):
    """Want a peer again, and let it be connected over a lane that is there."""
    assert table.get_or_connect(peer.address, now_s) is peer
    table.advance(now_s)
    assert peer.connection is not None


def test_neighbour_is_connected_anew_without_being_asked(table, network, neighbours):
    """And once: what it had answered still holds, and the peer that broke is elsewhere by then."""
    bad, good = neighbours
    table.break_off(bad.connection, 1.0)
    assert bad.connection is None and good.connection is None
    assert not good.broken and good.breaks == 0
    good.waiting.append(("a", None))
    reconnect(table, good, 1.0)
    assert len(network.handshakes) == 2 and len(network.opened) == 3
    assert good.connection.lane is network.lanes[1].result()
    connected(table, network, bad.address, 1.5)
    assert len(network.handshakes) == 3
    assert bad.connection.lane not in (good.connection.lane, network.opened[0].lane)
    steady, broken = good.connection, bad.connection
    for now_s in (2.0, 4.0):
        table.break_off(bad.connection, now_s)
        assert good.connection is steady
        table.advance(bad.retry_at_s)
        connected(table, network, bad.address, bad.retry_at_s)
        assert bad.connection.lane not in (good.connection.lane, broken.lane)
    assert len(network.opened) == 6 and not steady.lane.is_retired


def test_engine_whose_bytes_differ_costs_its_neighbours_nothing(table, network, neighbours):
    """It is asked anew, and has to prove itself anew; its lane stays as it is."""
    bad, good = neighbours
    bad.is_proven, old, steady = True, bad.connection, good.connection
    table.distrust(old, 1.0)
    assert list(table.broken) == [old] and bad.connection is None and not bad.is_proven
    assert good.connection is steady and not old.lane.is_retired
    connected(table, network, bad.address, 1.5)
    assert len(network.handshakes) == 3 and bad.connection is not old
    assert old in table.take_drained()
    # The one that is forgotten meanwhile is nobody's.
    old.close()
    table.distrust(old, 2.0)
    assert bad.connection.is_connected and bad.breaks == 1


def test_hosts_that_connect_and_go_cost_a_good_engine_one_connection(table, network):
    """However many: they begin in a lane that it has left."""
    good, used = connected(table, network), set()
    good.is_proven = True
    for number in range(1, 13):
        stranger = connected(table, network, at(number), 1.0 * number)
        table.break_off(stranger.connection, 1.0 * number)
        reconnect(table, good, 1.0 * number)
        used.add(good.connection)
        close_due(table, 1.0 * number)
    assert len(used) == 1 and not good.connection.lane.is_retired
    assert len(network.opened) == 1 + 12 + 1


def test_neighbours_requests_end_over_the_old_lane(table, network, neighbours):
    """Its lane stays until they are received, however long the one that broke is gone."""
    bad, good = neighbours
    old = good.connection
    old.lifetime.begin_request()
    transfer = read_block(old)
    table.break_off(bad.connection, 1.0)
    assert set(table.retired) == set(network.opened)
    close_due(table, 1.0 + PEER_GRACE_S)
    finish(old, transfer)
    close_due(table, 1.0 + 2 * PEER_GRACE_S)
    # It has landed in an arena, say, and is still to be looked up.
    assert old.is_connected
    old.lifetime.end_request()
    close_due(table, 1.0 + 2 * PEER_GRACE_S)
    assert not old.is_connected and not old.lane.agent.is_open


def test_requests_that_wait_for_a_neighbour_bring_it_back(table, network, neighbours):
    """They were connected, and had not begun: nobody has to want it once more."""
    bad, good = neighbours
    good.waiting.append(("a", None))
    table.break_off(bad.connection, 1.0)
    assert outcomes(table.advance(1.0)) == [("engine 1", None)]
    assert good.connection is network.opened[-1] and len(network.handshakes) == 2


def test_neighbour_that_is_being_connected_goes_to_the_next_lane(table, network):
    """What was connected of it already is closed with the lane."""
    bad = connected(table, network, at(0))
    peer = table.get_or_connect(at(1), 1.0)
    table.advance(1.0)
    engine = network.answer(tp_size=2)
    table.advance(1.0)
    half = peer.connecting
    assert half is not None and table.is_connecting
    table.break_off(bad.connection, 2.0)
    assert peer.connecting is None
    table.advance(2.0)
    table.advance(2.0)
    assert peer.connection.lane is network.lanes[1].result() and not table.is_connecting
    assert len(peer.connection.releases) == len(engine.agents) == 2
    assert len(network.handshakes) == 2
    close_due(table, 2.0)
    assert not half.is_connected and not half.lane.agent.is_open


def test_neighbour_that_fails_as_well_is_suspected(table, network, neighbours):
    """Though its lane is retired: it is asked anew, and costs no other lane."""
    for peer in neighbours:
        read_block(peer.connection)
    old = [peer.connection for peer in neighbours]
    table.break_off(old[0], 1.0)
    table.break_off(old[1], 1.1)
    second = neighbours[1]
    assert second.broken and second.lowered is None
    assert second.breaks == 1 and second.is_suspect(1.1)
    table.break_off(old[1], 1.2)
    assert second.breaks == 1
    assert list(table.broken) == old
    steady = connected(table, network, at(2), 2.0, is_proven=True)
    connected(table, network, second.address, 2.0)
    assert second.connection.lane is not steady.connection.lane
    table.break_off(second.connection, 3.0)
    assert steady.connection is not None and not steady.connection.lane.is_retired


def test_neighbour_that_fails_while_it_is_connected_anew_is_asked(table, network, neighbours):
    """What it had answered does not hold any more."""
    old = neighbours[1].connection
    read_block(old)
    network.makes_lanes = False
    table.break_off(neighbours[0].connection, 1.0)
    table.get_or_connect(at(1), 1.0)
    table.advance(1.0)
    assert neighbours[1].is_opening and len(network.handshakes) == 2
    table.break_off(old, 1.1)
    table.advance(1.1)
    assert len(network.handshakes) == 3


def test_peers_that_are_steady_go_back_to_the_others(table, network, neighbours):
    """Who was suspected long ago is connected as the others are."""
    bad, good = neighbours
    table.break_off(bad.connection, 1.0)
    reconnect(table, good, 1.0)
    connected(table, network, bad.address, 2.0)
    assert bad.connection.lane is not good.connection.lane
    table.break_off(bad.connection, 2.0 + STEADY_S)
    bad.suspect_until_s = 0.0
    connected(table, network, bad.address, 3.0 + STEADY_S)
    assert bad.connection.lane is good.connection.lane


def test_peer_waits_for_a_lane(table, network):
    """It is asked meanwhile, and connected as soon as there is one."""
    network.makes_lanes = False
    peer = table.get_or_connect(ADDRESS, 0.0)
    peer.waiting.append(("a", None))
    table.advance(0.0)
    network.answer()
    assert table.advance(0.0) == [] and not table.is_connecting
    assert len(network.lanes) == 1
    network.make_lane()
    assert outcomes(table.advance(1.0)) == [("engine", None)]


def test_lane_that_cannot_be_made_fails_its_peers_handshake(table, network):
    """It says why; the next one is tried later, and who comes meanwhile waits for that."""
    network.makes_lanes = False
    peer = table.get_or_connect(ADDRESS, 0.0)
    peer.waiting.append(("a", None))
    table.advance(0.0)
    network.answer()
    table.advance(0.0)
    network.lanes[-1].set_exception(OSError("too many open files"))
    ((_, error),) = table.advance(0.0)
    assert isinstance(error, TransferError) and "too many open files" in str(error)
    take_waiting(peer)
    network.makes_lanes = True
    table.get_or_connect(at(1), 0.5)
    table.advance(0.5)
    network.answer()
    assert table.advance(0.5) == [] and len(network.lanes) == 1
    while not network.opened:
        assert 0.5 < table.next_due_s <= 10.0
        table.advance(table.next_due_s)
    assert len(network.lanes) == 2


def test_workers_are_connected_one_in_a_poll(table, network):
    """Each takes NIXL a while: what is on its way is looked at in between."""
    peer = table.get_or_connect(ADDRESS, 0.0)
    table.advance(0.0)
    network.answer(tp_size=2)
    table.advance(0.0)
    assert peer.connection is None and table.is_connecting and peer.is_opening
    table.advance(0.0)
    assert peer.connection is not None and not table.is_connecting and not peer.is_opening


def test_worker_that_cannot_be_connected_leaves_nothing(table, network, monkeypatch):
    """Its engine's other workers are forgotten, and their lists are given back."""
    connected(table, network, at(1))
    lane = network.lanes[0].result()
    lists = open_lists(monkeypatch, lane.agent)
    peer = table.get_or_connect(ADDRESS, 0.0)
    table.advance(0.0)
    engine = network.answer(tp_size=2)
    engine.agents[1].close()
    assert table.advance(0.0) == []
    ((_, error),) = table.advance(0.0)
    assert "no agent accepts a peer's metadata" in str(error)
    assert peer.connection is None and lists
    close_due(table, 0.0)
    assert not lists and not lane.is_retired


def test_suspect_waits_while_too_many_lanes_drain(table, network):
    """It hangs every time, and each of its lanes is kept for long; others are not concerned."""
    now_s = 0.0
    while len(table.lanes.draining) <= MAX_DRAINING_LANES:
        peer = connected(table, network, now_s=now_s)
        read_block(peer.connection)
        table.break_off(peer.connection, now_s)
        now_s = peer.retry_at_s
    table.get_or_connect(ADDRESS, now_s)
    table.advance(now_s)
    network.answer()
    assert table.advance(now_s) == [] and peer.is_opening and peer.connection is None
    other = connected(table, network, at(1), now_s, is_proven=True)
    assert other.connection is not None
    # The oldest is waited for no longer than a slow one, and then there is room.
    oldest = table.lanes.draining[0]
    assert table.next_due_s == oldest.retired_at_s + PEER_GRACE_S
    now_s = max(now_s, table.next_due_s)
    close_due(table, now_s)
    assert not oldest.agent.is_open
    table.advance(now_s)
    assert peer.connection is not None


def test_restart_and_failure_in_one_turn_leave_nothing_in_doubt(table, network):
    """What may still write ends with its lane also where it has just been replaced."""
    old = connected(table, network).connection
    connected(table, network, at(0, "restarted"), 1.0)
    old.lifetime.refuse(1.0)
    table.break_off(old, 1.0)
    assert old.lane.is_retired and list(table.broken) == [old]
    close_due(table, 1.0)
    assert not old.is_connected and not old.lane.agent.is_open


def test_two_answers_from_one_place_in_one_turn(table, network):
    """The later one counts; both are told of."""
    connected(table, network, at(1))
    table.take_handshakes()
    addresses = ADDRESS, at(0, "restarted")
    for address in addresses:
        table.get_or_connect(address, 0.0)
    table.advance(0.0)
    for handshake in network.handshakes[1:]:
        network.answer(handshake)
    table.advance(1.0)
    told = table.take_handshakes()
    assert [address for address, *_ in told] == list(addresses)
    assert all(lowered.num_ranks == 1 for _, lowered, _ in told)
    old, new = (table.get_or_connect(address, 1.0) for address in addresses)
    assert old.broken and old.connection is None and new.connection is not None


def test_restarted_engine_is_not_replaced_by_what_it_was(table, network, monkeypatch):
    """Half connected, an answer from before the restart is given up, and asked for anew."""
    old = table.get_or_connect(ADDRESS, 0.0)
    table.advance(0.0)
    network.answer(tp_size=2)
    table.advance(0.0)
    assert old.connecting is not None
    new = table.get_or_connect(at(0, "restarted"), 0.0)
    # The old one's last worker is slow to be connected.
    monkeypatch.setattr(old.connecting, "connect_next", lambda: False)
    table.advance(0.0)
    network.answer()
    table.advance(0.0)
    assert new.connection is not None and old.connecting is None
    table.get_or_connect(ADDRESS, 0.0)
    table.advance(0.0)
    assert len(network.handshakes) == 3
    network.fail()
    table.advance(0.0)
    assert new.connection is not None and not new.broken


def crowd(network, count, now_s, first=0, **kinds):
    """Connect so many peers, a millisecond after one another."""
    return [
        connected(network.table, network, at(100 + number), now_s + 1e-3 * number, **kinds)
        for number in range(first, first + count)
    ]


def test_lanes_that_are_not_in_use_are_renewed(monkeypatch):
    """Beyond a number of connections their descriptors are given back; nobody is asked anew."""
    monkeypatch.setattr(peers_module, "MAX_CONNECTIONS", 8)
    network = Network()
    table = network.table
    good, new = crowd(network, 5, 0.0, is_proven=True), crowd(network, 5, 0.0, first=5)
    in_use, reading, *_ = good
    transfer = read_block(reading.connection)
    assert table.next_due_s <= 1.0 + IDLE_LANE_S
    kept_s = 1.0 + IDLE_LANE_S
    table.get_or_connect(in_use.address, kept_s)
    table.advance(kept_s)
    assert [peer for peer in (*good, *new) if peer.connection is None] == new
    close_due(table, kept_s)
    assert sum(lane.num_made for lane in table.lanes.ready) <= 8
    asked = len(network.handshakes)
    reconnect(table, new[0], kept_s)
    assert len(network.handshakes) == asked and not new[0].is_suspect(kept_s)
    finish(reading.connection, transfer)


def test_connections_that_are_closed_count(monkeypatch):
    """NIXL gives descriptors back with the agent alone."""
    monkeypatch.setattr(peers_module, "MAX_CONNECTIONS", 8)
    network = Network(idle_limit_s=1.0)
    table = network.table
    for number in range(9):
        now_s = 2.0 * number
        connected(table, network, at(number), now_s)
        close_due(table, now_s)
    lane = network.lanes[0].result()
    assert lane.num_made == 9 and len(lane.connections) == 1
    now_s = table.next_due_s
    while lane.agent.is_open:
        table.advance(now_s)
        close_due(table, now_s)
        assert now_s <= 18.0 + IDLE_LANE_S
        now_s = max(now_s + 1.0, table.next_due_s if table.next_due_s < 1e9 else 0.0)
    assert not network.lanes[1].result().is_retired


def test_as_many_engines_as_most_deployments_have_are_never_connected_anew():
    """However long they are not wanted, short of being forgotten."""
    network = Network()
    peers = crowd(network, MAX_CONNECTIONS, 0.0)
    connections = [peer.connection for peer in peers]
    now_s = 1.0
    while now_s < IDLE_LIMIT_S - 10.0:
        network.table.advance(now_s)
        now_s += 5.0
    assert [peer.connection for peer in peers] == connections


def test_lanes_that_are_all_in_use_are_kept(monkeypatch):
    """More descriptors are better than peers that reconnect again and again."""
    monkeypatch.setattr(peers_module, "MAX_CONNECTIONS", 8)
    network = Network()
    peers = crowd(network, 12, 0.0)
    connections = [peer.connection for peer in peers]
    for step in range(1, 20):
        for peer in peers:
            network.table.get_or_connect(peer.address, 0.9 * IDLE_LANE_S * step)
        network.table.advance(0.9 * IDLE_LANE_S * step)
    assert [peer.connection for peer in peers] == connections


def test_bounds_are_shares_of_the_limit_of_open_files(network, monkeypatch):
    """Where few files may be open, fewer engines that gave no good read are known."""
    monkeypatch.setattr(limits, "file_limit", lambda: 8 * 10 * 3)
    crowd(network, 12, 0.0)
    for now_s in (1.0, 2.0):
        connected(network.table, network, at(int(now_s)), now_s)
        close_due(network.table, now_s)
    assert len(network.table) <= 3


def test_engine_that_gave_no_good_read_makes_room_for_another_one(network, monkeypatch):
    """The one that was not wanted for longest; what was read from, or is busy, stays."""
    monkeypatch.setattr(peers_module, "MAX_UNPROVEN", 4)
    table = network.table
    good = connected(table, network, at(1), 0.0)
    good.is_proven = True
    reading, again, oldest, *_ = crowd(network, 4, 1.0)
    transfer = read_block(reading.connection)
    table.get_or_connect(again.address, 2.0)
    old = oldest.connection
    connected(table, network, at(2), 3.0)
    close_due(table, 3.0)
    assert {good, reading, again} <= set(table)
    assert oldest not in table and not old.is_connected
    assert len(table) == 5
    finish(reading.connection, transfer)


def test_engines_that_are_known_are_bounded(network, monkeypatch):
    """However good they are; an engine that is forgotten is asked anew when it is wanted."""
    monkeypatch.setattr(peers_module, "MAX_PEERS", 6)
    table = network.table
    peers = crowd(network, 6, 0.0)
    for peer in peers:
        peer.is_proven = True
    connected(table, network, at(1), 1.0)
    assert len(table) == 6 and peers[0] not in table
    asked = len(network.handshakes)
    connected(table, network, peers[0].address, 2.0)
    assert len(network.handshakes) == asked + 1


def test_peers_with_which_something_is_under_way_are_never_forgotten(network, monkeypatch):
    """Their number is that of requests."""
    monkeypatch.setattr(peers_module, "MAX_UNPROVEN", 2)
    table = network.table
    peers = [table.get_or_connect(at(number), 0.0) for number in range(5)]
    table.advance(0.0)
    table.get_or_connect(at(6), 1.0)
    assert set(peers) < set(table)


def test_lanes_do_not_fill_up_with_engines_that_are_no_good(monkeypatch):
    """Lanes that are in use are renewed, too, and good engines go on over their successors."""
    monkeypatch.setattr(peers_module, "MAX_CONNECTIONS", 1000)
    monkeypatch.setattr(peers_module, "MAX_UNPROVEN", 4)
    monkeypatch.setattr(peers_module, "MAX_DEAD_CONNECTIONS", 8)
    network = Network()
    table, most = network.table, 0
    good = connected(table, network, at(1), 0.0)
    good.is_proven = True
    for number in range(60):
        now_s = 1.0 + 0.1 * number
        connected(table, network, at(100 + number), now_s)
        if good.connection is None:
            reconnect(table, good, now_s)
        assert not good.connection.lane.is_retired
        close_due(table, now_s)
        most = max(most, sum(lane.num_made for lane in table.lanes.ready))
    # Those that are closed, those that are known, and the newest of either.
    assert 8 < most <= 8 + 4 + 2
    assert sum(lane.result().agent.is_open for lane in network.lanes) <= 3


def test_many_engines_that_are_wanted_at_once_are_connected(monkeypatch):
    """However many: no lane is renewed for what is being connected over it."""
    monkeypatch.setattr(peers_module, "MAX_DEAD_CONNECTIONS", 8)
    network = Network()
    table = network.table
    crowd = [table.get_or_connect(at(number), 0.0) for number in range(40)]
    for peer in crowd:
        peer.waiting.append((f"r{peer.address.port}", None))
    table.advance(0.0)
    for handshake in network.handshakes:
        network.answer(handshake)
    for turn in range(10):
        table.advance(0.1 * turn)
    assert all(peer.connection is not None for peer in crowd)
    assert table.lanes.draining == ()


def test_engine_that_requests_wait_for_is_not_forgotten(monkeypatch):
    """Their leases are renewed there; and one that has just failed is left alone for as long."""
    monkeypatch.setattr(peers_module, "MAX_UNPROVEN", 3)
    network = Network(awaited={at(100)})
    table = network.table
    peers = crowd(network, 3, 0.0)
    peers[1].suspect_until_s = 100.0
    connected(table, network, at(70), 1.0)
    assert peers[2] not in table
    connected(table, network, at(71), 2.0)
    assert set(peers[:2]) < set(table)
    assert at(70) not in [peer.address for peer in table]

# SPDX-License-Identifier: Apache-2.0
"""Agents that peers share: which one a peer gets, and when one ends."""

from __future__ import annotations

import logging
import math
from concurrent.futures import Future
from functools import partial

import numpy as np
import pytest

from tests.v1.kv_connector.unit.reshard.transport.channels import wait_until
from tests.v1.kv_connector.unit.reshard.transport.checks import Check
from tests.v1.kv_connector.unit.reshard.transport.memory_agent import MemoryAgent
from tests.v1.kv_connector.unit.reshard.transport.remotes import (
    HUNG_GRACE_S,
    OFFER,
    Reader,
    RemoteEngineStub,
    memory_agent,
    nixl_reader,
    nixl_source,
    open_lists,
    read_block,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import TransferError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.lifetimes import PEER_GRACE_S
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import (
    NixlAgent,
    Transfer,
    TransferState,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.lane import (
    MAX_DRAINING_LANES,
    Lane,
    Lanes,
)

AGENTS = {"memory": (memory_agent, memory_agent), "nixl": (nixl_source, nixl_reader)}


class Making:
    """Makes lanes when the test says so.

    Attributes:
        asked: A future for each lane.
    """

    def __init__(self, reader: Reader) -> None:
        self.asked: list[Future[Lane]] = []
        self._reader = reader

    def __call__(self) -> Future[Lane]:
        """Ask for one."""
        self.asked.append(Future())
        return self.asked[-1]

    def make_all(self) -> list[Lane]:
        """Make all that were asked for."""
        waiting = [each for each in self.asked if not each.done()]
        for each in waiting:
            each.set_result(self._reader.make_lane())
        return [each.result() for each in waiting]


@pytest.fixture
def reader() -> Reader:
    """A worker that reads."""
    return Reader()


@pytest.fixture
def making(reader) -> Making:
    """What its lanes are made by."""
    return Making(reader)


def ready_lanes(making: Making) -> Lanes:
    """The lane that every peer begins with is made."""
    lanes = Lanes(making)
    lanes.prepare(0.0)
    making.make_all()
    assert len(lanes) == 1
    return lanes


def pick(lanes: Lanes, now_s: float = 0.0) -> Lane | None:
    """The lane of a newcomer."""
    return lanes.pick(now_s, is_proven=False, is_suspect=False)


@pytest.fixture(params=AGENTS.values(), ids=AGENTS.keys())
def make_agents(request):
    """How to make the agent of a source, and of a lane."""
    return request.param


# Which lane a peer gets.


def test_lane_is_made_before_it_is_wanted(making):
    """That of newcomers, which all others share meanwhile; it is asked for once."""
    lanes = Lanes(making)
    lanes.prepare(0.0)
    assert len(making.asked) == 1 and lanes.is_making and not len(lanes)
    assert pick(lanes) is None and lanes.next_try_s == math.inf
    (lane,) = making.make_all()
    lanes.prepare(1.0)
    assert pick(lanes, 1.0) is lane
    assert len(making.asked) == 1 and not lanes.is_making


def test_proven_peers_have_a_lane_of_their_own(making):
    """It is made when the first one comes; newcomers and suspects share the other one."""
    lanes = ready_lanes(making)
    (others,) = lanes.ready
    assert lanes.pick(0.0, is_proven=True, is_suspect=False) is None
    (theirs,) = making.make_all()
    assert lanes.pick(0.0, is_proven=True, is_suspect=False) is theirs
    for is_proven, is_suspect in ((False, False), (False, True), (True, True)):
        assert lanes.pick(0.0, is_proven=is_proven, is_suspect=is_suspect) is others


def test_retired_lane_has_a_successor(making, reader):
    """It is made when it is wanted; retiring the old one again changes nothing."""
    lanes = ready_lanes(making)
    (old,) = lanes.ready
    read_block(reader.connected(old, RemoteEngineStub()))
    lanes.retire(old, 1.0)
    lanes.retire(old, 2.0)
    assert old.is_retired and old.retired_at_s == 1.0
    assert lanes.draining == (old,) and lanes.ready == () and len(lanes) == 1
    assert pick(lanes, 1.0) is None
    (successor,) = making.make_all()
    assert pick(lanes, 1.0) is successor


def test_lane_that_cannot_be_made_is_tried_again_later(making):
    """Who wanted it hears why; the next one waits, and is not refused for the same reason."""
    lanes = Lanes(making)
    lanes.prepare(0.0)
    making.asked[0].set_exception(OSError("too many open files"))
    with pytest.raises(TransferError, match=r"no NIXL agent can be made .*: too many open files"):
        pick(lanes, 1.0)
    assert pick(lanes, 1.5) is None
    assert len(making.asked) == 1 and not lanes.is_making
    retry_at_s = lanes.next_try_s
    assert 1.5 < retry_at_s < math.inf
    assert pick(lanes, retry_at_s) is None
    (lane,) = making.make_all()
    assert pick(lanes, retry_at_s) is lane


# When one ends.


def test_open_lane_stays(making, reader):
    """With connections and without."""
    (lane,) = ready_lanes(making).ready
    assert not lane.is_retired and lane.is_drained and lane.close_at_s() is None
    connection = reader.connected(lane, RemoteEngineStub())
    read_block(connection)
    assert not lane.is_drained and lane.close_at_s() is None


def retired(lanes: Lanes, *connections, now_s: float = 10.0) -> Lane:
    """A lane that is retired with its connections, as a table does it."""
    (lane,) = {each.lane for each in connections}
    lanes.retire(lane, now_s)
    for each in connections:
        each.lifetime.retire(now_s)
    return lane


def test_retired_lane_ends_with_the_last_of_its_connections(making, reader):
    """Reads, requests and checks of any of them keep it."""
    lanes = ready_lanes(making)
    engines = [RemoteEngineStub() for _ in range(3)]
    one, two, three = (reader.connected(lanes.ready[0], engine, lambda: 10.0) for engine in engines)
    transfer = read_block(one)
    two.lifetime.begin_request()
    (table,) = three.lease_tables.values()
    check = Check(three.leases, "r", OFFER, [table])
    lane = retired(lanes, one, two, three)
    hung_at_s = 10.0 + HUNG_GRACE_S
    assert lane.close_at_s() == lanes.next_due_s == hung_at_s
    wait_until(lambda: one.poll(transfer) is TransferState.DONE)
    one.release(transfer)
    assert lane.close_at_s() == hung_at_s and not lanes.take_due(hung_at_s - 0.1)
    two.lifetime.end_request()
    assert lane.close_at_s() == hung_at_s
    wait_until(check.is_over)
    assert lane.close_at_s() == 10.0 and lane.is_drained
    assert lanes.take_due(10.0) == [lane] and not lanes.draining


def test_log_tells_of_a_lane_that_is_retired_and_closed(making, reader, caplog_vllm):
    """With how many peers it was, what is under way, and how long ago."""
    caplog_vllm.set_level(logging.DEBUG, "vllm")
    lanes = ready_lanes(making)
    (lane,) = lanes.ready
    connection = reader.connected(lane, RemoteEngineStub())
    connection.lifetime.begin()
    retired(lanes, connection, now_s=10.0)
    told = "The lane of 1 peers was retired 0.0 s ago, with 1 reads under way."
    assert f"New reads go to another lane. {told}" in caplog_vllm.text
    connection.lifetime.done()
    assert lanes.take_due(12.5) == [lane]
    told = "The lane of 1 peers was retired 2.5 s ago, with 0 reads under way."
    assert f"A lane is closed. {told}" in caplog_vllm.text


def test_log_warns_of_a_lane_that_is_closed_over_a_hung_peer(making, reader, caplog_vllm):
    """While reads are in flight; not of reads that have failed, which were told of."""
    lanes = ready_lanes(making)
    lanes.pick(0.0, is_proven=True, is_suspect=False)
    making.make_all()
    hung, lost = (reader.connected(lane, RemoteEngineStub()) for lane in lanes.ready)
    hung.lifetime.begin()
    lost.lifetime.refuse(10.0)
    lane, other = retired(lanes, hung), retired(lanes, lost)
    closed = lanes.take_due(10.0 + HUNG_GRACE_S)
    assert set(closed) == {lane, other}
    (record,) = [each for each in caplog_vllm.records if each.levelno == logging.WARNING]
    assert "reads have not ended in time. The lane of 1 peers was retired" in record.getMessage()
    assert "with 1 reads under way. Check that the engines" in record.getMessage()


def test_what_was_sent_last_may_leave(making, reader):
    """A lane is kept for the moment that a message takes to be on its way."""
    lanes = ready_lanes(making)
    engine = RemoteEngineStub()
    connection = reader.connected(lanes.ready[0], engine, lambda: 10.0)
    connection.notify(engine.agents[0].name, b"done")
    lane = retired(lanes, connection)
    assert 10.0 < lane.sent_by_s < 11.0
    assert lanes.next_due_s == lane.sent_by_s and lanes.take_due(10.0) == []
    assert lanes.take_due(lane.sent_by_s) == [lane]
    assert engine.agents[0].take_notifications() == [(lane.agent.name, b"done")]


def test_forced_lane_ends_once_it_is_retired(making, reader):
    """Whatever is in flight."""
    lanes = ready_lanes(making)
    connection = reader.connected(lanes.ready[0], RemoteEngineStub())
    read_block(connection)
    connection.lane.force()
    assert connection.lane.close_at_s() is None
    lane = retired(lanes, connection)
    assert lane.close_at_s() == 10.0 and lanes.take_due(10.0) == [lane]


def test_oldest_of_too_many_lanes_is_waited_for_no_longer_than_a_slow_one(making, reader):
    """None is made for suspects meanwhile; others get theirs."""
    lanes = ready_lanes(making)
    draining = []
    for number in range(MAX_DRAINING_LANES + 1):
        lane = pick(lanes) or making.make_all()[0]
        connection = reader.connected(lane, RemoteEngineStub())
        read_block(connection)
        assert lanes.next_due_s == (10.0 + HUNG_GRACE_S if draining else math.inf)
        draining.append(retired(lanes, connection, now_s=10.0 + number))
    assert lanes.draining == tuple(draining)
    num_asked = len(making.asked)
    assert lanes.pick(20.0, is_proven=False, is_suspect=True) is None
    assert len(making.asked) == num_asked
    assert lanes.next_try_s == math.inf
    # One whom nobody suspects has its own made, which suspects do not use.
    assert lanes.pick(20.0, is_proven=True, is_suspect=False) is None
    assert len(making.asked) == num_asked + 1
    assert lanes.next_due_s == 10.0 + PEER_GRACE_S
    assert lanes.take_due(10.0 + PEER_GRACE_S) == draining[:1]
    # Now there is room, and the next one has all of its time.
    assert lanes.next_due_s == 11.0 + HUNG_GRACE_S
    assert lanes.pick(20.0, is_proven=False, is_suspect=True) is None
    assert len(making.asked) == num_asked + 2


def test_closing_hands_all_lanes_over(making, reader):
    """Those that are ready, and that drain; one that is being made is closed when it comes."""
    lanes = ready_lanes(making)
    (first,) = lanes.ready
    lanes.pick(0.0, is_proven=True, is_suspect=False)
    (second,) = making.make_all()
    for lane in (first, second):
        lanes.retire(lane, 1.0)
    lanes.pick(1.0, is_proven=True, is_suspect=False)
    assert lanes.is_making
    making.asked[-1].set_running_or_notify_cancel()
    # And one whose making has not begun, which is not made any more.
    pick(lanes, 1.0)
    assert lanes.close(2.0) == [first, second]
    assert len(lanes) == 0 and not lanes.is_making and making.asked[-1].cancelled()
    late = reader.make_lane()
    making.asked[-2].set_result(late)
    assert not late.agent.is_open


def test_closing_outlives_a_lane_that_fails_late(making):
    """There is nothing to close then."""
    lanes = Lanes(making)
    lanes.prepare(0.0)
    making.asked[0].set_running_or_notify_cancel()
    assert lanes.close(1.0) == []
    making.asked[0].set_exception(OSError("too late"))


def test_closed_lane_closes_its_connections(reader):
    """With its agent first: what may still write ends with that."""
    lane = reader.make_lane()
    connections = [reader.connected(lane, RemoteEngineStub()) for _ in range(2)]
    read_block(connections[0])
    lane.close()
    assert not lane.agent.is_open and not lane.connections
    assert all(not each.is_connected and each.is_drained for each in connections)


# What its peers share.


def test_connections_of_one_geometry_share_lists_of_our_memory(monkeypatch, make_agents):
    """They are prepared once, and given back with the last connection that uses them."""
    make_source, make_reader = make_agents
    reader = Reader(make_reader)
    lane = reader.make_lane()
    lists = open_lists(monkeypatch, lane.agent)
    engines = [RemoteEngineStub(make_agent=make_source) for _ in range(3)]
    connections, counts = [], [0]
    for engine in engines:
        connections.append(reader.connected(lane, engine))
        counts.append(len(lists))
    # The first has a list of ours besides what each has of its peer: the legs', and the table.
    first, *others = np.diff(counts)
    assert first == others[0] + 1 and len(set(others)) == 1
    for connection in connections[:2]:
        connection.close()
    transfer = read_block(connections[2])
    wait_until(lambda: connections[2].poll(transfer) is TransferState.DONE)
    connections[2].release(transfer)
    assert len(lists) == counts[1]
    connections[2].close()
    assert not lists
    lane.close()
    for agent in (agent for engine in engines for agent in engine.agents):
        agent.close()


def test_engine_that_is_connected_twice_is_forgotten_once(make_agents):
    """Its next connection may be there while the one before drains, over the same lane."""
    make_source, make_reader = make_agents
    reader, engine = Reader(make_reader), RemoteEngineStub(make_agent=make_source)
    lane = reader.make_lane()
    old, new = (reader.connected(lane, engine) for _ in range(2))
    old.close()
    transfer = read_block(new)
    wait_until(lambda: new.poll(transfer) is TransferState.DONE)
    new.release(transfer)
    source, landed = engine.ranks[0].bytes(), reader.rank.bytes()
    assert (source != landed).any()
    ((name, _),) = new.releases
    new.notify(name, b"done")

    def heard() -> list[tuple[str, bytes]]:
        lane.agent.take_notifications()
        return engine.agents[0].take_notifications()

    heard_last: list[tuple[str, bytes]] = []
    wait_until(lambda: heard_last.extend(heard()) or heard_last)
    assert heard_last == [(lane.agent.name, b"done")]
    new.close()
    with pytest.raises(TransferError):
        lane.agent.prepare(np.array([[4096, 64, 0, 64, 1]], np.uint64), name)
    # It may be connected again.
    again = reader.connected(lane, engine)
    transfer = read_block(again)
    wait_until(lambda: again.poll(transfer) is TransferState.DONE)
    lane.close()
    engine.agents[0].close()


def test_two_agents_of_one_name_are_two():
    """Any host can say what another one is called: both are read from, each for what it holds."""
    source, namesake = (
        NixlAgent("a worker", num_threads=0, progress_delay_us=100) for _ in range(2)
    )
    memory = np.stack([np.full(64, value, np.uint8) for value in (1, 2, 0)])
    reader = nixl_reader("lane")
    for agent, own in zip((source, namesake, reader), memory, strict=True):
        agent.register([(own.ctypes.data, own.nbytes, 0)])
    lane = Lane(reader)
    names = [lane.connect(agent.metadata()) for agent in (source, namesake)]
    # Once more, as where two addresses lead to it.
    assert lane.connect(source.metadata()) == names[0]
    local, *remotes = (
        reader.prepare(np.array([[own.ctypes.data, 64, 0, 64, 1]], dtype=np.uint64), whose)
        for own, whose in zip((memory[2], memory[0], memory[1]), (None, *names), strict=True)
    )
    index = np.zeros(1, dtype=np.int32)

    def is_done(transfer: Transfer) -> bool:
        return reader.poll(transfer) is TransferState.DONE

    for remote, value in zip(remotes, (1, 2), strict=True):
        transfer = reader.read(local, index, remote, index)
        wait_until(partial(is_done, transfer))
        assert set(memory[2]) == {value}
    lane.notify(names[1], b"for the second", 0.0)
    heard: list[tuple[str, bytes]] = []

    def is_heard() -> bool:
        reader.take_notifications()
        heard.extend(namesake.take_notifications())
        return bool(heard)

    wait_until(is_heard)
    assert heard == [(reader.name, b"for the second")]
    assert source.take_notifications() == []
    for agent in (reader, namesake, source):
        agent.close()


def test_metadata_that_nixl_would_not_write_reach_no_agent():
    """Its agent's name is not found where it should be."""
    lane = Lane(MemoryAgent("lane"))
    with pytest.raises(TransferError, match=r"not as NIXL writes it .*'Agent'"):
        lane.connect(b"nixlSerDes|Agent\xff")
    lane.close()

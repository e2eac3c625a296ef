# SPDX-License-Identifier: Apache-2.0
"""One connection with another engine: what it counts, and what it gives back."""

from __future__ import annotations

import uuid
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.v1.kv_connector.unit.reshard.memory.cases import select
from tests.v1.kv_connector.unit.reshard.transport.channels import wait_until
from tests.v1.kv_connector.unit.reshard.transport.checks import Check, Reach
from tests.v1.kv_connector.unit.reshard.transport.memory_agent import MemoryAgent
from tests.v1.kv_connector.unit.reshard.transport.remotes import (
    BLOCKS,
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
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import InDoubtError, TransferError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.packing import PACK_UNIT_BYTES
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.staging import MAX_WINDOW_BYTES
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.reshard import plan_reshard
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.lifetimes import PEER_GRACE_S
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.packing import (
    PackAddress,
    PackTable,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import TransferState
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.arena import StagingArea
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.connection import PeerConnection
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.remote import lower_engine

NOW_S = 10.0


class FaultyAgent(MemoryAgent):
    """An agent whose reads go wrong as told.

    Attributes:
        fault: Raised instead of posting a read; None to post it.
        fails: Reads have failed when they are looked at.
    """

    fault: Exception | None = None
    fails = False

    def read(self, *lists):
        """Post a read, or refuse it."""
        if self.fault is not None:
            raise self.fault
        return super().read(*lists)

    def poll(self, transfer):
        """Look at a read."""
        return TransferState.FAILED if self.fails else super().poll(transfer)


@pytest.fixture
def reader() -> Reader:
    """A worker that reads over lanes that may be faulty."""
    return Reader(lambda role: FaultyAgent(memory_agent(role).name))


@pytest.fixture
def connection(reader) -> PeerConnection:
    """A connection with an engine of two workers."""
    return reader.connected(reader.make_lane(), RemoteEngineStub(2), lambda: NOW_S)


def test_workers_are_connected_one_by_one(reader):
    """After each, its legs, its table and its name are there, and no other's."""
    engine, lane = RemoteEngineStub(2), reader.make_lane()
    connection = PeerConnection(lane, reader.lowered(engine), HUNG_GRACE_S, lambda: NOW_S)
    assert lane.connections == {connection: None} and not connection.legs
    for number, agent in enumerate(engine.agents, start=1):
        assert connection.connect_next() is (number == 2)
        assert connection.releases[-1] == (agent.name, 1)
        assert len(connection.lease_tables) == len(connection.releases) == number
        assert {leg.remote.peer for leg in connection.legs} == {
            each.name for each in engine.agents[:number]
        }
    assert connection.connect_next() is True


@pytest.mark.parametrize(
    ("make_source", "make_reader"),
    [(memory_agent, memory_agent), (nixl_source, nixl_reader)],
    ids=["memory", "nixl"],
)
def test_reads_messages_and_checks(monkeypatch, make_source, make_reader):
    """What a connection is for, from each worker; its end leaves its lane as it was."""
    reader, engine = Reader(make_reader), RemoteEngineStub(2, make_source)
    lane = reader.make_lane()
    lists = open_lists(monkeypatch, lane.agent)
    connection = reader.connected(lane, engine, lambda: NOW_S)
    assert lists
    source_blocks = BLOCKS[0].block_ids
    transfers = []
    for leg in connection.legs:
        spans = (BLOCKS, BLOCKS)
        remote, local = leg.leg.indices(select(leg.leg, *spans))
        transfers.append(connection.read(leg.local, local, leg.remote, remote))
    assert connection.lifetime.in_flight == len(transfers) and not connection.is_drained
    for transfer in transfers:
        wait_until(lambda each=transfer: connection.poll(each) is TransferState.DONE)
        connection.release(transfer)
    assert connection.is_drained
    landed = reader.rank.bytes()
    for head, rank in enumerate(engine.ranks):
        wanted = rank.bytes()[:, :, source_blocks, 0]
        assert np.array_equal(landed[:, :, source_blocks, head], wanted)
    assert len(connection.lease_tables) == 2
    check = Check(connection.leases, "r", OFFER, list(connection.lease_tables.values()))
    assert not connection.is_drained
    wait_until(check.is_over)
    assert check.error is None and connection.is_drained
    connection.close()
    connection.close()
    assert not connection.is_connected and not lane.connections
    assert not lists and lane.agent.is_open
    for agent in engine.agents:
        with pytest.raises(TransferError):
            lane.notify(agent.name, b"", NOW_S)
    lane.close()
    for agent in engine.agents:
        agent.close()


def test_refused_read_is_nothing(connection):
    """NIXL had not begun with it."""
    connection.lane.agent.fault = TransferError("no")
    with pytest.raises(TransferError):
        read_block(connection)
    assert connection.is_drained


def test_read_that_had_begun_is_in_doubt(connection):
    """Only the end of its lane ends it, and its own close must not be asked for before."""
    connection.lane.agent.fault = InDoubtError("not any more")
    with pytest.raises(InDoubtError):
        read_block(connection)
    assert not connection.is_drained and not connection.lane.is_drained
    with pytest.raises(AssertionError):
        connection.close()


def test_failed_read_is_in_doubt_until_its_lane_is_closed(reader):
    """The lane is waited for as long as others of its connections may need."""
    lane = reader.make_lane()
    bad, good = (reader.connected(lane, RemoteEngineStub(), lambda: NOW_S) for _ in range(2))
    transfers = [read_block(bad), read_block(bad)]
    lane.agent.fails = True
    assert bad.poll(transfers[0]) is TransferState.FAILED
    for each in (bad, good):
        each.lifetime.retire(NOW_S)
    assert bad.close_at_s == NOW_S + PEER_GRACE_S and good.close_at_s == NOW_S
    assert bad.poll(transfers[1]) is TransferState.FAILED
    assert bad.close_at_s == NOW_S and not bad.is_drained and good.is_drained
    lane.close()
    assert bad.is_drained and not bad.is_connected and not good.is_connected


def test_checks_keep_a_connection(connection):
    """Though nothing is in flight between two looks."""
    (table, *_) = connection.lease_tables.values()
    check = Check(connection.leases, "r", OFFER, [table])
    connection.lifetime.retire(NOW_S)
    assert not connection.lifetime.in_flight and not connection.is_drained
    assert connection.close_at_s == NOW_S + HUNG_GRACE_S
    assert check.error is None


def test_workers_are_reached_by_reads(reader):
    """Of its table, or of blocks; and nothing is polled for a message after that."""
    connection = reader.connected(reader.make_lane(), RemoteEngineStub(2), lambda: NOW_S)
    tables = list(connection.lease_tables.values())
    assert connection.unreached == tables
    transfer = read_block(connection)
    wait_until(lambda: connection.poll(transfer) is TransferState.DONE)
    connection.release(transfer)
    unreached = [each for each in tables if each.buckets.peer != transfer.peer]
    assert connection.unreached == unreached and len(unreached) == 1
    reached = Reach(connection.leases, unreached)
    wait_until(reached.is_over)
    assert reached.error is None and connection.unreached == []
    assert connection.lane.sent_by_s == 0.0
    connection.notify(transfer.peer, b"done")
    assert connection.lane.sent_by_s > NOW_S


@given(st.lists(st.sampled_from(["done", "failed", "refused", "in doubt"]), max_size=12))
def test_connection_is_drained_when_nothing_writes(ends):
    """However its reads end: those that failed or are in doubt keep it until its lane is closed."""
    agent = FaultyAgent(f"lane-{uuid.uuid4()}")
    reader = Reader(lambda _: agent)
    lane = reader.make_lane()
    connection = reader.connected(lane, RemoteEngineStub(), lambda: NOW_S)
    posted = []
    for end in ends:
        faults = {"refused": TransferError("no"), "in doubt": InDoubtError("not any more")}
        agent.fault = faults.get(end)
        if agent.fault is None:
            posted.append((end, read_block(connection)))
        else:
            with pytest.raises(type(agent.fault)):
                read_block(connection)
        agent.fault = None
    assert connection.lifetime.in_flight == len(posted)
    for end, transfer in posted:
        agent.fails = end == "failed"
        if agent.fails:
            assert connection.poll(transfer) is TransferState.FAILED
            continue
        wait_until(lambda each=transfer: connection.poll(each) is TransferState.DONE)
        connection.release(transfer)
    assert connection.lifetime.in_flight == 0
    assert connection.is_drained is not ({"failed", "in doubt"} & {*ends} != set())
    lane.close()
    assert connection.is_drained and not connection.is_connected


@pytest.mark.parametrize(
    ("short_here", "short_there", "packs"), [(0, 0, True), (1, 0, False), (0, 1, False)]
)
def test_nothing_is_packed_where_an_arena_has_no_room_for_a_window(short_here, short_there, packs):
    """At either end: each window would be waited for, and then be read direct."""
    here, there = (MAX_WINDOW_BYTES - each * PACK_UNIT_BYTES for each in (short_here, short_there))
    reader, engine, table = Reader(), RemoteEngineStub(1), PackTable()
    area = StagingArea(torch.zeros(here, dtype=torch.uint8), None)
    arena = torch.zeros(there, dtype=torch.uint8)
    reader.register([area.region])
    address = PackAddress(table.words.ctypes.data, arena.data_ptr(), arena.nbytes)
    (agent,), ((rank, description),) = engine.agents, engine.descriptions.items()
    agent.register([(address.arena, there, 0), (address.table, table.words.nbytes, 0)])
    descriptions = {rank: replace(description, packing=address)}
    plan = plan_reshard(engine.shards, reader.shards)
    lowered = lower_engine(descriptions, plan, reader.local, area)
    connection = PeerConnection(reader.make_lane(), lowered, HUNG_GRACE_S, lambda: NOW_S)
    assert connection.connect_next()
    assert [each.packing is not None for each in connection.legs] == [packs] * len(connection.legs)
    assert connection.legs

# SPDX-License-Identifier: Apache-2.0
"""Engines to connect over lanes: small real ones, with agents of any kind."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.v1.kv_connector.unit.reshard.transport.memory_agent import MemoryAgent
from tests.v1.kv_connector.unit.reshard.transport.ranks import (
    NUM_LAYERS,
    Format,
    Rank,
    blocks_of,
    sequence_of,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.reshard import plan_reshard
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import (
    ParallelMesh,
    shard_model,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.description import (
    WorkerDescription,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.fingerprint import (
    OfferFingerprint,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.leases import LeaseTable
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import (
    NixlAgent,
    Prepared,
    Transfer,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.connection import PeerConnection
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.lane import Lane
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.remote import (
    LocalCache,
    LoweredEngine,
    lower_engine,
)

Agent = NixlAgent | MemoryAgent
MakeAgent = Callable[[str], Agent]

NUM_HEADS = 2
HUNG_GRACE_S = 100.0
OFFER = OfferFingerprint(48, 1, 2)
FORM = Format()
BLOCKS = blocks_of(FORM, seed=1)
SEQUENCE = sequence_of(NUM_HEADS, FORM.planes)


def memory_agent(role: str) -> MemoryAgent:
    """An agent of the tests' own."""
    return MemoryAgent(f"{role}-{uuid.uuid4()}")


def nixl_source(role: str) -> NixlAgent:
    """A real agent that is read from."""
    return NixlAgent(f"{role}-{uuid.uuid4()}", num_threads=0, progress_delay_us=100)


def nixl_reader(role: str, backend: str = "UCX") -> NixlAgent:
    """A real agent that reads."""
    return NixlAgent(f"{role}-{uuid.uuid4()}", backends=[backend], num_threads=0, polled=True)


class RemoteEngineStub:
    """An engine that is read from: its workers' caches are filled, and it holds one request, "r".

    Args:
        tp_size: How many workers it has.
        make_agent: Makes their agents.
        name: Their agents' name, where they are to bear another engine's.
    """

    def __init__(
        self, tp_size: int = 1, make_agent: MakeAgent = memory_agent, name: str | None = None
    ) -> None:
        self.shards = shard_model(ParallelMesh(1, tp_size), NUM_LAYERS, NUM_HEADS)
        self.agents: list[Agent] = []
        self.ranks: list[Rank] = []
        self.tables: list[LeaseTable] = []
        self.descriptions = {}
        for shard in self.shards:
            agent = make_agent("source") if name is None else MemoryAgent(name)
            rank, table = Rank(shard, FORM, agent), LeaseTable(16)
            rank.fill(SEQUENCE, BLOCKS)
            address = table.address
            agent.register([(address.address, address.size_bytes, 0)], "DRAM")
            assert table.add("r")
            table.publish("r", OFFER)
            self.agents.append(agent)
            self.ranks.append(rank)
            self.tables.append(table)
            self.descriptions[shard.rank] = WorkerDescription(
                "engine", shard, rank.cache, address, agent.metadata()
            )


class Reader:
    """A worker that reads: one rank with all layers and heads, and lanes over its cache.

    Args:
        make_agent: Makes the lanes' agents.
    """

    def __init__(self, make_agent: MakeAgent = memory_agent) -> None:
        (shard,) = self.shards = shard_model(ParallelMesh(1, 1), NUM_LAYERS, NUM_HEADS)
        self._make_agent = make_agent
        self.regions: list[tuple[int, int, int]] = []
        # Registered with every lane, and with no agent here.
        self.rank = Rank(shard, FORM, self)
        self.local = LocalCache(shard.rank, self.rank.cache, frozenset())

    def register(self, regions: list[tuple[int, int, int]]) -> None:
        """Note what every lane registers."""
        self.regions += regions

    def make_lane(self) -> Lane:
        """A lane with the cache registered."""
        agent = self._make_agent("lane")
        agent.register(self.regions)
        return Lane(agent)

    def lowered(self, engine: RemoteEngineStub) -> LoweredEngine:
        """What is read from an engine."""
        return lower_engine(
            engine.descriptions, plan_reshard(engine.shards, self.shards), self.local
        )

    def connected(
        self, lane: Lane, engine: RemoteEngineStub, clock: Callable[[], float] = lambda: 0.0
    ) -> PeerConnection:
        """A connection with all workers of an engine."""
        connection = PeerConnection(lane, self.lowered(engine), HUNG_GRACE_S, clock)
        while not connection.connect_next():
            pass
        return connection


def open_lists(monkeypatch: pytest.MonkeyPatch, agent: Agent) -> set[Prepared]:
    """The lists that an agent prepares from now on, as long as they are not given back."""
    prepare, release = agent.prepare, agent.release_prepared
    lists: set[Prepared] = set()

    def prepare_one(*arguments: Any) -> Prepared:
        prepared = prepare(*arguments)
        lists.add(prepared)
        return prepared

    def release_one(prepared: Prepared) -> None:
        release(prepared)
        lists.remove(prepared)

    monkeypatch.setattr(agent, "prepare", prepare_one)
    monkeypatch.setattr(agent, "release_prepared", release_one)
    return lists


def read_block(
    connection: PeerConnection, source_block: int | None = None, block: int = 0
) -> Transfer:
    """Post a read of one block of the first leg; by default the first that holds something."""
    source = int(BLOCKS[0].block_ids[0]) if source_block is None else source_block
    leg = connection.legs[0]
    indices = [np.array([each], dtype=np.int32) for each in (block, source)]
    return connection.read(leg.local, indices[0], leg.remote, indices[1])

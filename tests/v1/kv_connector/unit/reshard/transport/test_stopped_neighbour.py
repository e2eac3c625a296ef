# SPDX-License-Identifier: Apache-2.0
"""Two sources that share a lane, over real NIXL: one is stopped while it is read from.

Sources are processes of their own, and talk over TCP: a stopped one answers nothing, and what it
was asked for lands when it goes on, unless the agent that asked has ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.v1.kv_connector.unit.reshard.transport.channels import wait_until
from tests.v1.kv_connector.unit.reshard.transport.remotes import nixl_reader
from tests.v1.kv_connector.unit.reshard.transport.source_process import (
    BYTES,
    COUNT,
    Source,
    serving_sources,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import MeshRank
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.lifetimes import PEER_GRACE_S
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import (
    Prepared,
    Transfer,
    TransferState,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.connection import PeerConnection
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.lane import Lane
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.remote import LoweredEngine

HUNG_GRACE_S = 100.0
TLS = "tcp,self"
OWNER = 0xEE
SETTLED_S = 3.0
"""Longer than all of it takes to land: 64 MiB over loopback take less than 0.2 s."""


@pytest.fixture
def sources(backend, monkeypatch) -> Iterator[list[Source]]:
    """Two of them, whose bytes are 1 and 2."""
    monkeypatch.setenv("UCX_TLS", TLS)
    with serving_sources(backend, TLS, 1, 2) as started:
        yield started


class Worker:
    """A worker that reads from both sources over one lane.

    Attributes:
        memory: What it reads into; shape (sources, descriptors, bytes).
        now_s: Its clock.
    """

    def __init__(self, sources: list[Source], backend: str) -> None:
        self.memory = np.full((len(sources), COUNT, BYTES), OWNER, np.uint8)
        self.now_s = 10.0
        agent = nixl_reader("lane", backend)
        agent.register([(self.memory.ctypes.data, self.memory.nbytes, 0)])
        self.lane = Lane(agent)
        nothing = LoweredEngine(1, MeshRank(0, 0), "", [], None)
        self.connections: list[PeerConnection] = []
        self._lists: list[tuple[Prepared, Prepared]] = []
        for source, own in zip(sources, self.memory, strict=True):
            connection = PeerConnection(self.lane, nothing, HUNG_GRACE_S, lambda: self.now_s)
            name = self.lane.connect(source.metadata)
            self.connections.append(connection)
            rows = (
                np.array([[address, BYTES, 0, BYTES, COUNT]], dtype=np.uint64)
                for address in (own.ctypes.data, source.address)
            )
            self._lists.append((agent.prepare(next(rows)), agent.prepare(next(rows), name)))

    def read(self, number: int) -> Transfer:
        """Post a read of all that a source has, as part of a request."""
        local, remote = self._lists[number]
        indices = np.arange(COUNT, dtype=np.int32)
        return self.connections[number].read(local, indices, remote, indices)

    def finish(self, number: int, transfer: Transfer) -> None:
        """A read from a source is done."""
        connection = self.connections[number]
        wait_until(lambda: connection.poll(transfer) is TransferState.DONE)
        connection.release(transfer)

    def has(self, number: int, value: int) -> bool:
        """Whether all that is read from a source is of one value."""
        return bool((self.memory[number] == value).all())

    def retire(self) -> None:
        """As a table does it when one of the peers has broken."""
        self.lane.retired_at_s = self.now_s
        for each in self.connections:
            each.lifetime.retire(self.now_s)


@pytest.fixture
def worker(sources, backend) -> Iterator[Worker]:
    """One that has read from both before, so that they are connected."""
    made = Worker(sources, backend)
    for number in range(2):
        made.finish(number, made.read(number))
    made.memory[:] = OWNER
    yield made
    made.lane.close()


def settle(worker: Worker, sources: list[Source]) -> None:
    """The stopped source goes on, and whatever may land has."""
    sources[0].go_on()
    until_s = time.monotonic() + SETTLED_S
    wait_until(lambda: time.monotonic() > until_s)


def test_neighbour_reads_on_and_nothing_lands_once_the_lane_is_closed(worker, sources):
    """One is stopped with reads in flight; the other's are complete before the lane ends."""
    sources[0].stop()
    hung = worker.read(0)
    first = worker.read(1)
    worker.connections[1].lifetime.begin_request()
    worker.retire()
    assert worker.lane.close_at_s() == worker.now_s + HUNG_GRACE_S
    # What its request had queued is posted over the retired lane.
    worker.finish(1, first)
    assert worker.has(1, 2)
    worker.memory[1] = OWNER
    worker.finish(1, worker.read(1))
    assert worker.has(1, 2)
    worker.connections[1].lifetime.end_request()
    assert worker.connections[1].is_drained and not worker.lane.is_drained
    assert worker.connections[0].poll(hung) is TransferState.IN_FLIGHT
    # However long it is hung: then it is forced, as where too much is in doubt.
    worker.now_s += PEER_GRACE_S
    worker.lane.force()
    assert worker.lane.close_at_s() < worker.now_s
    worker.lane.close()
    assert worker.lane.is_drained and not any(each.is_connected for each in worker.connections)
    worker.memory[:] = OWNER
    settle(worker, sources)
    assert worker.has(0, OWNER) and worker.has(1, OWNER)


def test_bytes_of_a_stopped_source_land_while_the_lane_is_open(worker, sources):
    """What the test above would see, were a retired lane taken for a closed one."""
    sources[0].stop()
    hung = worker.read(0)
    worker.finish(1, worker.read(1))
    worker.retire()
    assert worker.has(0, OWNER) and not worker.lane.is_drained
    sources[0].go_on()
    worker.finish(0, hung)
    assert worker.has(0, 1) and worker.has(1, 2) and worker.lane.is_drained
    assert worker.lane.close_at_s() == worker.now_s


def test_neighbour_that_is_closed_leaves_a_read_of_another(worker, sources):
    """Its end does not end its lane: the other's bytes still come, and only there."""
    sources[0].stop()
    hung = worker.read(0)
    worker.connections[1].close()
    assert worker.lane.agent.is_open and not worker.connections[0].is_drained
    sources[0].go_on()
    worker.finish(0, hung)
    assert worker.has(0, 1) and worker.has(1, OWNER)


def test_dead_source_fails_its_own_reads_alone(worker, sources):
    """The other one's are done, before and after; the lane needs no longer than that."""
    sources[0].stop()
    lost = worker.read(0)
    sources[0].kill()
    kept = worker.read(1)
    wait_until(lambda: worker.connections[0].poll(lost) is TransferState.FAILED)
    worker.retire()
    worker.finish(1, kept)
    worker.finish(1, worker.read(1))
    assert worker.has(1, 2) and worker.connections[1].is_drained
    assert not worker.connections[0].is_drained and not worker.lane.is_drained
    assert worker.lane.close_at_s() == worker.now_s

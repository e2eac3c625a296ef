# SPDX-License-Identifier: Apache-2.0
"""Legs that fail among several, with whole workers over an agent that the tests command."""

from __future__ import annotations

import pytest

from tests.v1.kv_connector.unit.reshard.engine.test_worker import (
    Engine,
    Progress,
    assert_received,
    engines,
    every_strategy,
    fill,
    lost_blocks,
    receive,
)
from tests.v1.kv_connector.unit.reshard.transport.memory_agent import MemoryAgent
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine import worker as worker_module
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import TransferError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.mesh import MeshRank
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import TransferState

__all__ = ["engines"]

SRC, DST = [5, 2, 9], [3, 4, 1]


class CommandedAgent(MemoryAgent):
    """An agent whose reads end as told, by the peer that they read from.

    Attributes:
        refused: Peers from which no read can be posted.
        held_up: Peers from which reads stay in flight.
        failing: Peers from which reads fail.
    """

    def __init__(self, name: str, **options: object) -> None:
        super().__init__(name, **options)
        self.refused: set[str] = set()
        self.held_up: set[str] = set()
        self.failing: set[str] = set()

    def read(self, local, local_indices, remote, remote_indices):
        """Post a read, or refuse to."""
        if remote.peer in self.refused:
            raise TransferError(f"cannot read from {remote.peer}")
        return super().read(local, local_indices, remote, remote_indices)

    def poll(self, transfer):
        """Look at a posted read."""
        if transfer.peer in self.failing:
            return TransferState.FAILED
        if transfer.peer in self.held_up:
            return TransferState.IN_FLIGHT
        return super().poll(transfer)


@pytest.fixture
def prefill_and_decode(engines, monkeypatch) -> tuple[Engine, Engine]:
    """Two prefill workers, of which the one decode worker reads."""
    monkeypatch.setattr(worker_module, "NixlAgent", CommandedAgent)
    return engines("prefill", tp=2), engines("decode")


def commanded(engine: Engine, tp_rank: int) -> CommandedAgent:
    """The agent of a worker."""
    return engine.workers[MeshRank(0, tp_rank)]._agent


@every_strategy
def test_agent_of_the_tests_moves_the_bytes(prefill_and_decode):
    """Without a command the request arrives whole, and its holder is told."""
    p, d = prefill_and_decode
    address = p.serve()
    whole = fill(p, SRC)
    p.offer("p-a")
    d.start(receive={"d-a": receive(address, DST, SRC)})
    progress = Progress(p, d)
    progress.until(d, received="d-a")
    progress.until(p, sent="p-a")
    assert_received(d, DST, whole)


@pytest.mark.parametrize("fault", ["failing", "refused"])
def test_request_ends_only_after_its_last_leg(prefill_and_decode, fault):
    """While a leg is in flight its blocks are nobody else's, whatever became of the others."""
    p, d = prefill_and_decode
    address = p.serve()
    fill(p, SRC)
    p.offer("p-a")
    reader, good, bad = commanded(d, 0), commanded(p, 0).name, commanded(p, 1).name
    reader.held_up.add(good)
    getattr(reader, fault).add(bad)
    d.start(receive={"d-a": receive(address, DST, SRC)})
    progress, worker = Progress(p, d), d.workers[MeshRank(0, 0)]
    while not worker._reading or len(worker._transfers) > 1:
        progress.step()
    for _ in range(20):
        progress.step()
    assert not any(progress.received.values())
    assert worker.take_failed() == {}

    reader.held_up.clear()
    progress.until(d, received="d-a")
    assert lost_blocks(worker) == set(DST)
    progress.until(p, sent="p-a")


@every_strategy
def test_failed_request_leaves_another_of_the_same_engine_alone(prefill_and_decode):
    """What was read before the fault is received; what is read after it, over a new connection."""
    p, d = prefill_and_decode
    address = p.serve()
    whole = fill(p, SRC)
    p.offer("p-a", "p-b", "p-c")
    reader, bad = commanded(d, 0), commanded(p, 1).name
    progress, worker = Progress(p, d), d.workers[MeshRank(0, 0)]
    d.start(receive={"before": receive(address, DST, SRC)})
    progress.until(d, received="before")
    reader.failing.add(bad)
    d.start(receive={"during": receive(address, [6, 7, 8], SRC, remote_request_id="p-b")})
    progress.until(d, received="during")
    assert lost_blocks(worker) == {6, 7, 8}
    reader.failing.clear()
    d.start(receive={"after": receive(address, [10, 11, 12], SRC, remote_request_id="p-c")})
    progress.until(d, received="after")
    assert worker.take_failed() == {}
    assert (d.blocks(MeshRank(0, 0), "layers.0", [10, 11, 12]) == whole[0]).all()

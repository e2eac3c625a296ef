# SPDX-License-Identifier: Apache-2.0
"""Legs that fail among several, with whole workers over an agent that the tests command."""

from __future__ import annotations

from typing import ClassVar

import pytest

from tests.v1.kv_connector.unit.reshard.engine.workers import (
    Engine,
    Progress,
    assert_received,
    every_strategy,
    failures,
    fill,
    lost_blocks,
    receive,
    stats_with,
    wait_until,
)
from tests.v1.kv_connector.unit.reshard.transport.memory_agent import MemoryAgent
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine import worker as worker_module
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.compat import (
    FAILED_READS_ARE_NAMED,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.reading import endings
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import InDoubtError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import MeshRank
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.lifetimes import PEER_GRACE_S
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import TransferState
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.connection import PeerConnection

SRC, DST = [5, 2, 9], [3, 4, 1]


class CommandedAgent(MemoryAgent):
    """An agent whose reads end as told, by the peer that they read from, whichever agent reads.

    Attributes:
        refused: Peers from which no read can be posted.
        held_up: Peers from which reads stay in flight.
        failing: Peers from which reads fail.
    """

    refused: ClassVar[set[str]] = set()
    held_up: ClassVar[set[str]] = set()
    failing: ClassVar[set[str]] = set()

    def read(self, local, local_indices, remote, remote_indices):
        """Post a read, or refuse to."""
        if remote.peer in self.refused:
            raise InDoubtError(f"cannot read from {remote.peer}")
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
    for commands in (CommandedAgent.refused, CommandedAgent.held_up, CommandedAgent.failing):
        commands.clear()
    return engines("prefill", tp=2), engines("decode")


def name_of(engine: Engine, tp_rank: int) -> str:
    """What others read a worker's blocks from."""
    return engine.transfer_engines[MeshRank(0, tp_rank)].agent.name


def posted(engine: Engine, progress: Progress, count: int = 1) -> PeerConnection:
    """Step until so many requests read from a peer that holds one of them up."""
    transfers = engine.transfer_engines[MeshRank(0, 0)].transfers
    wait_until(lambda: len(transfers) == count, progress.step)
    (connection,) = engine.connections
    return connection


@every_strategy
def test_agent_of_the_tests_moves_the_bytes(prefill_and_decode):
    """Without a command the request arrives whole, and its producer is told."""
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
def test_request_fails_at_once_and_ends_after_its_last_leg(prefill_and_decode, fault):
    """While a leg is in flight its blocks are nobody else's, whatever became of the others."""
    p, d = prefill_and_decode
    address = p.serve()
    fill(p, SRC)
    p.offer("p-a")
    CommandedAgent.held_up.add(name_of(p, 0))
    getattr(CommandedAgent, fault).add(name_of(p, 1))
    d.start(receive={"d-a": receive(address, DST, SRC)})
    progress, worker = Progress(p, d), d.workers[MeshRank(0, 0)]
    assert failures(worker, progress) == {"d-a": frozenset(DST)}
    in_doubt = worker.report.take_stats().data["blocks_in_doubt"]
    # Elsewhere the scheduler counts them, for all workers.
    assert in_doubt == ([] if FAILED_READS_ARE_NAMED else [len(DST)])
    for _ in range(20):
        progress.step()
    assert not any(progress.received.values())

    CommandedAgent.held_up.clear()
    # What frees its blocks is sent once both can be read from.
    getattr(CommandedAgent, fault).clear()
    progress.until(d, received="d-a")
    assert worker.report.take_failed() == {}
    progress.until(p, sent="p-a")


def test_request_whose_reads_do_not_end_fails_in_time(engines, prefill_and_decode, caplog_vllm):
    """Its blocks stay its own; another request is served meanwhile; a late end gives them back."""
    now_s = 1000.0
    p, _ = prefill_and_decode
    d = engines("patient", kv_read_timeout_s=120, clock=lambda: now_s)
    address = p.serve()
    whole = fill(p, SRC)
    p.offer("p-a", "p-b")
    CommandedAgent.held_up.add(name_of(p, 1))
    d.start(receive={"d-a": receive(address, DST, SRC)})
    progress, worker = Progress(p, d), d.workers[MeshRank(0, 0)]
    hung = posted(d, progress)
    now_s += 119.0
    for _ in range(3):
        progress.step()
    assert not worker.report.take_failed()
    now_s += 1.0
    failures(worker, progress)
    assert "waited 120 s for 1 reads from prefill at 127.0.0.1:" in caplog_vllm.text
    assert not any(progress.received.values())
    CommandedAgent.held_up.clear()
    other = receive(address, [6, 7, 8], SRC, remote_request_id="p-b")
    d.start(receive={"d-b": other})
    progress.until(d, received="d-b")
    assert (d.blocks(MeshRank(0, 0), "layers.0", [6, 7, 8]) == whole[0]).all()
    progress.until(d, received="d-a")
    # What its producer was told has left by then.
    now_s += 1.0
    wait_until(lambda: not hung.is_connected, progress.step)


def test_hung_connection_is_cut_in_the_end(engines, prefill_and_decode, monkeypatch):
    """After a grace nobody hopes for its reads any more: blocks come back when it has ended."""
    monkeypatch.setattr(endings, "FAILED_READS_ARE_NAMED", False)
    now_s = 1000.0
    p, _ = prefill_and_decode
    d = engines("patient", kv_read_timeout_s=10, kv_hung_peer_timeout_s=60, clock=lambda: now_s)
    address = p.serve()
    fill(p, SRC)
    p.offer("p-a")
    CommandedAgent.held_up.add(name_of(p, 1))
    d.start(receive={"d-a": receive(address, DST, SRC)})
    progress, worker = Progress(p, d), d.workers[MeshRank(0, 0)]
    hung = posted(d, progress)
    now_s += 10.0
    failures(worker, progress)
    now_s += 59.0
    for _ in range(3):
        progress.step()
    assert hung.is_connected and not any(progress.received.values())
    now_s += 1.0
    progress.until(d, received="d-a")
    assert not hung.is_connected
    doubt: list[float] = []
    while not doubt or doubt[-1]:
        doubt += stats_with(worker, "blocks_in_doubt", progress).data["blocks_in_doubt"]
    assert doubt == [len(DST), 0]


def held_up_reads(p, engines, clock):
    """An engine with two reads of more than a quarter of its blocks, which a peer holds up."""
    d = engines("patient", kv_read_timeout_s=10, clock=clock)
    address = p.serve()
    fill(p, SRC)
    p.offer("p-a", "p-b")
    CommandedAgent.held_up.add(name_of(p, 1))
    both = {
        "d-a": receive(address, DST, SRC),
        "d-b": receive(address, [6, 7, 8], SRC, remote_request_id="p-b"),
    }
    d.start(receive=both)
    progress = Progress(p, d)
    posted(d, progress, 2)
    return d, progress, both


def test_too_much_in_doubt_cuts_the_oldest_connection(prefill_and_decode, engines, caplog_vllm):
    """More than a quarter of the blocks: nobody waits for hung peers then."""
    now_s = 1000.0
    d, progress, both = held_up_reads(prefill_and_decode[0], engines, lambda: now_s)
    worker = d.workers[MeshRank(0, 0)]
    now_s += 10.0
    assert failures(worker, progress, len(both)).keys() == both.keys()
    now_s += PEER_GRACE_S
    for request_id in both:
        progress.until(d, received=request_id)
    assert "Cutting a connection whose reads do not end: 6 blocks" in caplog_vllm.text
    assert "was retired 10.0 s ago, with 2 reads under way" in caplog_vllm.text


def test_peer_that_is_only_slow_is_not_cut_off(prefill_and_decode, engines, caplog_vllm):
    """However much is in doubt, it has a moment to come back: UCX would end it over TCP."""
    now_s = 1000.0
    d, progress, both = held_up_reads(prefill_and_decode[0], engines, lambda: now_s)
    worker = d.workers[MeshRank(0, 0)]
    now_s += 10.0
    failures(worker, progress, len(both))
    now_s += PEER_GRACE_S - 0.1
    for _ in range(3):
        progress.step()
    (slow,) = d.transfer_engines[MeshRank(0, 0)].peers.retired
    assert slow.is_connected
    CommandedAgent.held_up.clear()
    for request_id in both:
        progress.until(d, received=request_id)
    assert "Cutting a connection" not in caplog_vllm.text


@every_strategy
def test_failed_request_leaves_another_of_the_same_engine_alone(prefill_and_decode):
    """What was read before the fault is received; what is read after it, over a new connection."""
    p, d = prefill_and_decode
    address = p.serve()
    whole = fill(p, SRC)
    p.offer("p-a", "p-b", "p-c")
    bad = name_of(p, 1)
    progress, worker = Progress(p, d), d.workers[MeshRank(0, 0)]
    d.start(receive={"before": receive(address, DST, SRC)})
    progress.until(d, received="before")
    CommandedAgent.failing.add(bad)
    d.start(receive={"during": receive(address, [6, 7, 8], SRC, remote_request_id="p-b")})
    progress.until(d, received="during")
    assert lost_blocks(worker) == {6, 7, 8}
    CommandedAgent.failing.clear()
    d.start(receive={"after": receive(address, [10, 11, 12], SRC, remote_request_id="p-c")})
    progress.until(d, received="after")
    assert worker.report.take_failed() == {}
    assert (d.blocks(MeshRank(0, 0), "layers.0", [10, 11, 12]) == whole[0]).all()

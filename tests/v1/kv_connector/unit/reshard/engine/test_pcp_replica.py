# SPDX-License-Identifier: Apache-2.0
"""Producers with prefill context parallelism: who says what, and when blocks are free.

vLLM's scheduler and aggregator, and workers over real NIXL; replicas have nothing of it.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from vllm.config import KVTransferConfig
from vllm.v1.engine import FinishReason

from tests.v1.kv_connector.unit.reshard.engine.workers import OFFER, assert_received, fill
from tests.v1.kv_connector.unit.reshard.serving import Whole, until
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine import (
    pcp_replica as pcp_replica_module,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.metadata import (
    Offer,
    ReshardConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.pcp_replica import (
    PcpReplicaWorker,
    is_pcp_replica,
    refuse_pcp_consumers,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.settings import read_settings
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import LocalLayoutError


def sizes(pcp: int, dcp: int = 1) -> SimpleNamespace:
    """As much of a `ParallelConfig` as is looked at."""
    return SimpleNamespace(prefill_context_parallel_size=pcp, decode_context_parallel_size=dcp)


def sent_by(worker: PcpReplicaWorker, **metadata) -> set[str]:
    """What it reports in a step."""
    worker.submit(ReshardConnectorMetadata(**metadata))
    sent, received = worker.collect().take_finished()
    assert not received
    return sent


def offered(*request_ids: str) -> dict:
    """What a step says of offers."""
    return dict(offered=dict.fromkeys(request_ids, Offer(OFFER, 30.0)))


@pytest.mark.parametrize(
    ("pcp", "dcp", "pcp_rank", "expected"),
    [(1, 1, 0, False), (2, 1, 0, False), (2, 1, 1, True), (2, 2, 1, False), (1, 2, 0, False)],
)
def test_ranks_behind_the_first_are_replicas(monkeypatch, pcp, dcp, pcp_rank, expected):
    """Unless they hold other tokens each."""
    group = SimpleNamespace(rank_in_group=pcp_rank)
    monkeypatch.setattr(pcp_replica_module, "get_pcp_group", lambda: group)
    assert is_pcp_replica(sizes(pcp, dcp)) is expected


def test_offers_are_reported_at_once_and_once():
    """With the step that says so; no later one repeats it, and a name may be used again."""
    worker = PcpReplicaWorker()
    assert worker.handshake is None
    assert sent_by(worker, admitted={"a", "b"}) == set()
    assert sent_by(worker, **offered("a")) == {"a"}
    assert sent_by(worker) == set()
    assert sent_by(worker, admitted={"a"}, **offered("a", "b")) == {"a", "b"}
    assert sent_by(worker) == set()


def test_what_the_serving_rank_does_not_hold_is_not_reported():
    """It would never report it either, and one of two would be counted for good."""
    worker = PcpReplicaWorker()
    assert sent_by(worker, admitted={"a"}) == set()
    assert sent_by(worker, withdrawn={"a"}) == set()
    assert sent_by(worker, **offered("a", "b")) == set()
    # A name that is used again in the step that gives it up.
    assert sent_by(worker, admitted={"a"}) == set()
    assert sent_by(worker, withdrawn={"a"}, admitted={"a"}, **offered("a")) == {"a"}


def counts(p: Whole) -> dict[str, int]:
    """The requests that some workers have reported as sent, and how many have not."""
    return p.aggregator._send_remaining_count


@pytest.mark.parametrize(
    ("prefill", "decode"), [(dict(), dict()), (dict(pp=2), dict(tp=2))], ids=["PCP3", "PCP3 x PP2"]
)
def test_blocks_are_held_until_they_were_read(wholes, prefill, decode):
    """Replicas have said so long before; then they are free, and nothing is left to count."""
    p, d = wholes("prefill", dict(mla=True, **prefill), num_replicas=2), None
    p.serving.add("p-a", {"do_remote_decode": True})
    for _ in range(4):
        p.step()
    assert counts(p) == {"p-a": len(p.engine.workers)}
    assert p.serving.num_used_blocks() == 3
    params = p.serving.handed_over["p-a"]
    whole = fill(p.engine, params["remote_block_ids"][0])
    d = wholes("decode", dict(mla=True, **decode))
    d.serving.add("d-a", params, max_tokens=2)
    assert d.step() == {}
    ((dst_blocks,),) = [receive.local_block_ids for receive in d.serving.told.receive.values()]
    until(p.serving.is_through, p, d)
    assert_received(d.engine, dst_blocks, whole)
    until(d.serving.is_through, p, d)
    assert d.serving.finished == {"d-a": FinishReason.LENGTH}
    assert not counts(p)


def test_lease_that_runs_out_frees_the_blocks_once(wholes, caplog_vllm):
    """At the rank that serves; the name may be used again, and is counted anew."""
    ahead_s = 0.0

    def is_freed() -> bool:
        # The lease runs from when the connector's thread has heard of the offer, which no step
        # waits for.
        nonlocal ahead_s
        ahead_s += 31.0
        return p.serving.is_through()

    p = wholes("prefill", dict(clock=lambda: time.monotonic() + ahead_s), num_replicas=1)
    for _ in range(2):
        p.serving.add("p-a", {"do_remote_decode": True})
        for _ in range(4):
            p.step()
        assert counts(p) == {"p-a": 1}
        until(is_freed, p)
        assert not counts(p)
    assert caplog_vllm.text.count("its lease ran out") == 2


def test_aborted_prefill_is_reported_by_nobody(wholes):
    """Its blocks are free at once, and no worker says that they were sent."""
    p = wholes("prefill", dict(), num_replicas=1)
    p.serving.add("p-a", {"do_remote_decode": True}, max_tokens=8)
    p.step()
    p.serving.abort("p-a")
    assert p.serving.is_through()
    for _ in range(4):
        p.step()
    assert not counts(p)


@pytest.mark.parametrize(
    ("role", "options", "remedy"),
    [
        ("kv_consumer", {}, "kv_role kv_consumer.*set kv_role to kv_producer"),
        ("kv_both", {}, "kv_role kv_both.*set kv_role to kv_producer"),
        ("kv_producer", {"bidirectional_kv_xfer": True}, "leave that option out"),
    ],
)
def test_readers_are_refused(role, options, remedy):
    """In one line, before anything is made; without such ranks nothing is."""
    transfer_config = KVTransferConfig(
        kv_connector="NixlConnector", kv_role=role, kv_connector_extra_config=options
    )
    settings = read_settings(transfer_config)
    refuse_pcp_consumers(sizes(1), transfer_config, settings)
    with pytest.raises(LocalLayoutError, match=f"^--prefill-context-parallel-size 2 .*{remedy}"):
        refuse_pcp_consumers(sizes(2), transfer_config, settings)


def test_producers_are_not_refused():
    """They are what vLLM has it for."""
    transfer_config = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_producer")
    refuse_pcp_consumers(sizes(2), transfer_config, read_settings(transfer_config))

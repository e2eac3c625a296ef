# SPDX-License-Identifier: Apache-2.0
"""What upstream's connector does for attention models: cache formats, roles and fleets.

Whole workers over real NIXL, as in `test_worker`; docs/parity.md lists what is tested elsewhere.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (
    NixlConnector as UpstreamConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker import NixlConnectorWorker

from tests.v1.kv_connector.unit.reshard import forms
from tests.v1.kv_connector.unit.reshard.engine.workers import (
    Engine,
    Progress,
    assert_received,
    every_strategy,
    fill,
    lost_blocks,
    receive,
    stats_with,
)
from tests.v1.kv_connector.unit.reshard.transport.channels import DEADLINE_S, free_port
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.connector import NixlConnector
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.compat import (
    UPSTREAM_COUNTS_ALL_FAILURES,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.stats import (
    ReadFailure,
    ReshardStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import MeshRank
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    RemoteEngineAddress,
)

FP8 = dict(dtype=torch.uint8, cache_dtype="fp8")

FORMATS = {
    "fp8": (dict(**FP8, tp=2), dict(**FP8)),
    "fp8, blocks three times as large": (dict(**FP8), dict(**FP8, tp=2, block_tokens=48)),
    "HND to NHD": (dict(), dict(token_major=True)),
    "HND to NHD with half of the heads": (dict(), dict(token_major=True, tp=2)),
    "NHD to HND with half of the heads": (dict(token_major=True, tp=2), dict()),
    "NHD to HND, fp8": (dict(**FP8, token_major=True), dict(**FP8, tp=2)),
    "NHD on both sides": (dict(token_major=True, tp=2), dict(token_major=True)),
    "all layers in one tensor": (dict(cross_layers=True), dict(cross_layers=True)),
    "all layers in one tensor, other heads": (
        dict(cross_layers=True, tp=2, heads=4),
        dict(cross_layers=True, heads=4),
    ),
    "all layers in one tensor, two stages": (dict(cross_layers=True, pp=2), dict(tp=2)),
    "into one tensor of all layers": (dict(pp=2), dict(cross_layers=True, tp=2)),
}


@pytest.mark.parametrize(("prefill", "decode"), FORMATS.values(), ids=FORMATS.keys())
@every_strategy
def test_cache_formats(engines, prefill, decode):
    """Whatever the cache looks like on either side, every byte arrives where it belongs."""
    assert_every_byte_arrives(engines, prefill, decode)


def assert_every_byte_arrives(engines, prefill, decode) -> None:
    """Read a sequence, and compare it."""
    p, d = engines("prefill", **prefill), engines("decode", **decode)
    address = p.serve()
    whole = fill(p, [5, 2, 9])
    p.offer("p-a")
    local = [3, 4, 1][: 48 // d.block_tokens]
    d.start(receive={"d-a": receive(address, local, [5, 2, 9])})
    progress = Progress(p, d)
    progress.until(d, received="d-a")
    progress.until(p, sent="p-a")
    assert_received(d, local, whole)
    for worker in d.workers.values():
        assert worker.report.take_failed() == {}


APART = dict(shaped_by_backends=True)


@pytest.mark.skipif(forms.SHAPED_BY_BACKENDS, reason="caches of later bases cannot be made here")
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (dict(**APART, pp=2), dict(tp=2)),
        (dict(tp=2), dict(**APART, pp=2)),
        (dict(**APART, token_major=True), dict(block_tokens=48)),
        (dict(token_major=True, tp=2), APART),
        (dict(**APART, **FP8), dict(**FP8, tp=2)),
    ],
    ids=["from", "to", "from NHD", "NHD to", "fp8 from"],
)
@every_strategy
def test_caches_of_0_22_are_read_and_filled(engines, prefill, decode):
    """Keys and values are two planes there, and lie side by side here."""
    assert_every_byte_arrives(engines, prefill, decode)


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (dict(block_tokens=8, blocks_per_id=2), dict(block_tokens=16)),
        (dict(block_tokens=16), dict(block_tokens=8, blocks_per_id=2)),
        (dict(block_tokens=8, blocks_per_id=2), dict(block_tokens=4, blocks_per_id=4)),
        (dict(block_tokens=8, blocks_per_id=2), dict(block_tokens=16, blocks_per_id=3)),
    ],
    ids=["at the source", "at the destination", "on both sides", "and larger blocks"],
)
@every_strategy
def test_blocks_of_the_kernel_are_smaller_than_the_schedulers(engines, src, dst):
    """A block id stands for several blocks of the cache, and all of them are read."""
    p, d = engines("prefill", tp=2, **src), engines("decode", **dst)
    address = p.serve()
    whole = fill(p, in_kernel_blocks([5, 2, 9], p, 16))
    p.offer("p-a")
    tokens_per_id = dst["block_tokens"] * dst.get("blocks_per_id", 1)
    local = [3, 4, 1][: 48 // tokens_per_id]
    d.start(receive={"d-a": receive(address, local, [5, 2, 9])})
    Progress(p, d).until(d, received="d-a")
    assert_received(d, in_kernel_blocks(local, d, tokens_per_id), whole)


def in_kernel_blocks(ids, engine: Engine, tokens_per_id: int) -> list[int]:
    """The blocks of the cache that some block ids stand for."""
    blocks_per_id = tokens_per_id // engine.block_tokens
    return [id_ * blocks_per_id + block for id_ in ids for block in range(blocks_per_id)]


def test_fp8_and_another_format_do_not_meet(engines, caplog_vllm):
    """Caches of one slot size that mean other numbers are refused at the handshake."""
    p = engines("prefill", **FP8)
    d = engines("decode", dtype=torch.uint8, cache_dtype="fp8_e5m2")
    address = p.serve()
    p.offer("p-a")
    d.start(receive={"d-a": receive(address, [3], [5], tokens=16)})
    Progress(d).until(d, received="d-a")
    assert "kv_cache_dtype is fp8 there and fp8_e5m2 here" in caplog_vllm.text
    assert lost_blocks(d.workers[MeshRank(0, 0)]) == {3}


def test_refusal_can_be_switched_off(engines):
    """With enforce_handshake_compat off, an engine takes what another one calls by other names."""
    p = engines("prefill", **FP8)
    d = engines("decode", dtype=torch.uint8, cache_dtype="fp8_e4m3", enforce_handshake_compat=False)
    address = p.serve()
    whole = fill(p, [5])
    p.offer("p-a")
    d.start(receive={"d-a": receive(address, [3], [5], tokens=16)})
    Progress(p, d).until(d, received="d-a")
    assert_received(d, [3], whole)


@every_strategy
def test_engines_read_from_each_other(engines):
    """Two engines hold blocks and read them in turn, in both directions at once."""
    one, other = engines("one", tp=2), engines("other", pp=2)
    progress = Progress(one, other)
    addresses = {engine.engine_id: engine.serve() for engine in (one, other)}
    wholes = {
        engine.engine_id: fill(engine, [5, 2, 9], seed=seed)
        for seed, engine in enumerate((one, other))
    }
    for turn in range(2):
        name = f"turn {turn}"
        for engine in (one, other):
            engine.offer(name)
        for reader, producer in ((one, other), (other, one)):
            request = receive(
                addresses[producer.engine_id], [3, 4, 1], [5, 2, 9], remote_request_id=name
            )
            reader.start(receive={f"{name} read": request})
        for reader, producer in ((one, other), (other, one)):
            progress.until(reader, received=f"{name} read")
            progress.until(producer, sent=name)
            assert_received(reader, [3, 4, 1], wholes[producer.engine_id])


def test_data_parallel_replicas_share_the_producers(engines):
    """Decode engines of one group read what all prefill ranks hold, each from another rank."""
    p = engines("prefill", tp=4, mla=True)
    address = p.serve()
    whole = fill(p, [5, 2, 9])
    names = []
    for replica in range(4):
        d = engines(f"decode_dp{replica}", mla=True, replica=replica)
        request = f"p-{replica}"
        p.offer(request)
        wanted = receive(address, [3, 4, 1], [5, 2, 9], remote_request_id=request)
        d.start(receive={"d-a": wanted})
        progress = Progress(p, d)
        progress.until(d, received="d-a")
        progress.until(p, sent=request)
        assert_received(d, [3, 4, 1], whole)
        (connection,) = d.connections
        names += connection.lease_tables
    assert len(set(names)) == 4


def test_replicas_come_and_go(engines):
    """Engines that join serve and are served at once; one that leaves costs nobody else."""
    p, d = engines("prefill-0", tp=2), engines("decode-0")
    first, whole = p.serve(), fill(p, [5, 2, 9], seed=1)
    p.offer("p-a", "p-b")
    d.start(receive={"d-a": receive(first, [3, 4, 1], [5, 2, 9])})
    progress = Progress(p, d)
    progress.until(d, received="d-a")
    assert_received(d, [3, 4, 1], whole)

    joined = engines("decode-1", pp=2)
    d.close()
    joined.start(receive={"d-b": receive(first, [6, 7, 8], [5, 2, 9], remote_request_id="p-b")})
    progress = Progress(p, joined)
    progress.until(joined, received="d-b")
    progress.until(p, sent="p-b")
    assert_received(joined, [6, 7, 8], whole)

    p.close()
    other = engines("prefill-1", pp=2)
    second, whole = other.serve(), fill(other, [5, 2, 9], seed=2)
    other.offer("p-a")
    joined.start(
        receive={
            "lost": receive(first, [9, 10, 11], [5, 2, 9]),
            "d-a": receive(second, [3, 4, 1], [5, 2, 9]),
        }
    )
    progress = Progress(other, joined)
    progress.until(joined, received="d-a")
    assert_received(joined, [3, 4, 1], whole)
    progress.until(joined, received="lost")
    for worker in joined.workers.values():
        assert lost_blocks(worker) == {9, 10, 11}


def test_stats_reach_prometheus(engines):
    """What all workers measured is summed up and counted under upstream's names."""
    p, d = engines("prefill", tp=2), engines("decode", tp=2)
    address = p.serve()
    whole = fill(p, [5, 2, 9])
    p.offer("p-a")
    d.start(receive={"d-a": receive(address, [3, 4, 1], [5, 2, 9])})
    Progress(p, d).until(d, received="d-a")
    total = NixlConnector.build_kv_connector_stats()
    for worker in d.workers.values():
        total.aggregate(worker.report.take_stats())
    assert sum(total.data["bytes_transferred"]) == whole.nbytes
    assert total.reduce()["Num successful transfers"] == len(total.data["bytes_transferred"])

    class Recording:
        """A metric that notes what it is told."""

        seen: ClassVar[dict[str, list[float]]] = {}

        def __init__(self, name: str, **_) -> None:
            self.name = name

        def labels(self, *_):
            """The same for all labels."""
            return self

        def observe(self, value) -> None:
            """Note a value."""
            self.seen.setdefault(self.name, []).append(value)

        set = observe

        inc = observe

    kinds = dict.fromkeys((Counter, Gauge, Histogram), Recording)
    config = VllmConfig(
        kv_transfer_config=KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both")
    )
    metrics = NixlConnector.build_prom_metrics(config, kinds, ["engine"], {0: ["0"]})
    metrics.observe(total.data, 0)
    assert sum(Recording.seen["vllm:nixl_bytes_transferred"]) == whole.nbytes


class UpstreamsWorker(NixlConnectorWorker):
    """Upstream's worker as far as it counts failures: whatever else it asks of itself is empty."""

    def __init__(self) -> None:
        self.xfer_stats = NixlKVConnectorStats()
        self.engine_id = "decode"
        self._handshake_lock = threading.RLock()
        self._handshake_futures: dict = {}
        self._handshake_initiation_executor = ThreadPoolExecutor(1)
        self._failed_recv_reqs: queue.Queue[str] = queue.Queue()
        self._remote_agents: dict = {}
        self._recving_metadata: dict = {}
        self._is_hma_required = True
        self.nixl_wrapper = SimpleNamespace(
            check_xfer_state=lambda _: "ERR", release_xfer_handle=lambda _: None
        )

    def _evict_stale_engines(self) -> None:
        """Know no engine."""

    def _log_failure(self, **_) -> None:
        """Say nothing."""

    def _nixl_handshake(self, *_) -> None:
        """Reach nobody, once all requests wait for it."""
        self.all_wait.wait(DEADLINE_S)
        raise ConnectionError("nobody listens there")

    def fail_handshake(self, request_ids: list[str]) -> None:
        """Have requests wait for a handshake that fails, and see to those that have failed."""
        remote = SimpleNamespace(host="127.0.0.1", port=1)
        meta = SimpleNamespace(remote=remote, tp_size=1, dcp_size=1, pp_size=1)
        self.all_wait = threading.Event()
        for request_id in request_ids:
            self._background_nixl_handshake(request_id, "prefill", meta)
        self.all_wait.set()
        self._handshake_initiation_executor.shutdown()
        # As `get_transfer_results` of later releases does; in 0.22.1 it counts nothing more.
        while UPSTREAM_COUNTS_ALL_FAILURES and not self._failed_recv_reqs.empty():
            self._handle_failed_transfer(
                self._failed_recv_reqs.get_nowait(), None, set(), record_failed_transfer=False
            )

    def fail_transfer(self) -> None:
        """Have a read fail at NIXL."""
        self._pop_done_transfers({"a": [1]})


def failed_transfers(connector, stats) -> float:
    """What a connector's metrics make of its counts."""
    registry = CollectorRegistry()
    kinds = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    config = SimpleNamespace(kv_transfer_config=None)
    connector.build_prom_metrics(config, kinds, ["engine"], {0: ["0"]}).observe(stats.data, 0)
    return registry.get_sample_value("vllm:nixl_num_failed_transfers_total", {"engine": "0"})


def test_failed_handshake_counts_as_upstreams_does(engines):
    """However many requests wait for it, on the bases where upstream counts it once."""
    requests = ["d-a", "d-b", "d-c", "d-d"]
    upstreams = UpstreamsWorker()
    upstreams.fail_handshake(requests)

    d = engines("decode")
    nobody = RemoteEngineAddress("prefill", "127.0.0.1", free_port())
    wanted = {name: receive(nobody, [3 + n], [5]) for n, name in enumerate(requests)}
    d.start(receive=wanted)
    (worker,) = d.workers.values()
    stats = stats_with(worker, "read_failures", Progress(d))
    assert stats.data["read_failures"] == ["handshake"] * 4
    expected = 1.0 if UPSTREAM_COUNTS_ALL_FAILURES else 4.0
    assert failed_transfers(UpstreamConnector, upstreams.xfer_stats) == expected
    assert failed_transfers(NixlConnector, stats) == expected


def test_failed_read_counts_as_upstreams_does():
    """Of what upstream does not check, nothing is counted under its name."""
    upstreams = UpstreamsWorker()
    upstreams.fail_transfer()
    assert failed_transfers(UpstreamConnector, upstreams.xfer_stats) == 1.0
    for failure in ReadFailure:
        ours = ReshardStats()
        ours.record_failed_read(failure)
        is_upstreams = failure in (
            ReadFailure.TRANSFER,
            ReadFailure.COPY,
            ReadFailure.DEADLINE,
            ReadFailure.UNFORESEEN,
        ) or (failure is ReadFailure.HANDSHAKE and not UPSTREAM_COUNTS_ALL_FAILURES)
        assert failed_transfers(NixlConnector, ours) == is_upstreams

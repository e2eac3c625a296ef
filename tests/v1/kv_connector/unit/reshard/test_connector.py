# SPDX-License-Identifier: Apache-2.0
"""Which connector an engine gets under the name NixlConnector, and how it is wrapped."""

from __future__ import annotations

import time
from collections import Counter
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import connector as upstream
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)

from tests.bases import requires_base
from tests.v1.kv_connector.unit.reshard import forms
from tests.v1.kv_connector.unit.reshard.engine.workers import DEADLINE_S, Engine, fill, receive
from vllm.distributed.kv_transfer.kv_connector.v1.reshard import connector as connector_module
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.connector import NixlConnector
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.compat import (
    FAILED_READS_ARE_NAMED,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.metadata import (
    Offer,
    ReshardConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import LocalLayoutError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.fingerprint import (
    OfferFingerprint,
)

ATTENTION = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
# Its convolution has 24 channels in either order.
MAMBA = MambaSpec(block_size=16, shapes=((24, 24), (4, 4, 4)), dtypes=(torch.float32,) * 2)


@pytest.fixture
def create(make_config):
    """Creates the scheduler's side of a connector by its name, as the engine does."""
    created = []

    def make(
        name="NixlConnector",
        *,
        spec=ATTENTION,
        on_gpu=None,
        extra_config=None,
        kv_role="kv_both",
        kept_back=False,
        **parallel,
    ):
        config = make_config(name, extra_config=extra_config)
        config.kv_transfer_config.kv_role = kv_role
        for field, value in parallel.items():
            setattr(config.parallel_config, field, value)
        if on_gpu:
            config.kv_transfer_config.kv_buffer_device = on_gpu
        groups = [KVCacheGroupSpec(["layer"], spec)]
        if kept_back:
            groups.append(KVCacheGroupSpec(["replica"], spec, enable_kv_transfer=False))
        cache = KVCacheConfig(4, [], groups)
        created.append(
            KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache)
        )
        return created[-1]

    yield make
    for connector in created:
        connector.shutdown()


@pytest.fixture
def gpu(monkeypatch):
    """The connector believes that the KV cache is in a GPU's memory."""
    monkeypatch.setattr(connector_module, "current_platform", SimpleNamespace(device_type="cuda"))


def test_the_name_means_ours(create):
    """Attention models get the connector of this package, whose base is upstream's."""
    connector = create()
    assert type(connector) is NixlConnector
    assert isinstance(connector, upstream.NixlConnector)


@requires_base("0.22.1", reason="state is read")
def test_mamba_state_is_left_to_upstream(create, caplog_vllm):
    """With one line that says why."""
    assert type(create(spec=MAMBA)) is upstream.NixlConnector
    assert "Using upstream's NixlConnector: the model keeps Mamba state." in caplog_vllm.text


def test_host_buffers_are_left_to_upstream(create, gpu, caplog_vllm):
    """A buffer in host memory for a cache that is not is upstream's business."""
    assert type(create(on_gpu="cpu")) is upstream.NixlConnector
    assert "Using upstream's NixlConnector: kv_buffer_device is cpu" in caplog_vllm.text
    assert type(create(on_gpu="cuda")) is NixlConnector


def test_what_upstream_would_do_is_refused_with_pipeline_parallelism(create, gpu):
    """Upstream's connector has no stages: the engine does not start, and says what would help."""
    message = "kv_buffer_device is cpu.*--pipeline-parallel-size 1 instead"
    with pytest.raises(LocalLayoutError, match=message):
        create(pipeline_parallel_size=2, on_gpu="cpu")


@requires_base("0.32.0", "0.33.0", reason="state is left to upstream's connector")
def test_state_is_served_with_stages_too(create):
    """As any other layers are."""
    assert type(create(spec=MAMBA)) is NixlConnector
    assert type(create(spec=MAMBA, pipeline_parallel_size=2)) is NixlConnector


@requires_base("0.32.0", "0.33.0", reason="state is left to upstream's connector")
def test_state_of_drafts_is_not_offered_back(make_config):
    """Nobody knows which of several blocks has it: the engine does not start."""
    config = make_config("NixlConnector", extra_config={"bidirectional_kv_xfer": True})
    config.speculative_config = SimpleNamespace()
    cache = KVCacheConfig(4, [], [KVCacheGroupSpec(["layer"], MAMBA)])
    with pytest.raises(LocalLayoutError, match="leave out one of the two"):
        NixlConnector(config, KVConnectorRole.SCHEDULER, cache)


def test_wrong_options_keep_the_engine_from_starting(create):
    """The scheduler's side does not come up with a value that it cannot use."""
    with pytest.raises(LocalLayoutError, match="kv_lease_duration"):
        create(extra_config={"kv_lease_duration": "30"})


@requires_base("0.22.1", reason="engines compute no scales")
@pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2"])
def test_scales_of_an_engines_own_are_refused(make_config, dtype):
    """What one engine writes with its scales, another would read with others."""
    config = make_config("NixlConnector")
    config.cache_config.calculate_kv_scales = True
    cache = KVCacheConfig(4, [], [KVCacheGroupSpec(["layer"], ATTENTION)])
    KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache).shutdown()
    config.cache_config.cache_dtype = dtype
    with pytest.raises(LocalLayoutError, match=f"calculate-kv-scales.*{dtype} .*leave it out"):
        KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache)


@requires_base("0.22.1", reason="upstream's connector serves it")
@pytest.mark.parametrize("axis", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallelism_is_refused(make_config, axis):
    """Ranks that hold other tokens of a block must not be taken for replicas."""
    config = make_config("NixlConnector")
    setattr(config.parallel_config, axis, 2)
    cache = KVCacheConfig(4, [], [KVCacheGroupSpec(["layer"], ATTENTION)])
    with pytest.raises(LocalLayoutError, match=f"--{axis.replace('_', '-')} 2 .* use 1"):
        KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache)


@requires_base("0.32.0", "0.33.0", reason="it is refused")
@pytest.mark.parametrize("is_replica", [False, True])
def test_pcp_replicas_make_no_worker(make_config, monkeypatch, is_replica):
    """The first rank's worker is one as ever; the others say nothing and report offers as sent."""
    config = make_config("NixlConnector")
    config.kv_transfer_config.kv_role = "kv_producer"
    config.parallel_config.prefill_context_parallel_size = 2
    monkeypatch.setattr(connector_module, "is_pcp_replica", lambda _: is_replica)
    monkeypatch.setattr(connector_module, "ReshardWorker", made := Mock())
    cache = KVCacheConfig(4, [], [KVCacheGroupSpec(["layer"], ATTENTION)])
    worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache)
    assert made.called is not is_replica
    if is_replica:
        worker.register_kv_caches({})
        assert worker.get_handshake_metadata() is None
        worker.bind_connector_metadata(
            ReshardConnectorMetadata(
                admitted={"p-a"}, offered={"p-a": Offer(OfferFingerprint(48, 1, 2), 30.0)}
            )
        )
        results = worker.get_transfer_results(set())
        assert (results.finished_sending, results.finished_recving) == ({"p-a"}, set())
        assert worker.build_connector_worker_meta() is None
        assert worker.get_kv_connector_stats() is None
    worker.shutdown()


@requires_base("0.32.0", "0.33.0", reason="it has no such groups")
def test_groups_that_are_kept_back_are_left_to_upstream(create, caplog_vllm):
    """What is rebuilt on the accelerator is none of the reader's business."""
    assert type(create(kept_back=True)) is upstream.NixlConnector
    assert "some of its KV-cache groups are not transferred" in caplog_vllm.text
    with pytest.raises(LocalLayoutError, match=r"not transferred.*--pipeline-parallel-size 1"):
        create(kept_back=True, pipeline_parallel_size=2)


@requires_base("0.22.1", "0.32.0", reason="upstream's connector gives its memory back first")
def test_sleep_mode_is_refused(make_config):
    """Memory that comes and goes cannot be read by others."""
    config = make_config("NixlConnector")
    config.model_config.enable_sleep_mode = True
    cache = KVCacheConfig(4, [], [KVCacheGroupSpec(["layer"], ATTENTION)])
    with pytest.raises(LocalLayoutError, match=r"--enable-sleep-mode .*leave it out"):
        KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache)


def test_options_that_do_nothing_are_mentioned(create, caplog_vllm):
    """The engine starts, and its log says what was in vain."""
    create(extra_config={"lease": 3})
    assert "'lease', which this connector does not know" in caplog_vllm.text


@requires_base("0.22.1", reason="connectors are not asked")
@pytest.mark.parametrize(("option", "expected"), [("True", True), (False, False)])
def test_layers_lie_together_where_that_is_wanted(create, monkeypatch, option, expected):
    """As with upstream's connector, for backends and orders that can."""
    backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN")
    monkeypatch.setattr(upstream, "get_current_attn_backend", lambda _: backend)
    monkeypatch.setattr(upstream, "get_kv_cache_layout", lambda: "HND")
    connector = create(extra_config={"enable_cross_layers_blocks": option})
    assert connector.prefer_cross_layer_blocks is expected


def test_data_parallel_ranks_have_side_channels_of_their_own(create, monkeypatch):
    """Engines of one group on one machine do not answer for one another."""
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "7000")
    schedulers = [create(data_parallel_index=rank).connector_scheduler for rank in range(3)]
    assert [scheduler.side_channel_port for scheduler in schedulers] == [7000, 7001, 7002]


CHILDREN = [
    {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
    {"kv_connector": "StageAwareConnector", "kv_role": "kv_both"},
]


def test_multi_connector_holds_ours(create, connectors):
    """The wrapper constructs it from its own configuration, and forwards the handshake."""
    multi = create("MultiConnector", extra_config={"connectors": CHILDREN})
    ours, other = multi._connectors
    assert type(ours) is NixlConnector
    served = []
    ours.connector_scheduler.serve_handshake = served.append
    stages = {(0, 0): "p0t0", (1, 0): "p1t0"}
    multi.set_xfer_handshake_metadata_pp_aware(stages)
    assert served == [stages]
    assert other.by_stage == stages


def test_multi_connector_reports_what_ours_reports(make_config, connectors, monkeypatch):
    """Requests, invalid blocks and stats of a worker reach the runner through the wrapper."""
    config = make_config("MultiConnector", extra_config={"connectors": CHILDREN})
    p, d = Engine("prefill", tp=2), Engine("decode")
    try:
        (worker,) = d.workers.values()
        monkeypatch.setattr(connector_module, "ReshardWorker", lambda *_: worker)
        cache = KVCacheConfig(4, [], [KVCacheGroupSpec(["layer"], ATTENTION)])
        multi = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache)
        assert multi.get_handshake_metadata() is worker.handshake
        address = p.serve()
        fill(p, [5, 2, 9])
        p.offer("p-a", "p-b")
        wanted = {
            "d-a": receive(address, [3, 4, 1], [5, 2, 9]),
            "d-b": receive(address, [6], [99], tokens=16, remote_request_id="p-b"),
        }
        multi.bind_connector_metadata(
            MultiKVConnectorMetadata(
                (ReshardConnectorMetadata(receive=wanted), KVConnectorMetadata())
            )
        )
        failed, received = [], Counter()
        # One that could not be read is reported once more, when nothing writes for it.
        expected = Counter({"d-a": 1, "d-b": 2 if FAILED_READS_ARE_NAMED else 1})
        deadline = time.monotonic() + DEADLINE_S
        while received != expected:
            assert time.monotonic() < deadline, received
            received.update(report(multi, failed))
        assert failed == [forms.failed_reads({"d-b": [6]})]
        stats = multi.get_kv_connector_stats()
        assert stats.data["NixlConnector"].data["read_failures"] == ["parameters"]
        assert sum(stats.data["NixlConnector"].data["bytes_transferred"])
    finally:
        multi.shutdown()
        d.workers = {}
        for engine in (p, d):
            engine.close()


def test_what_is_asked_for_is_taken_up_before_the_model_computes(make_config, monkeypatch):
    """Others wait to hear what is held here, for which a step with a prompt would be too long."""
    worker = Mock()
    monkeypatch.setattr(connector_module, "ReshardWorker", lambda *_: worker)
    cache = KVCacheConfig(4, [], [KVCacheGroupSpec(["layer"], ATTENTION)])
    connector = KVConnectorFactory.create_connector(
        make_config("NixlConnector"), KVConnectorRole.WORKER, cache
    )
    metadata = ReshardConnectorMetadata(withdrawn={"p-a"})
    connector.bind_connector_metadata(metadata)
    worker.submit.assert_called_once_with(metadata)
    # As vLLM calls it before or after the model has computed.
    connector.start_load_kv(None)
    worker.submit.assert_called_once_with(metadata)


def report(connector, failed):
    """What a connector has received in a step; failed reads are put into a list.

    What it has to say to its scheduler, that tells all workers in the next step.
    """
    _, received, lost = forms.results(connector)
    if any(lost.values()):
        failed.append(lost)
    news = connector.build_connector_worker_meta()
    if news is not None:
        told = ReshardConnectorMetadata(failed=set(news.metadata[0].failed))
        connector.bind_connector_metadata(MultiKVConnectorMetadata((told, KVConnectorMetadata())))
    return received


def test_what_nixl_is_given_is_tried_when_vllm_first_asks(monkeypatch, caplog_vllm):
    """Before weights are loaded, and only where something is given: a trial takes seconds."""
    tried: list[tuple[str, ...]] = []

    def try_backends(backends):
        tried.append(backends)
        return "transport 'x' is not available"

    monkeypatch.setattr(connector_module, "try_backends", try_backends)
    for name in ("UCX_TLS", "UCX_NET_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    assert NixlConnector.requires_piecewise_for_cudagraph({}) is False
    assert tried == []
    assert NixlConnector.requires_piecewise_for_cudagraph({"backends": ["LIBFABRIC"]}) is False
    monkeypatch.setenv("UCX_TLS", "x")
    assert NixlConnector.requires_piecewise_for_cudagraph({}) is False
    assert tried == [("LIBFABRIC",), ("UCX",)]
    assert "(transport 'x' is not available): see what UCX" in caplog_vllm.text

# SPDX-License-Identifier: Apache-2.0
"""Which connector an engine gets under the name NixlConnector, and how it is wrapped."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

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

from tests.v1.kv_connector.unit.reshard.engine.test_worker import Engine, Progress, fill, receive
from vllm.distributed.kv_transfer.kv_connector.v1.reshard import connector as connector_module
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.connector import NixlConnector
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.compat import is_in_two_memories
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.envelopes import (
    ReshardConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import LocalLayoutError

ATTENTION = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
MAMBA = MambaSpec(block_size=16, shapes=((1,),), dtypes=(torch.float32,))


@pytest.fixture
def create(make_config):
    """Creates the scheduler's side of a connector by its name, as the engine does."""
    created = []

    def make(name="NixlConnector", *, spec=ATTENTION, on_gpu=None, extra_config=None, **parallel):
        config = make_config(name, extra_config=extra_config)
        for field, value in parallel.items():
            setattr(config.parallel_config, field, value)
        if on_gpu:
            config.kv_transfer_config.kv_buffer_device = on_gpu
        cache = KVCacheConfig(4, [], [KVCacheGroupSpec(["layer"], spec)])
        created.append(
            KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache)
        )
        return created[-1]

    yield make
    for connector in created:
        connector.shutdown()


class Stub:
    """Stands for upstream's connector."""

    def shutdown(self) -> None:
        """Nothing was opened."""


@pytest.fixture
def gpu(monkeypatch):
    """The connector believes that the KV cache is in a GPU's memory."""
    monkeypatch.setattr(connector_module, "current_platform", SimpleNamespace(device_type="cuda"))


def test_the_name_means_ours(create):
    """Attention models get the connector of this package, whose base is upstream's."""
    connector = create()
    assert type(connector) is NixlConnector
    assert isinstance(connector, upstream.NixlConnector)


UPSTREAMS_PACKAGE = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"


def test_other_names_of_the_family_are_upstreams():
    """Whoever asks for push, or for pull by its own name, gets what upstream has under it."""
    others = [name for name in KVConnectorFactory._registry if name.startswith("Nixl")]
    others.remove("NixlConnector")
    assert ("NixlPushConnector" in others) == hasattr(upstream, "NixlPushConnector")
    for name in others:
        found = KVConnectorFactory.get_connector_class_by_name(name)
        assert found is getattr(upstream, name)
        assert found.__module__.startswith(UPSTREAMS_PACKAGE)


def test_upstreams_can_be_asked_for(make_config):
    """As by an engine whose peer is left to upstream's connector."""
    config = make_config("NixlConnector")
    config.kv_transfer_config.kv_connector_module_path = UPSTREAMS_PACKAGE
    found = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
    assert found is upstream.NixlConnector
    assert not issubclass(found, NixlConnector)


def test_mamba_state_is_left_to_upstream(create, caplog_vllm):
    """With one line that says why."""
    assert type(create(spec=MAMBA)) is upstream.NixlConnector
    assert "Using upstream's NixlConnector: the model keeps Mamba state." in caplog_vllm.text


def test_host_buffers_are_left_to_upstream(create, gpu, caplog_vllm):
    """A buffer in host memory for a cache that is not is upstream's business."""
    assert type(create(on_gpu="cpu")) is upstream.NixlConnector
    assert "Using upstream's NixlConnector: kv_buffer_device is cpu" in caplog_vllm.text
    assert type(create(on_gpu="cuda")) is NixlConnector


@pytest.mark.parametrize(
    ("case", "reason"),
    [(dict(spec=MAMBA), "Mamba state"), (dict(on_gpu="cpu"), "kv_buffer_device is cpu")],
)
def test_what_upstream_would_do_is_refused_with_pipeline_parallelism(create, gpu, case, reason):
    """Upstream's connector has no stages: the engine does not start, and says what would help."""
    with pytest.raises(LocalLayoutError, match=rf"{reason}.*--pipeline-parallel-size 1 instead"):
        create(pipeline_parallel_size=2, **case)


@pytest.mark.parametrize(
    ("predicate", "reason"),
    [("is_in_two_memories", "in the host's memory"), ("keeps_groups_back", "not transferred")],
)
def test_caches_that_only_upstream_understands_are_left_to_it(
    create, monkeypatch, predicate, reason
):
    """Those of later releases, part of which is somewhere else, or stays where it is."""
    monkeypatch.setattr(connector_module, predicate, lambda _: True)
    monkeypatch.setattr(upstream, "NixlConnector", lambda *_: Stub())
    assert type(create()) is Stub
    with pytest.raises(LocalLayoutError, match=rf"{reason}.*--pipeline-parallel-size 1 instead"):
        create(pipeline_parallel_size=2)


def test_caches_in_host_memory_are_recognised():
    """By what says how large that part is, in the releases that have it."""
    cache = KVCacheConfig(4, [], [KVCacheGroupSpec(["layer"], ATTENTION)])
    known = "hisparse_host_num_blocks" in {field.name for field in dataclasses.fields(cache)}
    assert not is_in_two_memories(cache)
    cache.hisparse_host_num_blocks = 8
    assert is_in_two_memories(cache) == known


def test_wrong_options_keep_the_engine_from_starting(create):
    """The scheduler's side does not come up with a value that it cannot use."""
    with pytest.raises(LocalLayoutError, match="kv_lease_duration"):
        create(extra_config={"kv_lease_duration": "30"})


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


AXES = pytest.mark.parametrize(
    "axis", ["decode_context_parallel_size", "prefill_context_parallel_size"]
)


@AXES
def test_context_parallelism_is_left_to_upstream_where_it_serves_it(create, monkeypatch, axis):
    """Its newer releases know which rank holds which tokens; what they lack they refuse."""
    monkeypatch.setattr(connector_module, "CONTEXT_PARALLELISM_IS_UPSTREAMS", True)
    asked = []
    monkeypatch.setattr(upstream, "NixlConnector", lambda *given: asked.append(given) or Stub())
    assert type(create(**{axis: 2})) is Stub
    assert len(asked) == 1
    with pytest.raises(LocalLayoutError, match=f"--{axis.replace('_', '-')} 2 .*--pipeline-para"):
        create(pipeline_parallel_size=2, **{axis: 2})


@AXES
def test_context_parallelism_is_refused_where_upstream_does_not_look(create, monkeypatch, axis):
    """Ranks that hold other tokens of a sequence must not be taken for replicas."""
    monkeypatch.setattr(connector_module, "CONTEXT_PARALLELISM_IS_UPSTREAMS", False)
    with pytest.raises(LocalLayoutError, match=f"--{axis.replace('_', '-')} 2 .* use 1"):
        create(**{axis: 2})


def test_options_that_do_nothing_are_mentioned(create, caplog_vllm):
    """The engine starts, and its log says what was in vain."""
    create(extra_config={"lease": 3})
    assert "'lease', which this connector does not know" in caplog_vllm.text


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
    assert not multi.prefer_cross_layer_blocks


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
        multi.start_load_kv(None)
        worker_like = SimpleNamespace(get_finished=lambda: as_sets(multi.get_finished(set())))
        d.workers = {rank: worker_like for rank in d.workers}
        progress = Progress(p, d)
        progress.until(d, received="d-a")
        progress.until(d, received="d-b")
        assert multi.get_block_ids_with_load_errors() == {6}
        stats = multi.get_kv_connector_stats()
        assert stats.data["NixlConnector"].data["num_failed_transfers"] == [1]
        assert sum(stats.data["NixlConnector"].data["bytes_transferred"])
    finally:
        multi.shutdown()
        d.workers = {}
        for engine in (p, d):
            engine.close()


def as_sets(finished):
    """None stands for no requests."""
    sent, received = finished
    return sent or set(), received or set()

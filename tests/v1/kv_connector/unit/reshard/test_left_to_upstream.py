# SPDX-License-Identifier: Apache-2.0
"""What is left to upstream's classes, and refused to engines that want it with stages."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from vllm.config import ModelConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import connector as upstream
from vllm.platforms import current_platform
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
)

from tests.bases import RELEASE, requires_base
from vllm.distributed.kv_transfer.kv_connector.v1.reshard import connector as connector_module
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.connector import NixlConnector
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.compat import is_in_two_memories
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.settings import (
    OWN_OPTIONS,
    Settings,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import LocalLayoutError

UPSTREAMS_PACKAGE = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
AXES = ["decode_context_parallel_size", "prefill_context_parallel_size"]
SIZES = dict(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
WITHOUT_STAGES = "upstream's NixlConnector does not support .*--pipeline-parallel-size 1 instead"


def cache_config() -> KVCacheConfig:
    """One group of decoder attention."""
    spec = FullAttentionSpec(**SIZES)
    return KVCacheConfig(4, [], [KVCacheGroupSpec(["layer"], spec)])


class Stub:
    """Stands for upstream's connector."""


@pytest.fixture
def create(make_config, monkeypatch):
    """Creates the scheduler's side by the name; what is left to upstream becomes a stub."""
    monkeypatch.setattr(upstream, "NixlConnector", lambda *_: Stub())

    def make(*, extra_config=None, kv_role="kv_both", **changes):
        config = make_config("NixlConnector", extra_config=extra_config or {})
        config.kv_transfer_config.kv_role = kv_role
        for field, value in changes.items():
            owner = config.model_config if field == "enable_sleep_mode" else config.parallel_config
            setattr(owner, field, value)
        return KVConnectorFactory.create_connector(
            config, KVConnectorRole.SCHEDULER, cache_config()
        )

    return make


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


def test_other_devices_are_left_to_upstream(make_config, monkeypatch):
    """Ours waits for the device by CUDA's events, which XPUs have not."""
    monkeypatch.setattr(upstream, "NixlConnector", lambda *_: Stub())
    config = make_config("NixlConnector")
    monkeypatch.setattr(type(current_platform), "device_type", "xpu")
    config.kv_transfer_config.kv_buffer_device = "xpu"

    def create():
        return KVConnectorFactory.create_connector(
            config, KVConnectorRole.SCHEDULER, cache_config()
        )

    assert type(create()) is Stub
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(LocalLayoutError, match=f"the device is xpu.*{WITHOUT_STAGES}"):
        create()


@requires_base("0.32.0", "0.33.0", reason="its layers do not say what is shared out")
def test_prefill_context_parallelism_is_ours_on_producers(create):
    """With stages, too; engines that would read are refused."""
    for changes in ({}, dict(pipeline_parallel_size=2)):
        made = create(kv_role="kv_producer", prefill_context_parallel_size=2, **changes)
        assert isinstance(made, NixlConnector)
    with pytest.raises(LocalLayoutError, match=r"-size 2 with kv_role kv_both.* kv_producer"):
        create(prefill_context_parallel_size=2)


@requires_base("0.32.0", "0.33.0", reason="its layers do not say what is shared out")
def test_shares_over_prefill_context_parallelism_are_ours_of_latents(create, monkeypatch):
    """Ranks count as those of one latent; with heads, vLLM has none, and upstream's may."""
    sizes = dict(prefill_context_parallel_size=2, decode_context_parallel_size=2)
    monkeypatch.setattr(ModelConfig, "use_mla", True)
    assert type(create(kv_role="kv_producer", **sizes)) is Stub
    with pytest.raises(LocalLayoutError, match=f"layer layer keeps no latent.*{WITHOUT_STAGES}"):
        create(kv_role="kv_producer", pipeline_parallel_size=2, **sizes)
    spec = MLAAttentionSpec(**{**SIZES, "num_kv_heads": 1})
    cache = KVCacheConfig(4, [], [KVCacheGroupSpec(["layer"], spec)])
    monkeypatch.setattr(f"{__name__}.cache_config", lambda: cache)
    for changes in ({}, dict(pipeline_parallel_size=2)):
        assert isinstance(create(kv_role="kv_producer", **sizes, **changes), NixlConnector)


@requires_base("0.32.0", "0.33.0", reason="its layers do not say what is shared out")
def test_decode_context_parallelism_is_ours(create):
    """With stages, too, and of any size."""
    for changes in (dict(tensor_parallel_size=4), dict(pipeline_parallel_size=2)):
        assert isinstance(create(decode_context_parallel_size=2, **changes), NixlConnector)


@requires_base("0.32.0", "0.33.0", reason="its layers do not say what is shared out")
@pytest.mark.parametrize(("use_mla", "tp_size"), [(False, 2), (True, 4)])
def test_upstream_is_not_left_what_it_reads_wrong(create, monkeypatch, use_mla, tp_size):
    """Tokens of heads, or of some ranks each, which it would take for whole blocks."""
    monkeypatch.setattr(connector_module, "is_in_two_memories", lambda _: True)
    monkeypatch.setattr(ModelConfig, "use_mla", use_mla)
    sizes = dict(tensor_parallel_size=tp_size, decode_context_parallel_size=2)
    with pytest.raises(LocalLayoutError, match=f"over all {tp_size} ranks only: use 1 instead"):
        create(**sizes)
    monkeypatch.setattr(ModelConfig, "use_mla", True)
    assert type(create(**{**sizes, "tensor_parallel_size": 2})) is Stub


@requires_base("0.32.0", "0.33.0", reason="its slots are one token's")
def test_shared_slots_of_several_tokens_are_left_to_upstream(create, monkeypatch):
    """Which rank has which of them is not known."""
    spec = MLAAttentionSpec(**{**SIZES, "num_kv_heads": 1}, tokens_per_state=4)
    cache = KVCacheConfig(4, [], [KVCacheGroupSpec(["layer"], spec)])
    monkeypatch.setattr(f"{__name__}.cache_config", lambda: cache)
    assert isinstance(create(), NixlConnector)
    monkeypatch.setattr(ModelConfig, "use_mla", True)
    assert type(create(tensor_parallel_size=2, decode_context_parallel_size=2)) is Stub


@pytest.mark.parametrize("axis", AXES)
def test_context_parallelism_is_refused_where_layers_do_not_tell(create, monkeypatch, axis):
    """Ranks that hold other tokens of a block must not be taken for replicas."""
    monkeypatch.setattr(connector_module, "LAYERS_SAY_WHAT_IS_SHARED", False)
    with pytest.raises(LocalLayoutError, match=f"--{axis.replace('_', '-')} 2 .* use 1"):
        create(**{axis: 2})


@pytest.mark.parametrize(
    ("predicate", "reason"),
    [("is_in_two_memories", "in the host's memory"), ("keeps_groups_back", "not transferred")],
)
def test_caches_that_only_upstream_understands_are_left_to_it(
    create, monkeypatch, predicate, reason
):
    """Those of later releases, part of which is somewhere else, or stays where it is."""
    monkeypatch.setattr(connector_module, predicate, lambda _: True)
    assert type(create()) is Stub
    with pytest.raises(LocalLayoutError, match=f"{reason}.*{WITHOUT_STAGES}"):
        create(pipeline_parallel_size=2)


@pytest.mark.parametrize(
    "make_spec",
    [
        pytest.param(lambda: SinkFullAttentionSpec(**SIZES, sink_len=4), id="sinks"),
        pytest.param(
            lambda: MambaSpec(block_size=16, shapes=((1,),) * 3, dtypes=(torch.half,) * 3),
            id="state of another kind",
        ),
        pytest.param(
            lambda: kv_cache_interface.CircularBufferSpec(**SIZES),
            id="rings",
            marks=requires_base("0.32.0", "0.33.0", reason="it has no rings of requests"),
        ),
        pytest.param(
            lambda: kv_cache_interface.HiddenStateCacheSpec(**{**SIZES, "num_kv_heads": 1}),
            id="hidden states",
            marks=pytest.mark.skipif(
                not hasattr(kv_cache_interface, "HiddenStateCacheSpec"),
                reason=f"not on {RELEASE}: it has no such specification",
            ),
        ),
    ],
)
def test_specifications_that_are_not_known_are_left_to_upstream(create, monkeypatch, make_spec):
    """Their block ids may mean something else than tokens, or their pages hold other parts."""
    spec = make_spec()
    cache = KVCacheConfig(4, [], [KVCacheGroupSpec(["layer"], spec)])
    monkeypatch.setattr(f"{__name__}.cache_config", lambda: cache)
    assert type(create()) is Stub
    reason = "(layer layer keeps .* in a form that is not known|the model keeps Mamba state)"
    with pytest.raises(LocalLayoutError, match=f"{reason}.*{WITHOUT_STAGES}"):
        create(pipeline_parallel_size=2)


def test_caches_in_host_memory_are_recognised():
    """By what says how large that part is, in the releases that have it."""
    cache = cache_config()
    known = "hisparse_host_num_blocks" in {field.name for field in dataclasses.fields(cache)}
    assert not is_in_two_memories(cache)
    cache.hisparse_host_num_blocks = 8
    assert is_in_two_memories(cache) == known


def test_log_says_what_is_lost(create, monkeypatch, caplog_vllm):
    """Options of ours do nothing then, some of which keep others out."""
    monkeypatch.setattr(connector_module, "keeps_groups_back", lambda _: True)
    create(extra_config={"num_threads": 2})
    assert "some of its KV-cache groups are not transferred. The engines that" in caplog_vllm.text
    assert "has no" not in caplog_vllm.text
    create(extra_config={"trusted_peers": ["10.0.0.0/8"], "side_channel_key_file": "key"})
    assert "NixlConnector has no side_channel_key_file, trusted_peers: " in caplog_vllm.text


def test_own_options_are_those_that_upstream_does_not_read():
    """Its modules name all the others."""
    package = Path(upstream.__file__).parent
    read = "\n".join(path.read_text() for path in package.glob("*.py"))
    options = set(Settings.__struct_encode_fields__)
    assert options > OWN_OPTIONS
    assert not {name for name in OWN_OPTIONS if f'"{name}"' in read}
    # Which later releases no longer have, and those before do not have yet.
    others = {"enable_cross_layers_blocks", "engine_ttl", "decoder_kv_blocks_ttl"}
    assert {name for name in options - OWN_OPTIONS - others if f'"{name}"' not in read} == set()


def test_other_name_is_refused_where_upstreams_would_serve(make_config, monkeypatch):
    """Some engines are checked by the name of their connector, which must be that one's."""
    monkeypatch.setattr(connector_module, "keeps_groups_back", lambda _: True)
    config = make_config("NixlConnector")
    config.kv_transfer_config.kv_connector = "ReshardConnector"
    with pytest.raises(LocalLayoutError, match="set kv_connector to NixlConnector"):
        NixlConnector(config, KVConnectorRole.SCHEDULER, cache_config())


def test_items_without_names_are_left_to_upstream(create, monkeypatch):
    """What it moves is bound to nothing, so that it needs none."""
    monkeypatch.setattr(connector_module, "counted_items", lambda _: "items are counted")
    assert type(create()) is Stub


@requires_base("0.32.0", "0.33.0", reason="it has no such layers")
def test_answers_with_a_gap_are_not_offered_back(make_config):
    """A prompt is whole, and may be read; what lies between it and an answer's end is gone."""
    from vllm.v1.kv_cache_interface import RSWASpec

    spec = RSWASpec(**SIZES, rswa_window=32)
    cache = KVCacheConfig(4, [], [KVCacheGroupSpec(["layer"], spec)])
    connector = NixlConnector(make_config("NixlConnector"), KVConnectorRole.SCHEDULER, cache)
    assert type(connector) is NixlConnector
    connector.shutdown()
    config = make_config("NixlConnector", extra_config={"bidirectional_kv_xfer": True})
    with pytest.raises(LocalLayoutError, match="cannot offer the answer: leave that option out"):
        NixlConnector(config, KVConnectorRole.SCHEDULER, cache)


def test_sleep_mode_is_left_to_upstream_where_it_serves_it(create, monkeypatch):
    """Releases that give registrations back, and take them up again."""
    monkeypatch.setattr(connector_module, "SLEEP_IS_UPSTREAMS", True)
    assert type(create(enable_sleep_mode=True)) is Stub
    with pytest.raises(LocalLayoutError, match=f"--enable-sleep-mode .*{WITHOUT_STAGES}"):
        create(enable_sleep_mode=True, pipeline_parallel_size=2)


@pytest.mark.parametrize("pp_size", [1, 2])
def test_sleep_mode_is_refused(create, monkeypatch, pp_size):
    """Other engines would read memory that was taken away."""
    monkeypatch.setattr(connector_module, "SLEEP_IS_UPSTREAMS", False)
    with pytest.raises(LocalLayoutError, match=r"--enable-sleep-mode .*leave it out"):
        create(enable_sleep_mode=True, pipeline_parallel_size=pp_size)

# SPDX-License-Identifier: Apache-2.0
"""What is left to upstream's classes, and refused to engines that want it with stages."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import connector as upstream
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SinkFullAttentionSpec,
)

from vllm.distributed.kv_transfer.kv_connector.v1.reshard import connector as connector_module
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.connector import NixlConnector
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.compat import is_in_two_memories
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

    def make(**changes):
        config = make_config("NixlConnector")
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


@pytest.mark.parametrize("axis", AXES)
def test_context_parallelism_is_left_to_upstream_where_it_serves_it(create, monkeypatch, axis):
    """Its newer releases know which rank holds which tokens; what they lack they refuse."""
    monkeypatch.setattr(connector_module, "CONTEXT_PARALLELISM_IS_UPSTREAMS", True)
    assert type(create(**{axis: 2})) is Stub
    option = f"--{axis.replace('_', '-')} 2"
    with pytest.raises(LocalLayoutError, match=f"{option} spreads.*{WITHOUT_STAGES}"):
        create(pipeline_parallel_size=2, **{axis: 2})


@pytest.mark.parametrize("axis", AXES)
def test_context_parallelism_is_refused_where_upstream_does_not_look(create, monkeypatch, axis):
    """Ranks that hold other tokens of a block must not be taken for replicas."""
    monkeypatch.setattr(connector_module, "CONTEXT_PARALLELISM_IS_UPSTREAMS", False)
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
    "spec",
    [
        SinkFullAttentionSpec(**SIZES, sink_len=4),
        MambaSpec(block_size=16, shapes=((1,),) * 3, dtypes=(torch.half,) * 3),
    ],
)
def test_specifications_that_are_not_known_are_left_to_upstream(create, monkeypatch, spec):
    """Their block ids may mean something else than tokens, or their pages hold other parts."""
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


@pytest.mark.parametrize("pp_size", [1, 2])
def test_sleep_mode_is_refused(create, pp_size):
    """Other engines would read memory that was taken away."""
    with pytest.raises(LocalLayoutError, match=r"--enable-sleep-mode .*leave it out"):
        create(enable_sleep_mode=True, pipeline_parallel_size=pp_size)

# SPDX-License-Identifier: Apache-2.0
"""What the connector unit tests share: a tiny configuration and connectors to configure by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typing_extensions import override
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "vocab_size": 128,
}


class StageMetadata(KVConnectorHandshakeMetadata):
    """Handshake metadata that can be told apart by its label."""

    def __init__(self, label: str) -> None:
        self.label = label


class RecordingConnector(KVConnectorBase_V1):
    """A connector that does nothing but remember the handshake metadata it is given.

    It overrides `set_xfer_handshake_metadata` only, as connectors written before stages were told
    apart do.
    """

    created: ClassVar[list[RecordingConnector]] = []

    def __init__(self, vllm_config, role, kv_cache_config) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.by_tp_rank: dict[int, KVConnectorHandshakeMetadata] | None = None
        self.by_stage: dict[tuple[int, int], KVConnectorHandshakeMetadata] | None = None
        self.created.append(self)

    @override
    def set_xfer_handshake_metadata(self, metadata) -> None:
        self.by_tp_rank = metadata

    @override
    def start_load_kv(self, forward_context, **kwargs: Any) -> None: ...

    @override
    def wait_for_layer_load(self, layer_name: str) -> None: ...

    @override
    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs: Any) -> None: ...

    @override
    def wait_for_save(self) -> None: ...

    @override
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    @override
    def update_state_after_alloc(self, request, blocks, num_external_tokens) -> None: ...

    @override
    def build_connector_meta(self, scheduler_output) -> KVConnectorMetadata:
        return KVConnectorMetadata()


class PlainConnector(RecordingConnector):
    """A connector that takes no handshake metadata at all."""

    set_xfer_handshake_metadata = KVConnectorBase_V1.set_xfer_handshake_metadata


class StageAwareConnector(RecordingConnector):
    """A connector that tells pipeline stages apart."""

    @override
    def set_xfer_handshake_metadata_pp_aware(self, metadata) -> None:
        self.by_stage = metadata


@pytest.fixture
def connectors(monkeypatch: pytest.MonkeyPatch) -> list[RecordingConnector]:
    """The recording connectors can be configured by name; lists those created, in order."""
    created: list[RecordingConnector] = []
    monkeypatch.setattr(RecordingConnector, "created", created)
    for connector_class in (RecordingConnector, PlainConnector, StageAwareConnector):
        monkeypatch.setitem(
            KVConnectorFactory._registry, connector_class.__name__, lambda c=connector_class: c
        )
    return created


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that holds the configuration of a tiny Llama, and no weights."""
    directory = tmp_path_factory.mktemp("tiny-llama")
    (directory / "config.json").write_text(json.dumps(TINY_LLAMA))
    return directory


@pytest.fixture
def make_config(tiny_model: Path) -> Callable[..., VllmConfig]:
    """Builds a `VllmConfig` for the tiny model and the given connector."""

    def make(
        kv_connector: str, *, extra_config: dict[str, Any] | None = None, **parallel: Any
    ) -> VllmConfig:
        model_config = ModelConfig(
            model=str(tiny_model), skip_tokenizer_init=True, dtype="float32", max_model_len=64
        )
        return VllmConfig(
            model_config=model_config,
            cache_config=CacheConfig(block_size=16, gpu_memory_utilization=0.1),
            parallel_config=ParallelConfig(**parallel),
            scheduler_config=SchedulerConfig(
                max_num_seqs=4,
                max_num_batched_tokens=64,
                max_model_len=64,
                is_encoder_decoder=False,
                disable_hybrid_kv_cache_manager=True,
            ),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=KVTransferConfig(
                kv_connector=kv_connector,
                kv_role="kv_both",
                kv_connector_extra_config=extra_config or {},
            ),
        )

    return make

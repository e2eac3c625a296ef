# SPDX-License-Identifier: Apache-2.0
"""A rank's configuration in vLLM's own types, for a model that is a few lines of JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
)

from tools.pdstack.engine import UPSTREAM

from .caches import RankCaches
from .cases import Shape
from .compat import cache_place, layer_cache, resolve_layout
from .model import MAX_TOKENS
from .specs import EngineSpec

_LEASE_S = 600
_CONNECTOR = "NixlConnector"


class _Layer(AttentionLayerBase):  # type: ignore[misc]
    """An attention layer of which only its cache is there."""

    def __init__(self, backend: type[AttentionBackend], spec: KVCacheSpec) -> None:
        self._backend, self._spec = backend, spec

    def get_attn_backend(self) -> type[AttentionBackend]:
        """The attention backend."""
        return self._backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """Its cache."""
        return self._spec


@dataclass(frozen=True)
class RankConfig:
    """A rank's configuration and caches.

    Attributes:
        vllm_config: As the engine would have it.
        kv_cache_config: The rank's layers.
        tensors: Its caches by layer name, as the model runner would register them.
        caches: The same, to be filled and compared.
    """

    vllm_config: VllmConfig
    kv_cache_config: KVCacheConfig
    tensors: dict[str, torch.Tensor]
    caches: RankCaches


def memory_kind() -> Literal["DRAM", "VRAM"]:
    """What NIXL calls the memory of the caches."""
    return "DRAM" if current_platform.device_type == "cpu" else "VRAM"


def rank_config(spec: EngineSpec, pp_rank: int, tp_rank: int) -> RankConfig:
    """Configure a rank, and reserve its caches."""
    shape = spec.shape
    vllm_config = _vllm_config(spec)
    resolve_layout(vllm_config, nhd=spec.nhd)
    backend = _backend(shape)
    heads = range(1)
    if not shape.mla:
        per_rank = shape.num_heads // spec.layout.tp_size
        heads = range(tp_rank * per_rank, (tp_rank + 1) * per_rank)
    spec_type = MLAAttentionSpec if shape.mla else FullAttentionSpec
    cache_spec = spec_type(
        block_size=spec.block_tokens,
        num_kv_heads=len(heads),
        head_size=shape.head_size,
        dtype=torch.bfloat16,
    )
    device = str(current_platform.device_type)
    start, end = get_pp_indices(shape.num_layers, pp_rank, spec.layout.pp_size)
    layers, in_memory, registered = {}, {}, vllm_config.compilation_config.static_forward_context
    for layer in range(start, end):
        name = f"model.layers.{layer}.self_attn.attn"
        registered[name] = _Layer(backend, cache_spec)
        layers[name] = layer_cache(backend, cache_spec, spec.num_blocks, device, nhd=spec.nhd)
        in_memory[layer] = layers[name].in_memory
    kv_cache_config = KVCacheConfig(
        spec.num_blocks,
        [cache_place(name, spec.num_blocks, cache_spec.page_size_bytes) for name in layers],
        [KVCacheGroupSpec(list(layers), cache_spec)],
    )
    # Sizes and numbers of chunks are told by it.
    assert {layer.num_planes for layer in layers.values()} == {shape.planes_per_layer}
    caches = RankCaches(in_memory, heads, shape.planes_per_layer, spec.block_tokens, nhd=spec.nhd)
    tensors = {name: layer.tensor for name, layer in layers.items()}
    return RankConfig(vllm_config, kv_cache_config, tensors, caches)


def _vllm_config(spec: EngineSpec) -> VllmConfig:
    extra: dict[str, Any] = {"kv_lease_duration": _LEASE_S}
    if spec.variant.strategy is not None:
        extra["transfer_strategy"] = spec.variant.strategy
    if spec.variant.num_threads is not None:
        extra["num_threads"] = spec.variant.num_threads
    model_config = ModelConfig(
        model=spec.model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=MAX_TOKENS,
    )
    return VllmConfig(
        model_config=model_config,
        cache_config=CacheConfig(block_size=spec.block_tokens),
        parallel_config=ParallelConfig(
            tensor_parallel_size=spec.layout.tp_size,
            pipeline_parallel_size=spec.layout.pp_size,
            distributed_executor_backend="mp",
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=512,
            max_num_batched_tokens=MAX_TOKENS,
            max_model_len=MAX_TOKENS,
            is_encoder_decoder=False,
            disable_hybrid_kv_cache_manager=True,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector=_CONNECTOR,
            kv_role="kv_both",
            engine_id=spec.engine_id,
            kv_buffer_device=str(current_platform.device_type),
            kv_connector_module_path=(
                UPSTREAM.module_path if spec.variant.connector == "upstream" else None
            ),
            kv_connector_extra_config=extra,
        ),
    )


def _backend(shape: Shape) -> type[AttentionBackend]:
    """The attention backend whose caches are used: of both engines, the same.

    That of CPUs packs heads, by 32 tokens. There, others have caches only, which is enough.
    """
    packs = not any(shape.nhd) and all(tokens % 32 == 0 for tokens in shape.blocks_tokens)
    backends = "vllm.v1.attention.backends"
    name = f"{backends}.flash_attn.FlashAttentionBackend"
    if shape.mla:
        name = f"{backends}.mla.triton_mla.TritonMLABackend"
    elif current_platform.device_type == "cpu" and packs:
        name = f"{backends}.cpu_attn.CPUAttentionBackend"
    backend: type[AttentionBackend] = resolve_obj_by_qualname(name)
    return backend

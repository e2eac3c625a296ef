# SPDX-License-Identifier: Apache-2.0
"""What engines would keep of whole models, as their layers say it: without weights or a GPU.

A model is made where tensors have no memory, and every layer is asked for its specification, as a
worker does. What modules for GPUs ask of the platform while they are made is answered here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, MambaSpec
from vllm.v1.worker import workspace

from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches.geometry import (
    layers_of_worker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.cache import LayerCache

_SPARSE_MLA = "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"
_NUM_BLOCKS = 4
_CPU_MLA_BLOCK_TOKENS = 16
"""What `CpuPlatform` makes of any block size where there is a latent."""

BLOCK_TOKENS = 64
"""Tokens in a block of engines on GPUs, as indexers have them there."""


class _Event:
    """What streams of a GPU wait for, where there is none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


@contextmanager
def one_rank(place: Path) -> Iterator[None]:
    """An engine of one rank on CPU, which answers as one on a GPU where attention is sparse."""
    choose = CpuPlatform.get_attn_backend_cls.__func__

    def with_sparse(cls: Any, *args: Any, **kwargs: Any) -> str:
        if kwargs["attn_selector_config"].use_sparse:
            return _SPARSE_MLA
        return str(choose(cls, *args, **kwargs))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Event", _Event)
        patch.setattr(torch.accelerator, "empty_cache", lambda: None)
        patch.setattr(CpuPlatform, "get_attn_backend_cls", classmethod(with_sparse))
        # A class that vLLM does not know it would import in a process of its own first.
        patch.setattr(registry, "_run_in_subprocess", lambda function: function())
        patch.setattr(workspace, "_manager", None)
        workspace.init_workspace_manager(torch.device("cpu"))
        with set_current_vllm_config(VllmConfig()):
            init_distributed_environment(1, 0, f"file://{place / 'meeting'}", 0, "gloo")
            initialize_model_parallel(1, 1)
            try:
                yield
            finally:
                destroy_model_parallel()
                destroy_distributed_environment()


def kept_by(directory: Path, config: Mapping[str, Any]) -> dict[str, tuple[KVCacheSpec, type]]:
    """The specification and the backend of every layer of a model that keeps something.

    Args:
        directory: An empty one, for the model's `config.json`.
        config: What that says.
    """
    (directory / "config.json").write_text(json.dumps(config))
    arguments = EngineArgs(
        model=str(directory),
        tokenizer=str(directory),
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=BLOCK_TOKENS,
        max_model_len=4096,
        max_num_batched_tokens=4096,
    )
    vllm_config = arguments.create_engine_config()
    if vllm_config.cache_config.block_size == _CPU_MLA_BLOCK_TOKENS:
        vllm_config.cache_config.block_size = BLOCK_TOKENS
    with (
        set_current_vllm_config(vllm_config),
        torch.device("meta"),
        set_default_torch_dtype(torch.bfloat16),
    ):
        initialize_model(vllm_config)
        layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
        return {
            name: (spec, layer.get_attn_backend())
            for name, layer in layers.items()
            if (spec := layer.get_kv_cache_spec(vllm_config)) is not None
        }


def described(kept: Mapping[str, tuple[Any, type]]) -> dict[Any, LayerCache]:
    """What this connector makes of such layers: their caches on one rank."""
    tensors = {name: _cache(spec) for name, (spec, _) in kept.items()}
    groups = [KVCacheGroupSpec([name], spec) for name, (spec, _) in kept.items()]
    layers = layers_of_worker(
        tensors,
        KVCacheConfig(_NUM_BLOCKS, [], groups),
        {name: backend for name, (_, backend) in kept.items()},
    )
    return {name: layer.cache for name, layer in layers.items()}


def _cache(spec: Any) -> torch.Tensor:
    """The cache of a layer, in bytes: a page for each block, or views as runners make them."""
    page = (spec.page_size_bytes,)
    if not isinstance(spec, MambaSpec):
        page = (spec.num_heads, spec.num_states, spec.state_content_size_bytes)
    return torch.empty(_NUM_BLOCKS, *page, dtype=torch.uint8)

# SPDX-License-Identifier: Apache-2.0
"""What releases of vLLM do not have in common, as far as it is measured here.

The connector's own module of this name says which base has what; nothing else here asks but
`base`, which may not import it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import KVCacheTensor

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine import compat

from .caches import reserve

_SHAPED_BY_BACKENDS = not compat.CACHES_ARE_VIEWS
"""Every backend of 0.22.1 shapes its cache in its own way; later ones are views of one form."""


@dataclass(frozen=True)
class LayerCache:
    """The cache of a layer.

    Attributes:
        tensor: As the model runner would register it.
        in_memory: As it lies in memory.
        num_planes: 2 where keys and values lie apart.
    """

    tensor: torch.Tensor
    in_memory: torch.Tensor
    num_planes: int


@dataclass(frozen=True)
class Results:
    """What a connector reports after a step: requests."""

    sent: set[str]
    received: set[str]
    num_failed: int


def layer_cache(
    backend: type[AttentionBackend], spec: Any, num_blocks: int, device: str, *, nhd: bool
) -> LayerCache:
    """Reserve a layer's cache: by its heads, or (NHD) by its tokens."""
    if not _SHAPED_BY_BACKENDS:
        content = spec.state_content_size_bytes // torch.bfloat16.itemsize
        inner = (spec.block_size, spec.num_heads) if nhd else (spec.num_heads, spec.block_size)
        in_memory = reserve((num_blocks, *inner, content), torch.bfloat16, device)
        return LayerCache(in_memory.transpose(1, 2) if nhd else in_memory, in_memory, 1)
    shape = backend.get_kv_cache_shape(
        num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size
    )
    try:
        order = backend.get_kv_cache_stride_order()
    except (AttributeError, NotImplementedError):
        order = tuple(range(len(shape)))
    in_memory = reserve([shape[axis] for axis in order], torch.bfloat16, device)
    tensor = in_memory.permute([order.index(axis) for axis in range(len(shape))])
    return LayerCache(tensor, in_memory, 1 if len(shape) == 3 else 2)


def cache_place(name: str, num_blocks: int, page_bytes: int) -> KVCacheTensor:
    """What a configuration says of the tensor of a layer that has one of its own."""
    if _SHAPED_BY_BACKENDS:
        return KVCacheTensor(num_blocks * page_bytes, [name])
    return KVCacheTensor(num_blocks * page_bytes, [name], num_blocks * page_bytes, page_bytes)


def resolve_layout(vllm_config: VllmConfig, *, nhd: bool) -> None:
    """Say how caches lie in memory, as engines do before they run; in 0.22.1 backends are asked."""
    if _SHAPED_BY_BACKENDS:
        os.environ["VLLM_KV_CACHE_LAYOUT"] = "NHD" if nhd else "HND"
    else:
        vllm_config.cache_config.kv_cache_layout = "LBNHC" if nhd else "LBHNC"


def results(worker: KVConnectorBase_V1) -> Results:
    """Ask a connector what a runner of the release would ask it."""
    if not compat.FAILED_READS_ARE_NAMED:
        sent, received = worker.get_finished(set())
        failed = worker.get_block_ids_with_load_errors()
        return Results(sent or set(), received or set(), len(failed))
    found = worker.get_transfer_results(set())
    # Ours tells the scheduler of requests that have failed, before they are reported.
    told = worker.build_connector_worker_meta()
    failed = {
        *found.failed_recving,
        *worker.get_block_ids_with_load_errors(),
        *getattr(told, "failed", ()),
    }
    return Results(found.finished_sending, found.finished_recving, len(failed))

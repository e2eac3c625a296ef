# SPDX-License-Identifier: Apache-2.0
"""From the tensors of a worker's KV cache to the planes that `cache` speaks of.

Which axis of a tensor is which is asked of the attention backend itself, by having it name a shape
for sizes that cannot be mistaken for one another. Strides are the tensor's own, so layouts need no
names here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from ..errors import LocalLayoutError
from ..memory.cache import LayerCache, Plane, RankCache
from ..plan.shards import Layer

# Sizes that no backend has a reason to change, and that differ from any head size.
_PROBE_BLOCKS, _PROBE_HEADS = 1009, 7
_PACKING_BACKENDS = frozenset({"CPU_ATTN"})
"""Backends that arrange the tokens of a block for the instruction set."""


_WINDOW_SPECS = (SlidingWindowSpec, ChunkedLocalAttentionSpec)
"""What has blocks for the last tokens of a sequence only."""


@dataclass(frozen=True, slots=True)
class _Axes:
    """Positions of the axes in a layer's tensor; None for an axis that it has not."""

    planes: int | None
    blocks: int
    heads: int | None
    tokens: int
    slot: int


def describe_cache(
    kv_caches: Mapping[str, torch.Tensor],
    kv_cache_config: KVCacheConfig,
    backends: Mapping[str, type[AttentionBackend]],
) -> RankCache:
    """Describe where every layer's keys and values lie in this worker's memory.

    Args:
        kv_caches: The tensor of each layer, as the model runner registers it.
        kv_cache_config: This worker's groups and layers.
        backends: The attention backend of each layer.

    Raises:
        LocalLayoutError: A layer's cache is no attention cache, or its blocks are not equally many,
            or a slot's bytes do not adjoin.
    """
    layers: dict[Layer, LayerCache] = {
        name: LayerCache(_planes(name, kv_caches[name], spec, backends[name]), group)
        for name, (spec, group) in _specs(kv_cache_config).items()
        if name in kv_caches
    }
    if not layers:
        raise LocalLayoutError("no layer of this worker has a KV cache: there is nothing to serve")
    counts = {name: _num_blocks(kv_caches[str(name)], backends[str(name)]) for name in layers}
    num_blocks = next(iter(counts.values()))
    if set(counts.values()) != {num_blocks} or num_blocks % kv_cache_config.num_blocks:
        raise LocalLayoutError(
            f"KV caches with different numbers of blocks ({sorted(set(counts.values()))}, of which "
            f"the scheduler counts {kv_cache_config.num_blocks}) cannot be transferred: use one "
            "attention backend for all layers"
        )
    device = next(iter(kv_caches.values())).get_device()
    return RankCache(
        num_blocks,
        max(device, 0),
        layers,
        blocks_per_id=num_blocks // kv_cache_config.num_blocks,
    )


def memory_regions(kv_caches: Mapping[str, torch.Tensor]) -> list[tuple[int, int, int]]:
    """The memory to register: address, size in bytes and device id, each storage once."""
    regions: dict[int, tuple[int, int, int]] = {}
    for tensor in kv_caches.values():
        storage = tensor.untyped_storage()
        device = max(tensor.get_device(), 0)
        regions[storage.data_ptr()] = (storage.data_ptr(), storage.nbytes(), device)
    return list(regions.values())


def split_layers(
    kv_cache: torch.Tensor,
    kv_cache_config: KVCacheConfig,
    backend: type[AttentionBackend],
) -> dict[str, torch.Tensor]:
    """The cache of each layer, where one tensor holds the blocks of all.

    Args:
        kv_cache: The tensor, its axes in the order in which they lie in memory.
        kv_cache_config: Its tensors are the layers, in the order in which they lie there.
        backend: Says which axis of memory is which of a cache's, the layers before all others.
    """
    in_memory = backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
    by_layer = kv_cache.permute([in_memory.index(axis) for axis in range(kv_cache.ndim)])
    return {
        name: layer
        for layer, tensor in zip(by_layer, kv_cache_config.kv_cache_tensors, strict=True)
        for name in tensor.shared_by
    }


def window_groups(kv_cache_config: KVCacheConfig) -> frozenset[int]:
    """The KV-cache groups that keep the last tokens of a sequence only."""
    return frozenset(
        group for spec, group in _specs(kv_cache_config).values() if isinstance(spec, _WINDOW_SPECS)
    )


def _specs(kv_cache_config: KVCacheConfig) -> dict[str, tuple[KVCacheSpec, int]]:
    """The specification and the group of every layer."""
    specs: dict[str, tuple[KVCacheSpec, int]] = {}
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        for name in group.layer_names:
            own = spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
            specs[name] = own, group_id
    return specs


def _planes(
    name: str, tensor: torch.Tensor, spec: KVCacheSpec, backend: type[AttentionBackend]
) -> tuple[Plane, ...]:
    """The planes of one layer."""
    if not isinstance(spec, (FullAttentionSpec, *_WINDOW_SPECS)):
        raise LocalLayoutError(
            f"layer {name} keeps {type(spec).__name__} state, which is not decoder attention: use "
            "upstream's connector for this model"
        )
    if spec.storage_block_size != spec.block_size:
        raise LocalLayoutError(
            f"layer {name} stores {spec.block_size} tokens in {spec.storage_block_size} slots, "
            "which cannot be told apart: use upstream's connector for this model"
        )
    axes = _axes(backend)
    item_bytes = tensor.element_size()
    strides = [stride * item_bytes for stride in tensor.stride()]
    slot_bytes = tensor.shape[axes.slot] * item_bytes
    if strides[axes.slot] != item_bytes:
        raise LocalLayoutError(
            f"layer {name} spreads a head of a token over memory in steps of {strides[axes.slot]} "
            "bytes, which cannot be transferred: use another attention backend"
        )
    num_planes = 1 if axes.planes is None else tensor.shape[axes.planes]
    plane_stride = 0 if axes.planes is None else strides[axes.planes]
    return tuple(
        Plane(
            address=tensor.data_ptr() + plane * plane_stride,
            block_stride_bytes=strides[axes.blocks],
            head_stride_bytes=slot_bytes if axes.heads is None else strides[axes.heads],
            token_stride_bytes=strides[axes.tokens],
            slot_bytes=slot_bytes,
            num_heads=1 if axes.heads is None else tensor.shape[axes.heads],
            block_tokens=tensor.shape[axes.tokens],
            packed=backend.get_name() in _PACKING_BACKENDS,
        )
        for plane in range(num_planes)
    )


def _num_blocks(tensor: torch.Tensor, backend: type[AttentionBackend]) -> int:
    return int(tensor.shape[_axes(backend).blocks])


def _axes(backend: type[AttentionBackend]) -> _Axes:
    """Ask a backend for a shape, and recognise its axes by their sizes."""
    block_tokens, head_size = 592, 128
    shape = backend.get_kv_cache_shape(
        num_blocks=_PROBE_BLOCKS,
        block_size=block_tokens,
        num_kv_heads=_PROBE_HEADS,
        head_size=head_size,
    )
    found = {size: axis for axis, size in enumerate(shape)}
    planes, heads = found.get(2), found.get(_PROBE_HEADS)
    blocks, tokens = found.get(_PROBE_BLOCKS), found.get(block_tokens)
    rest = set(range(len(shape))) - {planes, heads, blocks, tokens}
    if blocks is None or tokens is None or len(rest) != 1:
        raise LocalLayoutError(
            f"attention backend {backend.get_name()} shapes its KV cache as {tuple(shape)} for "
            f"{_PROBE_BLOCKS} blocks of {block_tokens} tokens, which is not understood: use "
            "another attention backend"
        )
    return _Axes(planes, blocks, heads, tokens, rest.pop())

# SPDX-License-Identifier: Apache-2.0
"""Planes of caches that every attention backend shapes in its own way, which only 0.22.1 has.

Which axis of a tensor is which is asked of the backend itself, by having it name a shape for sizes
that cannot be mistaken for one another. This module goes when that base goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import ASK_FOR_UPSTREAMS, LocalLayoutError
from ...memory.cache import Plane
from .cache_views import Arrangement

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig

# Sizes that no backend has a reason to change, and that differ from any head size.
_PROBE_BLOCKS, _PROBE_HEADS = 1009, 7


@dataclass(frozen=True, slots=True)
class _Axes:
    """Positions of the axes in a layer's tensor; None for an axis that it has not."""

    planes: int | None
    blocks: int
    heads: int | None
    tokens: int
    slot: int


def describe_layer(
    name: str, tensor: torch.Tensor, spec: object, backend: Any, arrangement: Arrangement
) -> tuple[int, tuple[Plane, ...]]:
    """How many blocks a layer has, and its planes.

    Args:
        name: The layer.
        tensor: Its cache.
        spec: Its specification, of which nothing more is to be known.
        backend: Its attention backend.
        arrangement: How that one fills a block.

    Raises:
        LocalLayoutError: The shape is not understood, or a slot's bytes do not adjoin.
    """
    if arrangement not in (Arrangement.SLOTS, Arrangement.HEADS):
        raise LocalLayoutError(
            f"layer {name} uses attention backend {backend.get_name()}, which keeps "
            f"{arrangement.value}: vLLM 0.22.1 does not tell where these lie; use a later release, "
            f"or, {ASK_FOR_UPSTREAMS}"
        )
    axes = _axes(backend)
    item_bytes = tensor.element_size()
    strides = [stride * item_bytes for stride in tensor.stride()]
    slot_bytes = tensor.shape[axes.slot] * item_bytes
    slot_tokens = 1
    if strides[axes.slot] != item_bytes:
        raise LocalLayoutError(
            f"layer {name} spreads a head of a token over memory in steps of {strides[axes.slot]} "
            f"bytes, which cannot be transferred: {ASK_FOR_UPSTREAMS}"
        )
    slot_stride = strides[axes.tokens]
    head_stride = slot_bytes if axes.heads is None else strides[axes.heads]
    if arrangement is Arrangement.HEADS:
        slot_tokens = tensor.shape[axes.tokens]
        slot_bytes = slot_stride = slot_tokens * slot_bytes
    num_planes = 1 if axes.planes is None else tensor.shape[axes.planes]
    plane_stride = 0 if axes.planes is None else strides[axes.planes]
    planes = tuple(
        Plane(
            address=tensor.data_ptr() + plane * plane_stride,
            block_stride_bytes=strides[axes.blocks],
            head_stride_bytes=head_stride,
            slot_stride_bytes=slot_stride,
            slot_bytes=slot_bytes,
            num_heads=1 if axes.heads is None else tensor.shape[axes.heads],
            block_tokens=tensor.shape[axes.tokens],
            slot_tokens=slot_tokens,
        )
        for plane in range(num_planes)
    )
    return tensor.shape[axes.blocks], planes


def split_layers(
    kv_cache: torch.Tensor, kv_cache_config: KVCacheConfig, backend: Any
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


def _axes(backend: Any) -> _Axes:
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
            f"{_PROBE_BLOCKS} blocks of {block_tokens} tokens, which is not understood: "
            f"{ASK_FOR_UPSTREAMS}"
        )
    return _Axes(planes, blocks, heads, tokens, rest.pop())

# SPDX-License-Identifier: Apache-2.0
"""From the tensors of a worker's KV cache to the planes that `cache` speaks of.

Strides are the tensor's own, so layouts need no names here. What a backend does inside a block is
asked of `attention_backends`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from ..errors import LocalLayoutError
from ..memory.cache import LayerCache, Plane, RankCache
from ..plan.shards import Layer
from .attention_backends import packs_tokens
from .compat import describe_layer, tokens_per_slot
from .recurrent_state import describe_state

_WINDOW_SPECS = (SlidingWindowSpec, ChunkedLocalAttentionSpec)
"""What has blocks for the last tokens of a sequence only."""

_SERVED_SPECS = frozenset(
    {
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MLAAttentionSpec,
        SlidingWindowMLASpec,
        SlidingWindowSpec,
    }
)
"""What has a slot for each token, in blocks that are given up from the front if at all. Kinds that
are derived from these keep blocks in other ways: they are not served."""

_MLA_SPECS = (MLAAttentionSpec, SlidingWindowMLASpec)

_SERVED_QUANTIZATIONS = frozenset(
    {"NONE", "FP8_PER_TENSOR", "INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD"}
)
"""Number formats whose scales, if a token has any of its own, lie in its slot."""

_THEIR_OWN: Mapping[str, str] = MappingProxyType({})
"""Other engines know every layer by its own name."""


def describe_cache(
    kv_caches: Mapping[str, torch.Tensor],
    kv_cache_config: KVCacheConfig,
    backends: Mapping[str, type[AttentionBackend]],
    identities: Mapping[str, str] = _THEIR_OWN,
) -> RankCache:
    """Describe where every layer's keys and values lie in this worker's memory, or its state.

    A layer that shares the cache of another one has none of its own, and is left out. Each
    component of a layer's state is a layer by itself.

    Args:
        kv_caches: The tensor of each layer, as the model runner registers it.
        kv_cache_config: This worker's groups and layers.
        backends: The attention backend of each layer.
        identities: By what name other engines know a layer, where it is not its own.

    Raises:
        LocalLayoutError: A layer's cache is none of attention and no state that is known, or it is
            not known how its backend stores, or its blocks are not those of the scheduler, or a
            slot's bytes do not adjoin.
    """
    layers: dict[Layer, LayerCache] = {}
    seen: set[LayerCache] = set()
    for name, (spec, group) in _specs(kv_cache_config).items():
        if name not in kv_caches:
            continue
        tensor, backend, known_as = kv_caches[name], backends[name], identities.get(name, name)
        if type(spec) is MambaSpec:
            blocks_per_id = _blocks_per_id(name, len(tensor), kv_cache_config)
            for part in describe_state(name, tensor, spec):
                # A backend keeps state in other orders on other devices.
                kept = f"{backend.get_name()} of {part.number_format} on {tensor.device.type}"
                layers[f"{known_as}/{part.name}"] = LayerCache(
                    (part.plane,), group, blocks_per_id, kept
                )
            continue
        num_blocks, planes = _describe(name, tensor, spec, backend)
        blocks_per_id = _blocks_per_id(name, num_blocks, kv_cache_config)
        layer = LayerCache(planes, group, blocks_per_id, backend.get_name())
        if layer not in seen:
            layers[known_as] = layer
        seen.add(layer)
    if not layers:
        raise LocalLayoutError("no layer of this worker has a KV cache: there is nothing to serve")
    device = next(iter(kv_caches.values())).get_device()
    return RankCache(kv_cache_config.num_blocks, max(device, 0), layers)


def _blocks_per_id(name: str, num_blocks: int, kv_cache_config: KVCacheConfig) -> int:
    """Blocks of a layer that one block id of the scheduler stands for."""
    blocks_per_id: int
    blocks_per_id, remaining = divmod(num_blocks, kv_cache_config.num_blocks)
    if remaining:
        raise LocalLayoutError(
            f"layer {name} has a KV cache of {num_blocks} blocks, and the scheduler counts "
            f"{kv_cache_config.num_blocks}, which do not divide them: use another attention backend"
        )
    return blocks_per_id


def memory_regions(kv_caches: Mapping[str, torch.Tensor]) -> list[tuple[int, int, int]]:
    """The memory to register: address, size in bytes and device id, each storage once."""
    regions: dict[int, tuple[int, int, int]] = {}
    for tensor in kv_caches.values():
        storage = tensor.untyped_storage()
        device = max(tensor.get_device(), 0)
        regions[storage.data_ptr()] = (storage.data_ptr(), storage.nbytes(), device)
    return list(regions.values())


def window_groups(kv_cache_config: KVCacheConfig) -> frozenset[int]:
    """The KV-cache groups that keep the last tokens of a sequence only."""
    return frozenset(
        group for spec, group in _specs(kv_cache_config).values() if isinstance(spec, _WINDOW_SPECS)
    )


def state_groups(kv_cache_config: KVCacheConfig) -> frozenset[int]:
    """The KV-cache groups that keep one state of a sequence, and not its tokens."""
    return frozenset(
        group for spec, group in _specs(kv_cache_config).values() if isinstance(spec, MambaSpec)
    )


def token_layers(kv_cache_config: KVCacheConfig) -> list[str]:
    """The layers that keep tokens, and not state."""
    specs = _specs(kv_cache_config)
    return [name for name, (spec, _) in specs.items() if not isinstance(spec, MambaSpec)]


def latent_layers(
    kv_cache_config: KVCacheConfig, identities: Mapping[str, str] = _THEIR_OWN
) -> frozenset[Layer]:
    """The layers whose cache is MLA's: one latent, which every rank holds.

    That of an indexer beside MLA is such a one, too.

    Args:
        kv_cache_config: This worker's groups and layers.
        identities: By what name other engines know a layer, where it is not its own.
    """
    return frozenset(
        identities.get(name, name)
        for name, (spec, _) in _specs(kv_cache_config).items()
        if isinstance(spec, _MLA_SPECS)
    )


def _specs(kv_cache_config: KVCacheConfig) -> dict[str, tuple[KVCacheSpec, int]]:
    """The specification and the group of every layer that has a cache of its own.

    One that shares another's may be named in a group all the same, with no specification there.
    """
    specs: dict[str, tuple[KVCacheSpec, int]] = {}
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        own = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else None
        for name in group.layer_names:
            if own is None or name in own:
                specs[name] = (spec if own is None else own[name]), group_id
    return specs


def _describe(
    name: str, tensor: torch.Tensor, spec: Any, backend: type[AttentionBackend]
) -> tuple[int, tuple[Plane, ...]]:
    """How many blocks a layer has, and its planes."""
    if type(spec) not in _SERVED_SPECS:
        raise LocalLayoutError(
            f"layer {name} keeps {type(spec).__name__} state, which is not decoder attention: use "
            "upstream's connector for this model"
        )
    if (tokens := tokens_per_slot(spec)) != 1:
        raise LocalLayoutError(
            f"layer {name} stores {tokens:g} tokens in a slot, which cannot be told apart: use "
            "upstream's connector for this model"
        )
    if spec.kv_quant_mode.name not in _SERVED_QUANTIZATIONS:
        raise LocalLayoutError(
            f"layer {name} quantizes its KV cache as {spec.kv_quant_mode.name}, whose scales do "
            "not lie beside what they scale: use another --kv-cache-dtype, such as fp8"
        )
    packed = packs_tokens(name, backend)
    return describe_layer(name, tensor, spec, backend, packed=packed)

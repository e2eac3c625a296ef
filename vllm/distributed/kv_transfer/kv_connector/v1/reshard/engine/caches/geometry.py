# SPDX-License-Identifier: Apache-2.0
"""Describes the tensors of a worker's KV cache as the planes of `memory.cache`.

Strides are read from each tensor, so no layout needs a name here. `cache_formats` describes what a
backend stores inside a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

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

from ...errors import ASK_FOR_UPSTREAMS, LocalLayoutError
from ...memory.cache import LayerCache, Plane
from ...plan.shards import Layer
from ..compat import (
    CACHES_ARE_VIEWS,
    describe_layer,
    is_on_every_rank,
    loses_its_middle,
    shares_tokens,
    tokens_per_slot,
)
from .cache_formats import cache_format
from .cache_views import Arrangement
from .ownership import Split, WorkerLayer
from .recurrent_state import describe_state, is_known_state

_WINDOW_SPECS = (SlidingWindowSpec, ChunkedLocalAttentionSpec)
"""Kinds of layers that keep only the last tokens of a sequence."""

_SERVED_SPECS = frozenset(
    {
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MLAAttentionSpec,
        SlidingWindowMLASpec,
        SlidingWindowSpec,
    }
)
"""Kinds of layers with a slot per token. Their blocks are freed only from the front, if at all.
Subclasses keep blocks differently, and are not served."""

_MLA_SPECS = (MLAAttentionSpec, SlidingWindowMLASpec)


def layers_of_worker(
    kv_caches: Mapping[str, torch.Tensor],
    kv_cache_config: KVCacheConfig,
    backends: Mapping[str, type[AttentionBackend]],
    identities: Mapping[str, str] = MappingProxyType({}),
    settings: str = "",
) -> dict[Layer, WorkerLayer]:
    """Describe every layer of this worker, under the name by which other engines know it.

    The order is that of the groups. A layer that shares another layer's cache is left out. Each
    component of a layer's state becomes a separate layer.

    Args:
        kv_caches: The tensor of each layer, as the model runner registers it.
        kv_cache_config: This worker's groups and layers.
        backends: The attention backend of each layer.
        identities: Names in other engines of the layers that have another name there.
        settings: Further settings that may affect the format of unknown backends.

    Raises:
        LocalLayoutError: A layer cannot be served, its blocks do not match the scheduler's, or
            they are not contiguous although they must be.
    """
    layers: dict[Layer, WorkerLayer] = {}
    seen: set[tuple[tuple[Plane, ...], int]] = set()
    for name, (spec, group) in _specs(kv_cache_config).items():
        if name not in kv_caches:
            continue
        if not _is_served(spec):
            raise LocalLayoutError(_not_served(name, spec))
        tensor, backend, known_as = kv_caches[name], backends[name], identities.get(name, name)
        if type(spec) is MambaSpec:
            blocks_per_id = _blocks_per_id(name, len(tensor), kv_cache_config)
            split = Split.LATENT if is_on_every_rank(spec) else Split.UNITS
            for part in describe_state(tensor, spec):
                # The order in which a backend stores the state depends on the device.
                meaning = {
                    "state": f"{backend.get_name()} on {tensor.device.type}",
                    "numbers of the state": part.number_format,
                }
                cache = LayerCache((part.plane,), group, blocks_per_id, meaning)
                layers[f"{known_as}/{part.name}"] = WorkerLayer(cache, split)
            continue
        kept = cache_format(backend, spec, tensor, settings)
        num_blocks, planes = describe_layer(name, tensor, spec, backend, kept.arrangement)
        blocks_per_id = _blocks_per_id(name, num_blocks, kv_cache_config)
        if (planes, group) not in seen:
            cache = LayerCache(planes, group, blocks_per_id, kept.meaning, kept.keys_lead)
            split = _split_of(spec, kept.arrangement)
            layers[known_as] = WorkerLayer(cache, split, shares_tokens(spec))
        seen.add((planes, group))
    if not layers:
        raise LocalLayoutError(
            "no layer of this worker has a KV cache, so that there is nothing to read: give every "
            "stage a layer that has one with VLLM_PP_LAYER_PARTITION, or leave out "
            "--kv-transfer-config"
        )
    return layers


def _split_of(spec: KVCacheSpec, arrangement: Arrangement) -> Split:
    """Return how the ranks of a stage divide a layer that keeps tokens."""
    if isinstance(spec, _MLA_SPECS):
        return Split.LATENT
    return Split.RANKS if arrangement is Arrangement.PAGE else Split.UNITS


def unserved_layer(
    kv_cache_config: KVCacheConfig, num_shares: int = 1, *, over_pcp: bool = False
) -> str | None:
    """Return why a layer cannot be served with any backend; None if all layers can be.

    Args:
        kv_cache_config: The groups and layers of a worker, or of its engine's scheduler.
        num_shares: Number of ranks that divide the tokens of a layer between them, if they do.
        over_pcp: True if these ranks span prefill context parallelism, which divides prompts.
    """
    for name, (spec, _) in _specs(kv_cache_config).items():
        if not _is_served(spec):
            return _not_served(name, spec)
        if num_shares > 1 and shares_tokens(spec) and tokens_per_slot(spec) != 1:
            return (
                f"layer {name} has one slot for several tokens, and with "
                f"--decode-context-parallel-size {num_shares} it is not known which rank has which"
            )
        # State of every TP rank, too: vLLM keeps no state with prefill context parallelism, so that
        # nothing says whether ranks that compute parts of a prompt end with the same one.
        if over_pcp and not isinstance(spec, _MLA_SPECS):
            return (
                f"layer {name} keeps no latent, and where --decode-context-parallel-size "
                f"{num_shares} spans --prefill-context-parallel-size, ranks count as of one "
                "latent"
            )
    return None


def tokens_of_blocks(kv_cache_config: KVCacheConfig, num_shares: int) -> list[int]:
    """Return the number of tokens that one block id covers, for each KV-cache group.

    Args:
        kv_cache_config: The groups of an engine's scheduler.
        num_shares: Number of ranks that divide the tokens of a layer between them, if they do.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return [spec.block_size * (num_shares if shares_tokens(spec) else 1) for spec in specs]


def _blocks_per_id(name: str, num_blocks: int, kv_cache_config: KVCacheConfig) -> int:
    """Return the number of a layer's blocks that one block id of the scheduler covers."""
    blocks_per_id: int
    blocks_per_id, remaining = divmod(num_blocks, kv_cache_config.num_blocks)
    if remaining:
        raise LocalLayoutError(
            f"layer {name} has a KV cache of {num_blocks} blocks, and the scheduler counts "
            f"{kv_cache_config.num_blocks}, which do not divide them: {ASK_FOR_UPSTREAMS}"
        )
    return blocks_per_id


def memory_regions(kv_caches: Mapping[str, torch.Tensor]) -> list[tuple[int, int, int]]:
    """Return the memory to register: address, bytes and device id of each distinct storage."""
    regions: dict[int, tuple[int, int, int]] = {}
    for tensor in kv_caches.values():
        storage = tensor.untyped_storage()
        device = max(tensor.get_device(), 0)
        regions[storage.data_ptr()] = (storage.data_ptr(), storage.nbytes(), device)
    return list(regions.values())


def window_groups(kv_cache_config: KVCacheConfig) -> frozenset[int]:
    """Return the KV-cache groups that keep only the last tokens of a sequence."""
    return frozenset(
        group for spec, group in _specs(kv_cache_config).values() if isinstance(spec, _WINDOW_SPECS)
    )


def state_groups(kv_cache_config: KVCacheConfig) -> frozenset[int]:
    """Return the KV-cache groups that keep one state per sequence instead of its tokens."""
    return frozenset(
        group for spec, group in _specs(kv_cache_config).values() if isinstance(spec, MambaSpec)
    )


def full_groups(kv_cache_config: KVCacheConfig) -> frozenset[int]:
    """Return the KV-cache groups that keep all tokens of a sequence."""
    groups = frozenset(group for _, group in _specs(kv_cache_config).values())
    return groups - window_groups(kv_cache_config) - state_groups(kv_cache_config)


def token_layers(kv_cache_config: KVCacheConfig) -> list[str]:
    """Return the layers that keep tokens, not state."""
    specs = _specs(kv_cache_config)
    return [name for name, (spec, _) in specs.items() if not isinstance(spec, MambaSpec)]


def keeps_no_middle(kv_cache_config: KVCacheConfig) -> bool:
    """Return whether a layer keeps only a prompt and the last tokens of its answer."""
    return any(loses_its_middle(spec) for spec, _ in _specs(kv_cache_config).values())


def _specs(kv_cache_config: KVCacheConfig) -> dict[str, tuple[KVCacheSpec, int]]:
    """Return the specification and the group of every layer that has its own cache.

    A layer that shares another's cache may still be named in a group, without a specification.
    """
    specs: dict[str, tuple[KVCacheSpec, int]] = {}
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        own = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else None
        for name in group.layer_names:
            if own is None or name in own:
                specs[name] = (spec if own is None else own[name]), group_id
    return specs


def _is_served(spec: KVCacheSpec) -> bool:
    """Return whether a layer keeps state of a known structure, or has slots for its tokens.

    Several tokens may share a slot only if caches are views. A latent is one head on each rank.
    """
    if type(spec) is MambaSpec:
        return is_known_state(spec)
    if type(spec) not in _SERVED_SPECS and not loses_its_middle(spec):
        return False
    if isinstance(spec, _MLA_SPECS) and spec.num_kv_heads != 1:
        return False
    return CACHES_ARE_VIEWS or tokens_per_slot(spec) == 1


def _not_served(name: str, spec: KVCacheSpec) -> str:
    return f"layer {name} keeps {type(spec).__name__} in a form that is not known here"

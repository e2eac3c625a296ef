# SPDX-License-Identifier: Apache-2.0
"""Engines from sizes alone: layers that keep KV heads, or one latent, and nothing else.

Where vLLM is installed, it is asked for more (`asking`). Without it, a `config.json` is understood
only of families that are known to be this plain.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..memory.cache import LayerCache, Plane, RankCache
from ..plan.shards import Layer, Shard, shard_model
from .engines import Answer, Engine, Group
from .layouts import EngineLayout

_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
_HEADS = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"})
_LATENTS = frozenset({"deepseek_v2", "deepseek_v3", "kimi_k2"})
_BLOCK_TOKENS = 16
_GIVE_SIZES = "give --num-layers, --num-kv-heads and --head-size, or install vLLM here"


@dataclass(frozen=True, slots=True)
class Sizes:
    """A model whose layers are alike.

    Attributes:
        num_layers: Number of layers.
        num_kv_heads: KV heads of each layer; 1 for a latent.
        head_size: Elements of a key, and of a value, of one head; of the latent.
        is_latent: True if one latent replaces keys and values (MLA).
        dtype: Name of the elements' type.
    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    is_latent: bool = False
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_size"):
            if not isinstance(size := getattr(self, name), int) or not 1 <= size <= 1 << 13:
                raise ValueError(f"{name} is {size!r} but must be between 1 and {1 << 13}")
        if self.dtype not in _ELEMENT_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(_ELEMENT_BYTES)}")

    def __str__(self) -> str:
        heads = f"{self.num_kv_heads} KV head{'s' * (self.num_kv_heads != 1)}"
        heads = "one latent (MLA)" if self.is_latent else heads
        layers = f"{self.num_layers} layer{'s' * (self.num_layers != 1)}"
        return f"{layers}, {heads} of {self.head_size} {self.dtype}"


def read_config(model: str) -> Sizes:
    """Return the sizes in a plain model's `config.json`.

    Raises:
        ValueError: It cannot be read, or is not known to be plain.
    """
    path = Path(model, "config.json")
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}): give the directory of a model"
        ) from error
    family = config.get("model_type") if isinstance(config, dict) else None
    has_windows = isinstance(config, dict) and (
        bool(config.get("sliding_window")) and config.get("use_sliding_window") is not False
    )
    if family not in _HEADS | _LATENTS or has_windows:
        what = f"{family!r} with windows" if has_windows else repr(family)
        raise ValueError(f"{path}: what models of type {what} keep, vLLM knows: {_GIVE_SIZES}")
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    try:
        if family in _LATENTS:
            latent = config["kv_lora_rank"] + config["qk_rope_head_dim"]
            return Sizes(config["num_hidden_layers"], 1, latent, is_latent=True, dtype=dtype)
        num_heads = config["num_attention_heads"]
        return Sizes(
            config["num_hidden_layers"],
            config.get("num_key_value_heads") or num_heads,
            config.get("head_dim") or config["hidden_size"] // num_heads,
            dtype=dtype,
        )
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{path} does not give {error}: {_GIVE_SIZES}") from error


def from_sizes(sizes: Sizes, source: str, layouts: Sequence[EngineLayout]) -> Answer:
    """Return two engines of a plain model.

    Args:
        sizes: The model.
        source: Where its sizes are from.
        layouts: Layout of the engine that is read from, and of the one that reads.

    Raises:
        ValueError: vLLM could not run the model with one of the layouts.
    """
    prefill, decode = (_engine(sizes, each) for each in layouts)
    return Answer(str(sizes), source, None, False, (prefill, decode))


def _engine(sizes: Sizes, layout: EngineLayout) -> Engine:
    block_tokens = layout.block_tokens or _BLOCK_TOKENS
    run_tokens = layout.run_tokens or block_tokens
    if block_tokens % run_tokens:
        raise ValueError(
            f"its interleave size is {run_tokens} but must divide the {block_tokens} tokens of a "
            "block"
        )
    if layout.num_copies > 1 and not sizes.is_latent:
        raise ValueError("vLLM has prefill context parallelism for MLA only: leave pcp out")
    shards = shard_model(
        *(layout.mesh, sizes.num_layers, sizes.num_kv_heads, layout.partition or None),
        *(layout.num_shares, run_tokens),
    )
    name = "latent" if sizes.is_latent else "heads"
    named = [
        Shard(each.rank, {f"{layer}.{name}": held for layer, held in each.holdings.items()})
        for each in shards
    ]
    group = Group(block_tokens * layout.num_shares)
    caches = [_cache(sizes, each, block_tokens) for each in named]
    return Engine(layout, tuple(named), caches, (group,))


def _cache(sizes: Sizes, shard: Shard, block_tokens: int) -> RankCache:
    """Return a cache in which heads come before tokens (HND), and a head's key before its value."""
    slot_bytes = (1 if sizes.is_latent else 2) * sizes.head_size * _ELEMENT_BYTES[sizes.dtype]
    page_bytes = block_tokens * slot_bytes
    layers: dict[Layer, LayerCache] = {}
    for layer, holding in shard.holdings.items():
        num_heads = len(holding.units)
        strides = (num_heads * page_bytes, page_bytes, slot_bytes, slot_bytes)
        layers[layer] = LayerCache((Plane(0, *strides, num_heads, block_tokens),), 0)
    return RankCache(1, 0, layers)

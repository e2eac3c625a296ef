# SPDX-License-Identifier: Apache-2.0
"""Caches that families of models keep beside the heads or the latent of attention, or instead.

An engine uses the specification of each layer. Here, entries of `config.json` identify the family,
and this module lists its caches: indexers, compressed tokens, windows, and caches that only
upstream's connector serves. Sizes that are not in `config.json` are copied from vLLM's modules;
tests compare them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from ..plan.mesh import MeshRank, ParallelMesh
from ..plan.shards import Holding, Layer, Shard, shard_model
from .limits import require_size

_FLOAT32_BYTES, _BFLOAT16_BYTES = 4, 2

_INDEXER_BLOCK_TOKENS = 64
"""Block size of `DeepseekV32IndexerBackend`'s kernels, for any `--block-size`."""

_V4_BLOCK_TOKENS = 256
"""Block size of DeepSeek V4's kernels, in tokens before compression."""

_V4_LATENT_BYTES = 584
"""Size of DeepSeek V4's `fp8_ds_mla`: 448 bytes without position, 64 bfloat16 with it, 8 scales."""

_V4_WINDOW_BLOCK_TOKENS = 64
"""Block size of `DeepseekV4SWACache`."""

_V4_STATE_BLOCK_TOKENS = {4: 4, 128: 8}
"""Block size of `CompressorStateCache`, by the number of tokens that are compressed into one."""

_INDEXER_SCALED = 128
"""One-byte elements of an indexer's key that share one float32 scale."""

_DRAFT_LAYERS = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")
"""Entries with the number of MTP layers, in different families."""

SPARSE_LAYERS = frozenset(
    {
        *("sparse", "sparse_attention", "indexed_attention", "deepseek_sparse_attention"),
        "minimax_m3_sparse",
    }
)
"""Kinds of layers with sparse attention, in different families."""

_RING = "a ring of each request (CircularBufferSpec)"


@dataclass(frozen=True, slots=True)
class Cache:
    """One kind of cache.

    Attributes:
        name: Its name.
        layers: Indices of the layers that keep it.
        state_bytes: Bytes per unit and per `state_tokens` tokens; 0 if this connector does not
            serve it.
        num_units: Number of units, which the ranks of a stage divide like KV heads; 1 if every rank
            keeps the same.
        state_tokens: Number of tokens that are compressed into one.
        block_tokens: Tokens in a block; None if `--block-size` sets it.
        window_tokens: Number of last tokens of a sequence that are kept; 0 for all.
        is_whole: True if blocks are opaque and moved whole.
        unserved: Description of a cache that this connector does not serve; empty if it does.
    """

    name: str
    layers: tuple[int, ...]
    state_bytes: int = 0
    num_units: int = 1
    state_tokens: int = 1
    block_tokens: int | None = None
    window_tokens: int = 0
    is_whole: bool = False
    unserved: str = ""


@dataclass(frozen=True, slots=True)
class CacheRow:
    """One kind of cache, as a row of the printed table.

    Attributes:
        name: Its name.
        layers: Indices of the layers that keep it.
        moved: How it is moved.
        state_tokens: Number of tokens that are compressed into one.
        block_tokens: Tokens in a block at prefill and at decode; None if unknown.
        window_tokens: Number of last tokens of a sequence that are kept; 0 for all.
        token_bytes: Bytes of one token in one layer, over all heads; None if unknown.
    """

    name: str
    layers: tuple[int, ...]
    moved: str
    state_tokens: int
    block_tokens: tuple[int, int] | None
    window_tokens: int
    token_bytes: float | None


@dataclass(frozen=True, slots=True)
class ReadPart:
    """The part of a read that belongs to one kind of cache.

    Attributes:
        name: The kind's name.
        layers: Indices of its layers.
        token_bytes: Bytes of one token, over all of these layers.
    """

    name: str
    layers: tuple[int, ...]
    token_bytes: float


@dataclass(frozen=True, slots=True)
class Family:
    """The caches of a family of models.

    Attributes:
        name: Its name, for messages.
        caches: Its caches other than heads or latent.
        has_main: True if it also keeps heads or a latent.
        chooses_fp8_on_blackwell: True if vLLM stores its cache in 8 bits there by default.
    """

    name: str
    caches: tuple[Cache, ...] = ()
    has_main: bool = True
    chooses_fp8_on_blackwell: bool = False

    @property
    def is_served(self) -> bool:
        """True if this connector serves all of its caches."""
        return not self.unserved

    @property
    def unserved(self) -> tuple[Cache, ...]:
        """The caches that this connector does not serve."""
        return tuple(each for each in self.caches if each.unserved)


_Config: TypeAlias = Mapping[str, Any]


def read_family(config: _Config, model_type: str, num_layers: int) -> Family | None:
    """Return the family of a model with caches other than heads, latent and state; else None.

    Args:
        config: The decoder's part of `config.json`.
        model_type: The `model_type` of the whole model.
        num_layers: Number of layers of the model.

    Raises:
        ValueError: `config` does not describe the family's caches.
    """
    for name in (config.get("model_type"), model_type):
        if (read := _FAMILIES.get(str(name))) is not None:
            return read(config, range(num_layers))
    # vLLM treats all models derived from DeepSeek's like this.
    if config.get("kv_lora_rank") and config.get("index_topk"):
        return _with_indexers("MLA with an indexer", config, range(num_layers))
    return None


def shard_kinds(
    mesh: ParallelMesh,
    num_layers: int,
    units_by_kind: Mapping[str, Mapping[int, int]],
    layers_per_stage: Sequence[int] | None,
) -> tuple[Shard, ...]:
    """Return every rank's shard of several kinds of cache, with one plan layer per layer and kind.

    Args:
        mesh: The engine's workers.
        num_layers: Number of layers of the model.
        units_by_kind: Number of units by layer index, for each kind's name.
        layers_per_stage: As in `partition_layers`.

    Raises:
        LocalLayoutError: vLLM could not run the model on this mesh.
    """
    holdings: dict[MeshRank, dict[Layer, Holding]] = {rank: {} for rank in mesh.ranks()}
    for kind, units in units_by_kind.items():
        for shard in shard_model(mesh, num_layers, units, layers_per_stage):
            holdings[shard.rank] |= {
                f"{layer}/{kind}": holding for layer, holding in shard.holdings.items()
            }
    return tuple(Shard(rank, held) for rank, held in holdings.items())


def draft_layers(config: _Config) -> int:
    """Return the checkpoint's number of MTP layers, which engines with speculative decoding run."""
    numbers = (config.get(name) for name in _DRAFT_LAYERS)
    return next((each for each in numbers if isinstance(each, int) and each > 0), 0)


def _with_indexers(
    name: str, config: _Config, layers: range, *, chooses_fp8_on_blackwell: bool = False
) -> Family:
    """DeepSeek V3.2 and similar models: some layers choose tokens, others reuse their choice."""
    size = _number(config, "index_head_dim", 128)
    chosen = tuple(layer for layer in layers if _has_indexer(config, layer))
    indexer = Cache(
        "indexer", chosen, _indexer_bytes(size), block_tokens=_INDEXER_BLOCK_TOKENS, is_whole=True
    )
    return Family(name, (indexer,), chooses_fp8_on_blackwell=chooses_fp8_on_blackwell)


def _has_indexer(config: _Config, layer: int) -> bool:
    kinds, types = config.get("layer_types"), config.get("indexer_types")
    if config.get("model_type") == "hy_v4":
        if not (kinds and kinds[layer] in SPARSE_LAYERS):
            return False
        if types:
            return bool(types[layer] == "full")
    pattern = config.get("index_topk_pattern")
    if pattern is not None:
        return not (layer < len(pattern) and pattern[layer] == "S")
    # The first layers always have one.
    offset = int(config.get("index_skip_topk_offset", 2))
    return not max(layer - offset + 1, 0) % _number(config, "index_topk_freq", 1)


def _indexer_bytes(size: int) -> int:
    return size + size // _INDEXER_SCALED * _FLOAT32_BYTES


def _deepseek_v4(config: _Config, layers: range) -> Family:
    """Up to seven kinds of cache; a layer's compression ratio determines which it has."""
    ratios = config.get("compress_ratios")
    if not isinstance(ratios, Sequence) or len(ratios) < len(layers):
        raise ValueError(
            f"compress_ratios does not tell of {len(layers)} layers how many tokens each of them "
            "compresses: correct config.json"
        )
    if strangers := {ratios[layer] for layer in layers} - {0, 1, 4, 128}:
        raise ValueError(
            f"compress_ratios has {sorted(strangers)} but must be of 0, 4 and 128: use another "
            "model, or a later release"
        )
    c4, c128 = (tuple(each for each in layers if ratios[each] == ratio) for ratio in (4, 128))
    size, index_size = _number(config, "head_dim", 512), _number(config, "index_head_dim", 128)
    window = _number(config, "sliding_window", 128)

    def main(ratio: int, own: tuple[int, ...]) -> Cache:
        return Cache(
            *(f"C{ratio}", own, _V4_LATENT_BYTES, 1, ratio, _V4_BLOCK_TOKENS), is_whole=True
        )

    def state(name: str, ratio: int, own: tuple[int, ...], of: int) -> Cache:
        # Each group of four overlaps with the previous one. A value and a score are kept.
        overlap = 2 if ratio == 4 else 1
        return Cache(
            name,
            own,
            2 * overlap * of * _FLOAT32_BYTES,
            block_tokens=_V4_STATE_BLOCK_TOKENS[ratio],
            window_tokens=overlap * ratio,
        )

    kinds = (
        main(4, c4),
        main(128, c128),
        Cache(
            "window",
            tuple(layers),
            _V4_LATENT_BYTES,
            block_tokens=_V4_WINDOW_BLOCK_TOKENS,
            window_tokens=window,
            is_whole=True,
        ),
        state("state of C4", 4, c4, size),
        state("state of C128", 128, c128, size),
        Cache("indexer", c4, _indexer_bytes(index_size), 1, 4, _V4_BLOCK_TOKENS, is_whole=True),
        state("state of indexer", 4, c4, index_size),
    )
    return Family("DeepSeek V4", tuple(each for each in kinds if each.layers), has_main=False)


def _minimax_m3(config: _Config, layers: range) -> Family:
    """Some layers keep keys by which blocks are chosen."""
    sparse = config.get("sparse_attention_config") or {}
    flags = sparse.get("sparse_attention_freq") or ()
    chosen = tuple(layer for layer in layers if layer < len(flags) and flags[layer])
    size = _number(sparse, "sparse_index_dim", 128) * _BFLOAT16_BYTES
    keys = Cache("index keys", chosen, size)
    return Family("MiniMax M3", (keys,) if chosen else ())


def _inkling(config: _Config, layers: range) -> Family:
    """Every layer keeps its convolutions' inputs: of keys, values and hidden states.

    A rank keeps the part of its own heads, and an equal share of the hidden states.
    """
    # Treat null entries as missing.
    config = {name: value for name, value in config.items() if value is not None}
    hidden = _number(config, "hidden_size", 1536)
    heads = _number(config, "num_key_value_heads", 4)
    size = _number(config, "head_dim", hidden // _number(config, "num_attention_heads", 12))
    tokens = _number(config, "sconv_kernel_size", _number(config, "conv_kernel_size", 4))
    windowed = frozenset(config.get("local_layer_ids") or ())

    def inputs(name: str, own: list[int], heads: int, size: int) -> Cache:
        elements = 2 * size + 2 * (hidden // heads)
        # Round up to a power of two.
        elements = 1 << (elements - 1).bit_length()
        return Cache(
            *(name, tuple(own), elements * _BFLOAT16_BYTES, heads),
            block_tokens=tokens,
            window_tokens=tokens,
            is_whole=True,
        )

    kinds = (
        inputs("conv inputs", [each for each in layers if each not in windowed], heads, size),
        inputs(
            "conv inputs with a window",
            [each for each in layers if each in windowed],
            _number(config, "swa_num_key_value_heads", heads),
            _number(config, "swa_head_dim", size),
        ),
    )
    return Family("Inkling", tuple(each for each in kinds if each.layers))


def _deepseek_v41(config: _Config, layers: range) -> Family:
    """Layers that compress several tokens into one, and from which other layers take theirs."""
    ratios, sources = config.get("compress_ratios") or (), config.get("kv_source_layer_ids") or ()
    own = [each for each in layers if each in sources and each < len(ratios) and ratios[each] > 1]
    return _upstreams("DeepSeek V4.1", "states of the compressor", own)


def _glm5_next(config: _Config, layers: range) -> Family:
    """Layers with an indexer, which keeps the tokens of a pool until it is full."""
    own = (
        [] if config.get("index_topk", 1) is None else _without(config, "linear_attention", layers)
    )
    return _upstreams("GLM 5.3 Flash", "keys of an open pool", own)


def _qwen4(config: _Config, layers: range) -> Family:
    """Layers with an indexer, which keeps the tokens of a group until it is full."""
    own = _without(config, "linear_attention", layers) if config.get("indexer_n_heads") else []
    return _upstreams("Qwen4", "keys of an open group", own)


def _step5(config: _Config, layers: range) -> Family:
    """Layers without a window, which keep the rows of a region until it is full."""
    sparse = config.get("sparse_config") or {"enabled": False}
    own = [] if sparse.get("enabled") is False else _without(config, "sliding_attention", layers)
    return _upstreams("Step 5", "rows of an open region", own)


def _upstreams(name: str, kind: str, layers: Sequence[int]) -> Family:
    """Return a family whose layers keep a ring per request, which this connector does not serve."""
    return Family(name, (Cache(kind, tuple(layers), unserved=_RING),) if layers else ())


def _without(config: _Config, kind: str, layers: range) -> list[int]:
    """Return the layers that are not of this kind."""
    kinds = config.get("layer_types") or ()
    return [layer for layer in layers if not (layer < len(kinds) and kinds[layer] == kind)]


def _number(config: _Config, name: str, default: int) -> int:
    """Return an entry that is an integer of at least 1, or the family's default if it is missing.

    Raises:
        ValueError: The entry is something else.
    """
    value = config.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r} but must be a number of at least 1: correct it")
    require_size(name, value)
    return value


_FAMILIES: Mapping[str, Callable[[_Config, range], Family]] = {
    "deepseek_v32": partial(_with_indexers, "DeepSeek V3.2"),
    "deepseek_v4": _deepseek_v4,
    "deepseek_v41": _deepseek_v41,
    "glm5_next": _glm5_next,
    "glm5_next_text": _glm5_next,
    "glm_moe_dsa": partial(_with_indexers, "GLM 5", chooses_fp8_on_blackwell=True),
    "hy_v4": partial(_with_indexers, "HY V4"),
    "inkling_mm_model": _inkling,
    "inkling_model": _inkling,
    "minimax_m3_text": _minimax_m3,
    "minimax_m3_vl": _minimax_m3,
    "qwen4_exp": _qwen4,
    "qwen4_exp_text": _qwen4,
    "step5": _step5,
    "step5_vl": _step5,
}
"""By `model_type`."""

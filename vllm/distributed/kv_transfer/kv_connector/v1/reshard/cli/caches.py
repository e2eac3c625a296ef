# SPDX-License-Identifier: Apache-2.0
"""Caches that families of models keep beside the heads or the latent of attention, or instead.

Engines ask the specification of each layer. Here a family is known by names in `config.json`, and
what it keeps is a table: indexers, what is compressed, windows, and what upstream's connector is
left with. Sizes that `config.json` does not tell are those of vLLM's modules, which tests compare.
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
"""Of `DeepseekV32IndexerBackend`'s kernels; whatever `--block-size` is."""

_V4_BLOCK_TOKENS = 256
"""Of DeepSeek V4's kernels, in tokens that are compressed or not."""

_V4_LATENT_BYTES = 584
"""Of `fp8_ds_mla` in DeepSeek V4: 448 bytes without a position, 64 bfloat16 with it, 8 scales."""

_V4_WINDOW_BLOCK_TOKENS = 64
"""Of `DeepseekV4SWACache`."""

_V4_STATE_BLOCK_TOKENS = {4: 4, 128: 8}
"""Of `CompressorStateCache`, by how many tokens become one."""

_INDEXER_SCALED = 128
"""Elements of an indexer's key, of a byte each, that have one scale, a float32."""

_DRAFT_LAYERS = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")
"""What families call the number of their MTP layers."""

SPARSE_LAYERS = frozenset(
    {
        *("sparse", "sparse_attention", "indexed_attention", "deepseek_sparse_attention"),
        "minimax_m3_sparse",
    }
)
"""What families call layers whose attention is sparse, which may be some of all."""

_RING = "a ring of each request (CircularBufferSpec)"


@dataclass(frozen=True, slots=True)
class Cache:
    """One kind of cache.

    Attributes:
        name: What it is called.
        layers: The layers that keep it, by index.
        state_bytes: Of what a unit of it keeps of one token, or of `state_tokens` together; 0
            where this connector does not serve it.
        num_units: What ranks of a stage share out as they do KV heads; 1 where all keep it alike.
        state_tokens: Tokens that are kept as one.
        block_tokens: Tokens in a block; None where `--block-size` says so.
        window_tokens: The last tokens of a sequence, which are all that is kept; 0 for all.
        is_whole: Blocks are moved without looking into them.
        unserved: What it is, if this connector does not serve it.
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
    """One kind of cache, for a table of them.

    Attributes:
        name: What it is called.
        layers: The layers that keep it, by index.
        moved: How it is moved.
        state_tokens: Tokens that are kept as one.
        block_tokens: Tokens in a block at prefill and at decode; None where that is not told.
        window_tokens: The last tokens of a sequence, which are all that is kept; 0 for all.
        token_bytes: Of one token in one layer, of all its heads; None where that is not told.
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
    """A read's part of one kind of cache.

    Attributes:
        name: What the kind is called.
        layers: Its layers, by index.
        token_bytes: Of one token, in all of them.
    """

    name: str
    layers: tuple[int, ...]
    token_bytes: float


@dataclass(frozen=True, slots=True)
class Family:
    """What a family keeps.

    Attributes:
        name: Its name, for messages.
        caches: What it keeps beside its heads or its latent.
        has_main: It keeps these as well.
        chooses_fp8_on_blackwell: vLLM keeps its cache in 8 bits there, unless told otherwise.
    """

    name: str
    caches: tuple[Cache, ...] = ()
    has_main: bool = True
    chooses_fp8_on_blackwell: bool = False

    @property
    def is_served(self) -> bool:
        """Whether this connector serves all of it."""
        return not self.unserved

    @property
    def unserved(self) -> tuple[Cache, ...]:
        """What this connector does not serve."""
        return tuple(each for each in self.caches if each.unserved)


_Config: TypeAlias = Mapping[str, Any]


def read_family(config: _Config, model_type: str, num_layers: int) -> Family | None:
    """The family of a model that keeps more than heads, a latent, or state.

    Args:
        config: The decoder's part of `config.json`.
        model_type: The whole model's.
        num_layers: Layers of the model.

    Raises:
        ValueError: What the family's layers keep is not told.
    """
    for name in (config.get("model_type"), model_type):
        if (read := _FAMILIES.get(str(name))) is not None:
            return read(config, range(num_layers))
    # As vLLM has it for all that derive from DeepSeek's.
    if config.get("kv_lora_rank") and config.get("index_topk"):
        return _with_indexers("MLA with an indexer", config, range(num_layers))
    return None


def shard_kinds(
    mesh: ParallelMesh,
    num_layers: int,
    units_by_kind: Mapping[str, Mapping[int, int]],
    layers_per_stage: Sequence[int] | None,
) -> tuple[Shard, ...]:
    """What every rank holds of several kinds of cache, each of which is a layer by itself.

    Args:
        mesh: The engine's workers.
        num_layers: Layers of the model.
        units_by_kind: By a kind's name, units of the layers that keep it.
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
    """MTP layers that a checkpoint has, and engines that are asked for drafts."""
    numbers = (config.get(name) for name in _DRAFT_LAYERS)
    return next((each for each in numbers if isinstance(each, int) and each > 0), 0)


def _with_indexers(
    name: str, config: _Config, layers: range, *, chooses_fp8_on_blackwell: bool = False
) -> Family:
    """DeepSeek V3.2 and those like it: some layers choose tokens, others take over the choice."""
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
    # The first ones always do.
    offset = int(config.get("index_skip_topk_offset", 2))
    return not max(layer - offset + 1, 0) % _number(config, "index_topk_freq", 1)


def _indexer_bytes(size: int) -> int:
    return size + size // _INDEXER_SCALED * _FLOAT32_BYTES


def _deepseek_v4(config: _Config, layers: range) -> Family:
    """Five kinds, of which a layer has those that go with what it compresses."""
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
        # Groups of four overlap with those before them. What is kept is a value and a score.
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
    """Some layers have keys that blocks are chosen by."""
    sparse = config.get("sparse_attention_config") or {}
    flags = sparse.get("sparse_attention_freq") or ()
    chosen = tuple(layer for layer in layers if layer < len(flags) and flags[layer])
    size = _number(sparse, "sparse_index_dim", 128) * _BFLOAT16_BYTES
    keys = Cache("index keys", chosen, size)
    return Family("MiniMax M3", (keys,) if chosen else ())


def _inkling(config: _Config, layers: range) -> Family:
    """Every layer keeps what its convolutions take in: of keys, values and hidden states.

    A rank has the part of its own heads, and of the hidden states as many parts.
    """
    # What is null there is not given.
    config = {name: value for name, value in config.items() if value is not None}
    hidden = _number(config, "hidden_size", 1536)
    heads = _number(config, "num_key_value_heads", 4)
    size = _number(config, "head_dim", hidden // _number(config, "num_attention_heads", 12))
    tokens = _number(config, "sconv_kernel_size", _number(config, "conv_kernel_size", 4))
    windowed = frozenset(config.get("local_layer_ids") or ())

    def inputs(name: str, own: list[int], heads: int, size: int) -> Cache:
        elements = 2 * size + 2 * (hidden // heads)
        # Up to the next power of two.
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
    """Layers that compress two tokens into one, and that others take theirs from."""
    ratios, sources = config.get("compress_ratios") or (), config.get("kv_source_layer_ids") or ()
    own = [each for each in layers if each in sources and each < len(ratios) and ratios[each] > 1]
    return _upstreams("DeepSeek V4.1", "states of the compressor", own)


def _glm5_next(config: _Config, layers: range) -> Family:
    """Layers with an indexer, which keeps the tokens of a pool that is not full yet."""
    own = (
        [] if config.get("index_topk", 1) is None else _without(config, "linear_attention", layers)
    )
    return _upstreams("GLM 5.3 Flash", "keys of an open pool", own)


def _qwen4(config: _Config, layers: range) -> Family:
    """Layers with an indexer, which keeps the tokens of a group that is not full yet."""
    own = _without(config, "linear_attention", layers) if config.get("indexer_n_heads") else []
    return _upstreams("Qwen4", "keys of an open group", own)


def _step5(config: _Config, layers: range) -> Family:
    """Layers without a window, which keep the rows of a region that is not full yet."""
    sparse = config.get("sparse_config") or {"enabled": False}
    own = [] if sparse.get("enabled") is False else _without(config, "sliding_attention", layers)
    return _upstreams("Step 5", "rows of an open region", own)


def _upstreams(name: str, kind: str, layers: Sequence[int]) -> Family:
    """A family with rings of requests, which this connector does not serve, if layers have any."""
    return Family(name, (Cache(kind, tuple(layers), unserved=_RING),) if layers else ())


def _without(config: _Config, kind: str, layers: range) -> list[int]:
    """The layers that are not of a kind."""
    kinds = config.get("layer_types") or ()
    return [layer for layer in layers if not (layer < len(kinds) and kinds[layer] == kind)]


def _number(config: _Config, name: str, default: int) -> int:
    """An entry that is a number of at least 1, or what the family has where it is not given.

    Raises:
        ValueError: It is something else.
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

# SPDX-License-Identifier: Apache-2.0
"""Reads the sizes of a model's KV cache from `config.json`: layers, heads, and each layer's cache.

An engine gets these from each layer's module. Before an engine runs, only the configuration's
entries are available, and their names differ between families of models.

The file is read as plain JSON: none of the model's code is run, and nothing is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .caches import SPARSE_LAYERS, Family, draft_layers, read_family
from .limits import MAX_LAYERS, MAX_SIZE, require_size
from .recurrent_state import BOTH, NOTHING_KEPT, STATE_ONLY, StateComponent, layer_kinds, read_state

_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Entries with the decoder's sizes, in multimodal models."""

_ELEMENT_BYTES = {
    "float32": 4,
    "float": 4,
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
_FULL = frozenset({"full_attention", "attention", "global_attention"}) | BOTH | SPARSE_LAYERS
_WINDOWED = frozenset({"sliding_attention", "chunked_attention", "local_attention"})
_PATTERN = "hybrid_layer_pattern"
"""MiMo-V2's entry with a 1 for each layer with a window, and a 0 for each other layer."""
_PATTERNS = {"gemma2": 2, "gemma3_text": 6}
"""One layer in this many keeps all tokens, by `model_type`, if the configuration does not say."""


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """The cache sizes of one layer.

    Attributes:
        num_kv_heads: Number of KV heads.
        slot_elements: Elements of one head of one token, in its key or its value; half of their
            sum if these differ.
    """

    num_kv_heads: int
    slot_elements: int


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes that determine a model's KV cache.

    Attributes:
        num_layers: Number of layers.
        num_kv_heads: KV heads of each layer; 1 for MLA.
        slot_elements: Elements of one head of one token in one plane: the head size, half of the
            sum of key and value if these differ, or MLA's latent with its rotary part.
        is_mla: True if one latent replaces keys and values.
        dtype: Name of the elements' type; None if the configuration does not name it.
        window_tokens_by_layer: Size of the window, in tokens, for each layer index that keeps only
            the last tokens of a sequence.
        is_chunked: True if the windows are chunks, with boundaries at multiples of their size.
        layers: Sizes of each layer with its own KV cache, by index; empty if all layers are alike.
        state: Components of recurrent state.
        family: The family's caches beside heads or latent, or instead of them; None without any.
        draft_layers: Number of MTP layers, which engines with speculative decoding run.
    """

    num_layers: int
    num_kv_heads: int
    slot_elements: int
    is_mla: bool
    dtype: str | None
    window_tokens_by_layer: Mapping[int, int]
    is_chunked: bool = False
    layers: Mapping[int, LayerSizes] = field(default_factory=dict)
    state: tuple[StateComponent, ...] = ()
    family: Family | None = None
    draft_layers: int = 0

    @property
    def keeps_heads(self) -> bool:
        """True if its layers keep KV heads, not a latent."""
        return not self.is_mla


def read_model(directory: Path) -> ModelSizes:
    """Read the sizes of a model from the `config.json` in its directory.

    Raises:
        ValueError: The file is missing, or does not describe decoder attention.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}): give the directory of a model"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}): download the model again") from error
    try:
        return _sizes(config)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error
    except (AttributeError, IndexError, TypeError) as error:
        # Entries of some families are nested, and their contents are not checked one by one.
        raise ValueError(
            f"{path}: an entry is of another kind than a model's ({error}): download it again"
        ) from error


def element_bytes(dtype: str) -> int:
    """Return the size of one element of a KV cache, in bytes.

    Raises:
        ValueError: The type is unknown.
    """
    try:
        return _ELEMENT_BYTES[dtype.removeprefix("torch.")]
    except KeyError:
        raise ValueError(
            f"dtype {dtype!r} is not known: give --dtype, one of {', '.join(_ELEMENT_BYTES)}"
        ) from None


def _sizes(whole: object) -> ModelSizes:
    """Return the sizes in a configuration or in its decoder's part."""
    if not isinstance(whole, dict):
        raise ValueError("it is no JSON object: give the directory of a model")
    parts = (whole.get(name) for name in _TEXT_PARTS)
    config: dict[str, Any] = next((part for part in parts if isinstance(part, dict)), whole)
    if isinstance(inner := config.get("text_config"), dict):
        config = inner
    num_layers = _size(
        config, *("num_hidden_layers", "n_layer", "num_layers", "n_layers"), largest=MAX_LAYERS
    )
    dtype = next(
        (
            source[name]
            for source in (config, whole)
            for name in ("dtype", "torch_dtype")
            if isinstance(source.get(name), str)
        ),
        None,
    )
    family = read_family(config, str(whole.get("model_type")), num_layers)
    drafts = draft_layers(config)
    if family is not None and not (family.has_main and family.is_served):
        # The family's own caches are the only ones, or the only ones that can be described.
        size = _size(config, "head_dim", default=1)
        return ModelSizes(
            *(num_layers, 1, size, True, dtype, {}), family=family, draft_layers=drafts
        )
    windows = _windows(config, num_layers)
    # MiMo-V2 gives a chunk size but has no chunks; vLLM ignores it.
    is_chunked = config.get("attention_chunk_size") is not None and _PATTERN not in config
    if config.get("kv_lora_rank"):
        latent = _size(config, "kv_lora_rank") + _size(config, "qk_rope_head_dim")
        kinds = layer_kinds(config, num_layers)
        layers = {
            layer: LayerSizes(1, latent)
            for layer in range(num_layers)
            if kinds is None or kinds[layer] not in STATE_ONLY | NOTHING_KEPT
        }
        return ModelSizes(
            *(num_layers, 1, latent, True, dtype, windows, is_chunked),
            {} if len(layers) == num_layers else layers,
            read_state(config, kinds or ()),
            family,
            drafts,
        )
    num_heads = _size(config, "num_attention_heads", "n_head", "num_heads", "n_heads")
    if config.get("multi_query"):
        num_kv_heads = 1
    else:
        names = (
            *("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
            "num_attention_groups",
        )
        num_kv_heads = _size(config, *names, default=num_heads)
    head_size = _size(
        config,
        *("head_dim", "attention_head_dim", "kv_channels"),
        default=_size(config, "hidden_size", "n_embd", "d_model", default=0) // num_heads,
    )
    if head_size < 1:
        raise ValueError("neither head_dim nor hidden_size is given: give --head-size and no model")
    head_size = _slot_elements(head_size, _size(config, "v_head_dim", default=head_size))
    common = LayerSizes(num_kv_heads, head_size)
    kinds = layer_kinds(config, num_layers)
    layers = {
        layer: sizes
        for layer in range(num_layers)
        if (sizes := _layer_sizes(config, kinds, layer, common, layer in windows)) is not None
    }
    if set(layers.values()) == {common} and len(layers) == num_layers:
        layers = {}
    state = read_state(config, kinds or ())
    return ModelSizes(
        *(num_layers, num_kv_heads, head_size, False, dtype, windows, is_chunked),
        layers,
        state,
        family,
        drafts,
    )


def _layer_sizes(
    config: Mapping[str, Any],
    kinds: Sequence[str] | None,
    layer: int,
    common: LayerSizes,
    is_windowed: bool,
) -> LayerSizes | None:
    """Return a layer's sizes; None if it has no attention, or shares another layer's cache."""
    num_layers = _size(config, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    if layer >= num_layers - int(config.get("num_kv_shared_layers") or 0):
        return None
    if kinds is not None and kinds[layer] in STATE_ONLY | NOTHING_KEPT:
        return None
    # Written by transformers 5, for any family.
    overrides = config.get("per_layer_config")
    if isinstance(overrides, dict):
        own = overrides.get(str(layer), {})
        return LayerSizes(
            _size(own, "num_key_value_heads", default=common.num_kv_heads),
            _size(own, "head_dim", default=common.slot_elements),
        )
    # Nemotron-NAS.
    blocks = config.get("block_configs")
    if isinstance(blocks, list) and layer < len(blocks):
        attention = blocks[layer].get("attention") or {}
        if attention.get("no_op") or attention.get("replace_with_linear"):
            return None
        in_group = _size(attention, "n_heads_in_group")
        num_heads = _size(config, "num_attention_heads") // in_group
        return LayerSizes(num_heads, common.slot_elements)
    # Step-3.5 has a separate part; MiMo-V2 has its own names; Gemma 4 names the other layers.
    others = config.get("attention_other_setting")
    if is_windowed:
        own = others if isinstance(others, dict) else config
        num_heads = _size(
            own, "swa_num_key_value_heads", "num_attention_groups", default=common.num_kv_heads
        )
        if "swa_head_dim" not in own:
            return LayerSizes(num_heads, common.slot_elements)
        key_elements = _size(own, "swa_head_dim")
        value_elements = _size(own, "swa_v_head_dim", default=key_elements)
        return LayerSizes(num_heads, _slot_elements(key_elements, value_elements))
    num_heads = common.num_kv_heads
    if config.get("attention_k_eq_v"):
        num_heads = _size(config, "num_global_key_value_heads", default=num_heads)
    return LayerSizes(num_heads, _size(config, "global_head_dim", default=common.slot_elements))


def _slot_elements(key_elements: int, value_elements: int) -> int:
    """Return half the elements of a head's key and value together, rounded up."""
    return -(-(key_elements + value_elements) // 2)


def _size(
    config: Mapping[str, Any], *names: str, default: int | None = None, largest: int = MAX_SIZE
) -> int:
    """Return the first entry that is given, of several names for the same size."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(
                f"{name} is {value!r} but must be a number of at least 1: give --num-layers, "
                "--num-kv-heads and --head-size instead of the model"
            )
        require_size(name, value, largest)
        return value
    if default is None:
        raise ValueError(
            f"{names[0]} is missing: give --num-layers, --num-kv-heads and --head-size instead of "
            "the model"
        )
    return default


def _windows(config: Mapping[str, Any], num_layers: int) -> dict[int, int]:
    """Return the window's tokens for each layer that keeps only a window."""
    kinds = layer_kinds(config, num_layers)
    if kinds is None:
        kinds = _kinds_by_pattern(config, num_layers)
    if not isinstance(kinds, list) or len(kinds) < num_layers:
        raise ValueError(
            f"layer_types does not name a kind for each of {num_layers} layers: correct config.json"
        )
    strangers = {str(kind) for kind in kinds} - _FULL - _WINDOWED
    keeps_state = any(name.startswith(("mamba_", "ssm_")) for name in config)
    if read_state(config, kinds):
        strangers, keeps_state = strangers - STATE_ONLY - NOTHING_KEPT, False
    if strangers or keeps_state:
        raise ValueError(
            f"layers of {', '.join(sorted(strangers)) or 'Mamba'} keep no KV cache, and what else "
            "they keep is not known: give --num-layers, --num-kv-heads and --head-size of its "
            "attention"
        )
    return {
        layer: _size(config, "attention_chunk_size", "sliding_window")
        if kind == "chunked_attention"
        else _size(config, "sliding_window", "sliding_window_size", "attention_chunk_size")
        for layer, kind in enumerate(kinds[:num_layers])
        if kind in _WINDOWED
    }


def _kinds_by_pattern(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Return each layer's kind, if a rule gives it instead of a list."""
    # Inkling.
    if isinstance(local := config.get("local_layer_ids"), list):
        return [
            "sliding_attention" if layer in local else "full_attention"
            for layer in range(num_layers)
        ]
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return ["full_attention"] * num_layers
    if isinstance(flags := config.get(_PATTERN), list):
        return ["sliding_attention" if flag else "full_attention" for flag in flags]
    pattern = config.get("sliding_window_pattern") or _PATTERNS.get(
        str(config.get("model_type")), 0
    )
    if not isinstance(pattern, int):
        raise ValueError(
            f"sliding_window_pattern is {pattern!r} but must be a number: correct config.json"
        )
    return [
        "full_attention" if pattern and not (layer + 1) % pattern else "sliding_attention"
        for layer in range(num_layers)
    ]

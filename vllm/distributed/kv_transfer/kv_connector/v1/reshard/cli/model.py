# SPDX-License-Identifier: Apache-2.0
"""What a model's `config.json` says of its KV cache: layers, heads, and what each layer keeps.

Engines ask each layer's module, which knows; before there is an engine, names in the configuration
are all there is, and families of models differ in them.

It is read as plain JSON: no code of the model is run, and nothing is loaded.
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
"""Where models of several modalities keep the sizes of their decoder."""

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
"""MiMo-V2's entry that has a 1 for each layer with a window, and a 0 for each other one."""
_PATTERNS = {"gemma2": 2, "gemma3_text": 6}
"""One layer in so many keeps all tokens, where a model's configuration leaves it to its code."""


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """What one layer keeps.

    Attributes:
        num_kv_heads: Its KV heads.
        slot_elements: Elements of one head of one token, of its key or its value; where these
            differ, half of both.
    """

    num_kv_heads: int
    slot_elements: int


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes that decide what a KV cache is like.

    Attributes:
        num_layers: Layers with a KV cache.
        num_kv_heads: KV heads of each layer; 1 for MLA.
        slot_elements: Elements of one head of one token in one plane: the head size, half of a
            key's and a value's where these differ, or the latent of MLA with its rotary part.
        is_mla: One latent takes the place of keys and values.
        dtype: Name of the elements' type; None where the model does not say.
        window_tokens_by_layer: The layers that keep the last tokens of a sequence only, and how
            many.
        is_chunked: The windows are chunks, which begin anew every so many tokens.
        layers: What each layer with a KV cache of its own keeps, where layers differ; by index.
        state: What layers keep of recurrent state.
        family: What layers keep beside their heads or their latent, or instead, where they do.
        draft_layers: MTP layers, which engines have that are asked for drafts.
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
        """Whether its layers keep KV heads, and no latent."""
        return not self.is_mla


def read_model(directory: Path) -> ModelSizes:
    """Read the sizes of a model from the `config.json` in its directory.

    Raises:
        ValueError: There is none, or it does not describe decoder attention.
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
        # Families have lists and objects within their entries, each of which may be anything.
        raise ValueError(
            f"{path}: an entry is of another kind than a model's ({error}): download it again"
        ) from error


def element_bytes(dtype: str) -> int:
    """Size of one element of a KV cache.

    Raises:
        ValueError: The type is not known.
    """
    try:
        return _ELEMENT_BYTES[dtype.removeprefix("torch.")]
    except KeyError:
        raise ValueError(
            f"dtype {dtype!r} is not known: give --dtype, one of {', '.join(_ELEMENT_BYTES)}"
        ) from None


def _sizes(whole: object) -> ModelSizes:
    """The sizes in a configuration, which may keep them in one of its parts."""
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
        # Its own caches are all that there is, or that can be told.
        size = _size(config, "head_dim", default=1)
        return ModelSizes(
            *(num_layers, 1, size, True, dtype, {}), family=family, draft_layers=drafts
        )
    windows = _windows(config, num_layers)
    # MiMo-V2 gives a size for chunks that it does not have, which vLLM takes no notice of.
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
    """What one layer keeps; None if it has no attention, or shares another layer's cache."""
    num_layers = _size(config, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    if layer >= num_layers - int(config.get("num_kv_shared_layers") or 0):
        return None
    if kinds is not None and kinds[layer] in STATE_ONLY | NOTHING_KEPT:
        return None
    # Where transformers 5 has written the configuration: whatever the family.
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
    # Step-3.5, in a part of its own; MiMo-V2, by names of its own; Gemma 4, for the other layers.
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
    """Elements of a head's key or value of one token, where they have as many between them."""
    return -(-(key_elements + value_elements) // 2)


def _size(
    config: Mapping[str, Any], *names: str, default: int | None = None, largest: int = MAX_SIZE
) -> int:
    """The first of some entries that is given, which has several names among models."""
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
    """The layers that keep a window only, and its tokens."""
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
    """What each layer keeps, where it is told by a rule and not by a list of kinds."""
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

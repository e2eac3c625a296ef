# SPDX-License-Identifier: Apache-2.0
"""What this engine's configuration says about the meaning of its KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm import __version__ as vllm_version

from ...protocol.compatibility import ANY, DRAFT_FACTORS, RELEASE_FACTOR, WEIGHT_FACTORS
from ..compat import draft_cache_dtype, prefill_lookahead_tokens
from ..content import items_hashed_as, items_named_by
from ..settings import Settings
from ..weights import weights_factors

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_ARCHITECTURE = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "sliding_window",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
)


def compatibility_factors(vllm_config: VllmConfig) -> dict[str, str]:
    """Return the values that must match for two engines' KV caches to mean the same.

    They also include this engine's vLLM release, which need not match.

    Args:
        vllm_config: This engine's configuration.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    hybrid = not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
    dtype = _dtype_name(model.dtype)
    # The model's path is left out on purpose: the same model may have another path or name. So are
    # both kinds of parallel sizes, block sizes and the order of axes: this connector exists to join
    # engines that differ in those.
    return {
        # For the log only; the release is not compared. The part after a `+` names the build.
        RELEASE_FACTOR: vllm_version.partition("+")[0],
        "model": _architecture(model.hf_text_config),
        "num_hidden_layers": str(model.get_total_num_hidden_layers()),
        "num_kv_heads": str(model.get_total_num_kv_heads()),
        "head_size": str(model.get_head_size()),
        "mla": _yes_or_no(model.use_mla),
        "dtype": dtype,
        "kv_cache_dtype": dtype if cache.cache_dtype == "auto" else str(cache.cache_dtype),
        "hybrid_kv_cache_manager": _yes_or_no(hybrid),
        "multimodal_items_named_by": items_named_by(vllm_config),
        "multimodal_items_hashed_as": items_hashed_as(vllm_config),
        **_draft_factors(vllm_config),
        **weights_factors(vllm_config),
    }


def compared_factors(factors: Mapping[str, str], settings: Settings) -> dict[str, str] | None:
    """Return the values that a producer must match; None to accept any producer.

    Missing or different drafts only cost their own layers, which are then not read.
    """
    if not settings.enforce_handshake_compat:
        return None
    uncompared = [RELEASE_FACTOR]
    if settings.missing_draft_layers == "compute":
        uncompared += DRAFT_FACTORS
    if settings.allow_other_weights:
        uncompared += WEIGHT_FACTORS
    return {**factors, **dict.fromkeys(uncompared, ANY)}


def draft_identity(vllm_config: VllmConfig) -> str | None:
    """Return what identifies this engine's draft; None where drafts have no layers."""
    speculative = vllm_config.speculative_config
    if speculative is None or not (speculative.use_eagle() or speculative.uses_draft_model()):
        return None
    values = _draft_values(vllm_config)
    del values["draft_lookahead"]
    return "; ".join(f"{name} {value}" for name, value in values.items())


def _draft_factors(vllm_config: VllmConfig) -> dict[str, str]:
    """Return what must match for drafts that are made from the model's hidden states.

    Layers of EAGLE, MTP and the like keep a KV cache of the same tokens, which is read with the
    model's: both engines must draft alike, or neither drafts, unless `missing_draft_layers` is
    "compute". Drafts from tokens alone (n-grams, or a whole draft model) are not compared; a draft
    model's layers are looked for when an engine needs them. Each engine chooses how many tokens it
    drafts at a time, unless the drafts read that far ahead.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.use_eagle():
        return dict.fromkeys(DRAFT_FACTORS, "none")
    return _draft_values(vllm_config)


def _draft_values(vllm_config: VllmConfig) -> dict[str, str]:
    """Return the values that determine what a draft's layers mean, by factor."""
    speculative = vllm_config.speculative_config
    assert speculative is not None
    draft = speculative.draft_model_config
    dtype = _dtype_name(vllm_config.model_config.dtype)
    cache_dtype = draft_cache_dtype(speculative, vllm_config.cache_config)
    # Paths are left out, as for the model itself.
    values = (
        str(speculative.method),
        _architecture(draft.hf_text_config),
        str(draft.get_total_num_hidden_layers()),
        str(getattr(draft.hf_config, "eagle_aux_hidden_state_layer_ids", None)),
        dtype if cache_dtype == "auto" else cache_dtype,
        str(prefill_lookahead_tokens(vllm_config)),
        _yes_or_no(speculative.parallel_drafting),
    )
    return dict(zip(DRAFT_FACTORS, values, strict=True))


def _architecture(text_config: object) -> str:
    """Return what tells one architecture, including its positions, from another.

    It cannot tell two trainings of one architecture apart; `weights` does.
    """
    told = {name: getattr(text_config, name, None) for name in _ARCHITECTURE}
    # MiMo-V2's layers use `sliding_window_size`. transformers 5.20.2 sets `sliding_window` to that
    # plus one, where 5.19.0 kept the checkpoint's value.
    told["sliding_window"] = getattr(text_config, "sliding_window_size", told["sliding_window"])
    return ", ".join(f"{name} {value}" for name, value in told.items() if value is not None)


def _dtype_name(dtype: object) -> str:
    """Return the name of a torch dtype, without importing torch."""
    return str(dtype).removeprefix("torch.")


def _yes_or_no(value: object) -> str:
    return "yes" if value else "no"

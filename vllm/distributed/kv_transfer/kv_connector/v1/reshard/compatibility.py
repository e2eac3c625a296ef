# SPDX-License-Identifier: Apache-2.0
"""What must be equal at two engines for the KV cache of one to mean the same to the other.

These are named values rather than one hash, so that an error can say which of them differ, and how
to make them equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from vllm import __version__ as vllm_version

from .errors import RemoteIncompatibleError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_REMEDIES = {
    "vllm_version": "install the same version of vLLM",
    "model": "serve the same model, with the same --hf-overrides",
    "num_hidden_layers": "serve the same model",
    "num_kv_heads": "serve the same model",
    "head_size": "serve the same model",
    "mla": "serve the same model, with the same VLLM_MLA_DISABLE",
    "dtype": "give the same --dtype",
    "kv_cache_dtype": "give the same --kv-cache-dtype",
    "attention_backends": "give the same --attention-backend",
    "hybrid_kv_cache_manager": "give --disable-hybrid-kv-cache-manager on both or on neither",
}

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


def compatibility_factors(
    vllm_config: VllmConfig, attn_backend_names: Iterable[str]
) -> dict[str, str]:
    """What must be equal at both engines for one's KV cache to mean the same to the other.

    Args:
        vllm_config: This engine's configuration.
        attn_backend_names: The attention backends of this worker's layers.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    hybrid = not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
    dtype = _dtype_name(model.dtype)
    # The model's path is left out on purpose: the same model may lie under another path or name.
    # So are the sizes of both kinds of parallelism, of blocks, and the order of axes: to join
    # engines that differ in those is what this connector is for.
    return {
        # What follows a `+` names the build, not the source: an engine on CPU and one on a GPU, or
        # two releases of a fork, differ there.
        "vllm_version": vllm_version.partition("+")[0],
        "model": _architecture(model.hf_text_config),
        "num_hidden_layers": str(model.get_total_num_hidden_layers()),
        "num_kv_heads": str(model.get_total_num_kv_heads()),
        "head_size": str(model.get_head_size()),
        "mla": _yes_or_no(model.use_mla),
        "dtype": dtype,
        "kv_cache_dtype": dtype if cache.cache_dtype == "auto" else str(cache.cache_dtype),
        "attention_backends": ", ".join(sorted(set(attn_backend_names))),
        "hybrid_kv_cache_manager": _yes_or_no(hybrid),
    }


def check_compatibility(local: Mapping[str, str], remote: Mapping[str, str]) -> None:
    """Compare the factors of two engines.

    Raises:
        RemoteIncompatibleError: Some differ; the message names each, with both values.
    """
    names = [*local, *sorted(remote.keys() - local.keys())]
    differing = [name for name in names if local.get(name) != remote.get(name)]
    if not differing:
        return
    values = "; ".join(
        f"{quote(name)} is {quote(remote.get(name))} there and {quote(local.get(name))} here"
        for name in differing
    )
    remedies = ", ".join(dict.fromkeys(map(remedy, differing)))
    raise RemoteIncompatibleError(
        f"the peer's KV cache means something else: {values}: on both engines, {remedies}"
    )


def remedy(name: str) -> str:
    """What makes a factor equal."""
    return _REMEDIES.get(name, "run the same build")


def quote(text: str | None) -> str:
    """Make what a peer wrote fit for one line of a log."""
    if text is None:
        return "unset"
    printable = text if text.isprintable() else ascii(text)
    return printable if len(printable) <= 200 else f"{printable[:200]}..."


def _architecture(text_config: object) -> str:
    """What tells one architecture from another, and its positions from others.

    Two trainings of one architecture cannot be told apart by this.
    """
    values = [f"{name} {getattr(text_config, name, None)}" for name in _ARCHITECTURE]
    return ", ".join(value for value in values if not value.endswith(" None"))


def _dtype_name(dtype: object) -> str:
    """The name of a torch dtype, without importing torch for it."""
    return str(dtype).removeprefix("torch.")


def _yes_or_no(value: object) -> str:
    return "yes" if value else "no"

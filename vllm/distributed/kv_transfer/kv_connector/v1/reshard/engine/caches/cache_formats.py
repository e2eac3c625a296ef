# SPDX-License-Identifier: Apache-2.0
"""How attention backends fill a block, and what two engines' blocks must have in common.

A tensor's shape does not tell where its values lie: some backends treat a block as a page of their
own and arrange its tokens for their kernels, in a cache that looks like any other. Bytes read from
a wrong place are KV of other tokens, which only wrong answers would reveal. So a format is known
from the source of what writes it, or not at all.

Names do not tell either: two backends are called FLASH_ATTN, and models subclass a plain backend to
store in their own way. A backend counts as known only where both its name and its implementation,
which does the storing, come from its own module. `test_writing_kernels` lists what writes each
known format, and runs all of it that runs on a CPU.

Blocks of an unknown format are moved as a whole, where the plan need not cut them. Their inside is
the same at both ends only if everything that may affect it is.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec

from vllm import __version__ as vllm_version
from vllm import envs

from ..compat import (
    BLACKWELL_SCALES,
    ROCM_ATTN_VALUES,
    keeps_turboquants_scales_apart,
    tokens_per_slot,
)
from .cache_views import Arrangement

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """How a layer's blocks are filled.

    Attributes:
        arrangement: What has a place of its own in a block.
        meaning: What must be equal at both ends for the bytes to mean the same, by name.
        keys_lead: See `LayerCache`.
    """

    arrangement: Arrangement
    meaning: Mapping[str, str]
    keys_lead: bool = False


_BACKENDS = "vllm.v1.attention.backends"
_ABSTRACT = "vllm.v1.attention.backend"
_V4 = "vllm.models.deepseek_v4"
_M3 = "vllm.models.minimax_m3.common"
_HY_V4 = "vllm.models.hy_v4.nvidia.flashmla_sparse"
_DOTS3 = "vllm.models.dots3_note.nvidia.attention"

_SLOTS = frozenset(
    {
        # `do_kv_cache_update` of their implementations splits a slot into key and value, and calls
        # `reshape_and_cache_flash`: each head of each token has a slot, keys before values.
        (f"{_BACKENDS}.flash_attn", "FLASH_ATTN"),
        (f"{_BACKENDS}.flashinfer", "FLASHINFER"),
        (f"{_BACKENDS}.flex_attention", "FLEX_ATTENTION"),
        (f"{_BACKENDS}.rocm_aiter_fa", "FLASH_ATTN"),
        (f"{_BACKENDS}.rocm_aiter_unified_attn", "ROCM_AITER_UNIFIED_ATTN"),
        # The same in Triton, `triton_reshape_and_cache_flash`. Scales of single tokens and heads
        # lie in their slots, behind key and value: `customize_spec`, `_ensure_scale_caches`.
        (f"{_BACKENDS}.triton_attn", "TRITON_ATTN"),
        # Both write with `do_kv_cache_update` of TRITON_ATTN, their `general_impl`, whichever of
        # their two kernels reads.
        (f"{_BACKENDS}.triton_flash_attn", "TRITON_FLASH_ATTN"),
        (f"{_BACKENDS}.triton_flashinfer", "TRITON_FLASHINFER"),
        # `triton_reshape_and_cache_flash_diffkv`: keys and values differ in size, and share a slot.
        (f"{_BACKENDS}.flash_attn_diffkv", "FLASH_ATTN_DIFFKV"),
        (f"{_BACKENDS}.triton_attn_diffkv", "TRITON_ATTN_DIFFKV"),
        # `triton_turboquant_store`, but for FlyDSL's kernels: one packed slot of each head of each
        # token, key and value together.
        (f"{_BACKENDS}.turboquant_attn", "TURBOQUANT"),
        # `ultraquant_store` and `octave_cache_store`, by strides of block, head and token: also one
        # packed slot, whichever of ROCm's kernels read.
        (f"{_BACKENDS}.ultraquant_attn", "ULTRAQUANT"),
        (f"{_BACKENDS}.rocm_octave_attn", "ROCM_OCTAVE"),
        # None has a `do_kv_cache_update` of its own. `MLAAttentionImpl.do_kv_cache_update` calls
        # `concat_and_cache_mla`: each token has a slot, the latent before the rope.
        (f"{_BACKENDS}.mla.cutlass_mla", "CUTLASS_MLA"),
        (f"{_BACKENDS}.mla.flashinfer_mla", "FLASHINFER_MLA"),
        (f"{_BACKENDS}.mla.flashmla", "FLASHMLA"),
        (f"{_BACKENDS}.mla.flashattn_mla", "FLASH_ATTN_MLA"),
        (f"{_BACKENDS}.mla.tokenspeed_mla", "TOKENSPEED_MLA"),
        (f"{_BACKENDS}.mla.triton_mla", "TRITON_MLA"),
        (f"{_BACKENDS}.mla.rocm_aiter_mla", "ROCM_AITER_MLA"),
        (f"{_BACKENDS}.mla.aiter_triton_mla", "AITER_TRITON_MLA"),
        # The same for sparse attention, whose kernels index rows of tokens. Rows of 656 and of 352
        # bytes are values with their scales.
        (f"{_BACKENDS}.mla.flashmla_sparse", "FLASHMLA_SPARSE"),
        (f"{_BACKENDS}.mla.flashinfer_mla_sparse", "FLASHINFER_MLA_SPARSE"),
        (f"{_BACKENDS}.mla.flashinfer_mla_sparse", "FLASHINFER_MLA_SPARSE_SM120"),
        (f"{_BACKENDS}.mla.flashinfer_mla_sparse_sm90", "FLASHINFER_MLA_SPARSE_SM90"),
        (f"{_BACKENDS}.mla.flashattn_mla_sparse", "FLASH_ATTN_MLA_SPARSE"),
        (f"{_BACKENDS}.mla.flashattn_mla_sparse", "FLASH_ATTN_MLA_SPARSE_FA4"),
        (f"{_BACKENDS}.mla.rocm_aiter_mla_sparse", "ROCM_AITER_MLA_SPARSE"),
        (f"{_BACKENDS}.mla.xpu_mla_sparse", "XPU_MLA_SPARSE"),
        # `Dots3NotePaddedSparseImpl._logical_cache`: the same in the first part of a wider row.
        (_DOTS3, "DOTS3_NOTE_PADDED_MLA_SPARSE"),
        # The same with functions of their own: `amx_mla_concat_and_cache`, and torch.
        (f"{_BACKENDS}.mla.amx_mla", "AMX_MLA"),
        (f"{_BACKENDS}.mla.cpu_mla", "CPU_MLA"),
        # A row of numbers for each token: DeepSeek V4's compressor state, `save_partial_states`,
        # and MiniMax M3's index, `minimax_m3_insert_index_cache`.
        (f"{_V4}.compressor", "CompressorBackend"),
        (f"{_M3}.indexer", "MINIMAX_M3_SPARSE_INDEXER"),
        # `fused_minimax_m3_qknorm_rope_kv_insert`, by strides: key before value, whichever of the
        # model's kernels reads. CUTLASS_MSA and TRITON_MSA are only names of two of these kernels.
        (f"{_M3}.sparse_attention", "MINIMAX_M3_SPARSE"),
    }
)
"""Backends whose slots are plain strides: their modules and names."""

_STORE_AS_THEIR_PARENTS = frozenset(
    {
        # `HYV4FlashMLASparseImpl` adds sinks to the reading kernel, and `Dots3NoteTritonMLAImpl`
        # adds windows. Neither has a `do_kv_cache_update`.
        (_HY_V4, "FLASHMLA_SPARSE"),
        (_DOTS3, "TRITON_MLA"),
    }
)
"""Models' own implementations of known backends, which keep the backends' names."""

_OTHERS: Mapping[tuple[str, str], Arrangement] = {
    # `cpu_attn_reshape_and_cache`: for each head of a block its keys, then its values, both
    # arranged for the instruction set.
    (f"{_BACKENDS}.cpu_attn", "CPU_ATTN"): Arrangement.HEADS,
    # `_kv_cache_views`: keys of all heads in the first slot of a token, values in the second.
    (f"{_BACKENDS}.b12x", "B12X"): Arrangement.SIDES,
    # `split_kv_cache`: a side is [heads, size / x, tokens, x], or [heads, size, tokens].
    (f"{_BACKENDS}.rocm_attn", "ROCM_ATTN"): Arrangement.PACKED_SIDES,
    # All values of a block, then all of its scales. Indexers: `indexer_k_quant_and_cache`; in V4
    # `compress_norm_rope_store`, which also writes V4's main caches. Windows of V4:
    # `_fused_qnorm_rope_kv_insert`.
    (f"{_BACKENDS}.mla.indexer", "DEEPSEEK_V32_INDEXER"): Arrangement.PAGE,
    (f"{_BACKENDS}.mla.indexer", "DEEPSEEK_V4_INDEXER"): Arrangement.PAGE,
    (f"{_BACKENDS}.mla.sparse_swa", "DEEPSEEK_SPARSE_SWA"): Arrangement.PAGE,
    (f"{_V4}.sparse_mla", "FLASHMLA_SPARSE_DSV4"): Arrangement.PAGE,
    # The number format tells values with scales from plain rows.
    (f"{_V4}.nvidia.flashinfer_sparse", "FLASHINFER_MLA_SPARSE_DSV4"): Arrangement.PAGE,
    (f"{_V4}.amd.rocm", "ROCM_FLASHMLA_SPARSE_DSV4"): Arrangement.PAGE,
    (f"{_V4}.cpu.cpu_mla", "CPU_V4_MLA_SPARSE"): Arrangement.PAGE,
    (f"{_V4}.cpu.cpu_mla", "CPU_V4_INDEXER"): Arrangement.PAGE,
}
"""Backends that are known to fill their blocks in other ways."""

_AITER: Mapping[str, Arrangement | None] = {
    # `reshape_and_cache_shuffle_kernel`: a head of keys is [size / x, tokens, x].
    f"{_BACKENDS}.rocm_aiter_fa": Arrangement.PACKED_SIDES,
    # On some devices only.
    f"{_BACKENDS}.rocm_aiter_unified_attn": None,
    # `_insert_aiter_sparse_pa_kv`: pages of 16 tokens of all heads, keys and values apart.
    f"{_M3}.sparse_attention": None,
}
"""How AITER's kernels arrange a block if VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT is set."""

_SLOT_QUANTIZATIONS = frozenset(
    {
        "NONE",
        "FP8_PER_TENSOR",
        "INT8_PER_TOKEN_HEAD",
        "FP8_PER_TOKEN_HEAD",
        "INT4_PER_TOKEN_HEAD",
        "NVFP4_DS_MLA",
        "TURBOQUANT_K8V4",
        "TURBOQUANT_4BIT_NC",
        "TURBOQUANT_K3V4_NC",
        "TURBOQUANT_3BIT_NC",
    }
)
"""Number formats whose scales, if a token has any of its own, lie in its slot."""

_OWN_QUANTIZATIONS: Mapping[str, frozenset[str]] = {
    "ULTRAQUANT": frozenset({"ULTRAQUANT_4BIT"}),
    # OCTAVE_K3V4 has the number of CUSTOM, which other backends fill as they like.
    "ROCM_OCTAVE": frozenset({"OCTAVE_K3V4", "OCTAVE_K3V3", "OCTAVE_K3V3_COMPACT"}),
}
"""More number formats with scales in the slot, known for the backend of that name only."""

_KEYS_LEAD = frozenset(
    {
        "FLASH_ATTN",
        "FLASHINFER",
        "FLEX_ATTENTION",
        "ROCM_AITER_UNIFIED_ATTN",
        "TRITON_ATTN",
        "CPU_ATTN",
    }
)
"""Backends whose slots are a key and then a value, or in 0.22.1 one of them.

A slot is for each head of each token; CPU_ATTN's is for each head of a block: its first half is
byte for byte 0.22.1's keys, its second half 0.22.1's values. Backends with keys and values of two
sizes always had them side by side, and MLA has a latent."""

_WITHOUT_SCALES = frozenset({"NONE", "FP8_PER_TENSOR"})
"""Number formats without scales in their slots. Where a slot has them, releases differ in their
place."""

_OF_AN_ENGINES_OWN = (
    # Where an engine's parts run, and how they reach each other.
    *("VLLM_NIXL_", "VLLM_P2P_", "VLLM_EC_", "VLLM_DP_", "VLLM_PP_", "VLLM_CPU_", "RAY_"),
    *("VLLM_RAY_", "VLLM_USE_RAY_", "VLLM_MOONCAKE_", "MOONCAKE_", "VLLM_NIC_", "VLLM_GPU_NIC_"),
    *("VLLM_LOOPBACK_", "VLLM_NCCL_", "VLLM_SKIP_P2P_", "VLLM_DISABLE_PYNCCL", "VLLM_MQ_"),
    *("VLLM_ALLREDUCE_", "VLLM_FLASHINFER_ALLREDUCE_", "VLLM_DEEPEP", "VLLM_DBO_"),
    # How it was built and packed, and what runs it.
    *("CMAKE_", "NVCC_", "CUDA_HOME", "VERBOSE", "VLLM_BUILD_", "VLLM_DOCKER_", "VLLM_IMAGE_"),
    *("VLLM_CUDART_", "VLLM_MAIN_CUDA_", "VLLM_USE_PRECOMPILED", "VLLM_SKIP_PRECOMPILED_"),
    *("VLLM_RUST_", "VLLM_USE_RUST_", "VLLM_PLUGINS", "VLLM_USE_V2_MODEL_RUNNER"),
    # What it logs and measures, and what requests may ask for.
    *("VLLM_LOG_", "VLLM_CONFIGURE_LOGGING", "VLLM_DISABLE_LOG_", "VLLM_DEBUG_", "VLLM_TRACE_"),
    *("VLLM_PROCESS_NAME_", "VLLM_USAGE_", "VLLM_NVTX_", "VLLM_CUSTOM_SCOPES_", "VLLM_GC_"),
    *("VLLM_MAX_", "VLLM_TOOL_", "VLLM_CHAT_", "VLLM_GPT_OSS_", "VLLM_KV_EVENTS_", "VLLM_LORA_"),
)
"""Prefixes of environment variables that no cache depends on, so that two engines may differ in
them."""


def cache_format(
    backend: type[AttentionBackend], spec: Any, tensor: torch.Tensor, settings: str
) -> CacheFormat:
    """Return how a layer's blocks are filled.

    Args:
        backend: The layer's attention backend.
        spec: Its attention specification.
        tensor: Its cache.
        settings: Fingerprint of other settings that may affect an unknown format.
    """
    arrangement = _known_arrangement(backend, spec)
    if arrangement is None:
        return CacheFormat(Arrangement.PAGE, _everything(backend, spec, tensor, settings))
    meaning = {"arrangement": arrangement.value, "numbers": _numbers(spec)}
    if arrangement is not Arrangement.SLOTS:
        meaning["written by"] = backend.get_name()
    meaning |= _chosen_inside(backend, spec, tensor, settings)
    keys_lead = backend.get_name() in _KEYS_LEAD and spec.kv_quant_mode.name in _WITHOUT_SCALES
    return CacheFormat(arrangement, meaning, keys_lead)


def settings_fingerprint(vllm_config: VllmConfig) -> str:
    """Return a digest of the settings that may change what backends write.

    These are the environment variables that vLLM itself takes into account when it compiles, and
    the options of attention and of passes that fuse it with what writes the cache.
    """
    environment = sorted(
        (name, str(value))
        for name, value in envs.compile_factors().items()
        if not name.startswith(_OF_AN_ENGINES_OWN)
    )
    # Its other fields follow from the TP size.
    passes = sorted(
        (name, value)
        for name, value in vars(vllm_config.compilation_config.pass_config).items()
        if "kvcache" in name
    )
    options = vllm_config.attention_config, passes, vllm_config.cache_config.cache_dtype
    return hashlib.sha256(repr((environment, options)).encode()).hexdigest()[:32]


def _known_arrangement(backend: type[AttentionBackend], spec: Any) -> Arrangement | None:
    """Return what a backend gives a place of its own; None where that is not known."""
    name, mode = backend.get_name(), spec.kv_quant_mode.name
    module, stores_in = (_defined_in(backend, each) for each in ("get_name", "get_impl_cls"))
    # Models that store by themselves have backends without an implementation, or with one that does
    # not store.
    known_places = (module, _ABSTRACT, f"{_V4}.sparse_mla")
    if stores_in not in known_places and (stores_in, name) not in _STORE_AS_THEIR_PARENTS:
        return None
    if (module, name) not in _SLOTS:
        return _OTHERS.get((module, name))
    if module in _AITER and _is_shuffled():
        return _AITER[module]
    if name == "TURBOQUANT" and keeps_turboquants_scales_apart():
        return None
    if name == "FLASHINFER" and mode == "NVFP4":
        # `_nvfp4_kv_views`.
        return Arrangement.QUARTERS
    if name == "MINIMAX_M3_SPARSE" and mode == "NVFP4":
        # `nvfp4_kv_cache_views`: two slots of a head, each with numbers before scales.
        return Arrangement.HEADS
    quantizations = _SLOT_QUANTIZATIONS | _OWN_QUANTIZATIONS.get(name, frozenset())
    known = mode in quantizations and tokens_per_slot(spec) >= 1
    return Arrangement.SLOTS if known else None


def _chosen_inside(
    backend: type[AttentionBackend], spec: Any, tensor: torch.Tensor, settings: str
) -> dict[str, str]:
    """Return what a known backend's arrangement leaves to the device, or to an option."""
    match backend.get_name():
        case "CPU_ATTN":
            return {"instructions": _cpu_instructions(spec, tensor)}
        case "TURBOQUANT" if spec.kv_quant_mode.name == "TURBOQUANT_K8V4":
            # `_use_fp8_e4b15`: keys are of another type where there are no kernels for e4m3.
            capability = current_platform.get_device_capability()
            is_old = current_platform.is_cuda() and capability is not None and capability < (8, 9)
            return {"keys": "e4b15" if is_old else "e4m3"}
        case "FLASHINFER" if spec.kv_quant_mode.name == "NVFP4":
            # `_nvfp4_kv_on_fa2`: for the other kernels, scales of values are shuffled among four
            # tokens.
            families = (80, 90, 120)
            on_fa2 = any(current_platform.is_device_capability_family(each) for each in families)
            return {"kernels": "fa2" if on_fa2 else "trtllm-gen"}
        case "ROCM_ATTN":
            # `set_interleaved_v_cache`: a pass that fuses the writing kernel has it arrange values
            # differently.
            return {"settings": settings, "values": ROCM_ATTN_VALUES.meaning}
        case "DEEPSEEK_V32_INDEXER" | "DEEPSEEK_V4_INDEXER":
            # `indexer_k_quant_and_cache_triton` shuffles values on ROCm, and none of these caches
            # says which 8-bit type it has. `mqa_logits_use_mx_scales` says what a scale is.
            are_exponents = (
                BLACKWELL_SCALES.is_here
                and current_platform.is_cuda()
                and current_platform.is_device_capability_family(100)
            )
            scales = "exponents" if are_exponents else "float32"
            return {"device": _maker(tensor), "scales": scales}
        case "DEEPSEEK_SPARSE_SWA":
            return {"device": _maker(tensor)}
    return {}


def _is_shuffled() -> bool:
    """Return whether the environment makes AITER's backends arrange tokens for its kernels."""
    from vllm._aiter_ops import rocm_aiter_ops

    return bool(rocm_aiter_ops.is_shuffle_kv_cache_enabled())


def _numbers(spec: Any) -> str:
    """Return the number format of a cache."""
    mode = spec.kv_quant_mode.name
    parts = [str(spec.dtype).removeprefix("torch.")]
    if mode != "NONE":
        parts.append(mode)
        # Two formats are called e4m3; the device decides which one is meant.
        parts.append(str(current_platform.fp8_dtype()).removeprefix("torch."))
        if isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec) and spec.cache_dtype_str:
            parts.append(spec.cache_dtype_str)
    return " ".join(parts)


def _cpu_instructions(spec: Any, tensor: torch.Tensor) -> str:
    """Return the instruction set for which CPU_ATTN packs the tokens of a head."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    # The last axis but one is the tokens' in all bases.
    return str(_get_attn_isa(spec.dtype, tensor.shape[-2], spec.head_size))


def _everything(
    backend: type[AttentionBackend], spec: Any, tensor: torch.Tensor, settings: str
) -> dict[str, str]:
    """Return all that may affect what an unknown backend writes.

    Scheduler block sizes, padding, and which tokens are kept or seen are left out: the inside of a
    block does not depend on them. They also differ among stages, because a group's specification is
    shared by all of its layers.
    """
    outside = {
        *("block_size", "page_size_padded", "block_stride_alignment"),
        *("sliding_window", "attention_chunk_size", "extra_retained_tokens", "is_draft"),
        *("non_causal", "non_causal_multi_token_decode"),
    }
    fields = [
        f"{field.name}={getattr(spec, field.name)}"
        for field in dataclasses.fields(spec)
        if field.name not in outside
    ]
    parts = backend, _class_of(backend.get_impl_cls), _class_of(backend.get_builder_cls)
    return {
        "arrangement": Arrangement.PAGE.value,
        "written by": " ".join(f"{each.__module__}.{each.__qualname__}" for each in parts if each),
        "specification": f"{type(spec).__name__}({', '.join(fields)})",
        "shape and strides": f"{tuple(tensor.shape[1:])} {tuple(tensor.stride()[1:])}",
        "device": f"{tensor.device.type} {_device_name(tensor)}",
        "settings": settings,
        "release": vllm_version.partition("+")[0],
    }


def _class_of(getter: Callable[[], type | None]) -> type | None:
    """Return the class that a backend's getter names; None where it names none."""
    try:
        return getter()
    except NotImplementedError:
        return None


def _maker(tensor: torch.Tensor) -> str:
    """Return the device's maker, and the device where one maker's kernels differ."""
    if current_platform.is_cuda():
        return "cuda"
    return f"{tensor.device.type} {_device_name(tensor)}"


def _device_name(tensor: torch.Tensor) -> str:
    """Return the device property that kernels are chosen by."""
    if tensor.device.type == "cpu":
        return str(current_platform.get_cpu_architecture())
    properties = torch.cuda.get_device_properties(tensor.device)
    if current_platform.is_rocm():
        return str(properties.gcnArchName)
    return f"{properties.major}.{properties.minor}"


def _defined_in(backend: type[AttentionBackend], method: str) -> str:
    """Return the module of the class that defines a method."""
    return next(
        (each.__module__ for each in backend.__mro__ if method in vars(each)),
        backend.__module__,
    )

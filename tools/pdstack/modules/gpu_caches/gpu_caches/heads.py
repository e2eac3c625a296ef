# SPDX-License-Identifier: Apache-2.0
"""A backend for each format of heads over a cache in blocks, called as GPU_CACHES names it."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.kv_cache_layout import KVCacheLayout

from . import formats, nvfp4, turboquant, ultraquant
from .attention import Attention, Builder
from .identity import takes_the_place_of

BLOCK_COMPACT = tuple(layout for layout in KVCacheLayout if layout.is_block_compact)
"""Layouts in which a layer's part of a block is in one piece."""


def kernel_block_sizes() -> list[int | MultipleOf]:
    """The sizes of blocks that a backend takes, in tokens."""
    asked_for = os.environ.get("GPU_CACHES_KERNEL_BLOCK")
    return [int(asked_for)] if asked_for else [MultipleOf(16)]


class Backend(AttentionBackend):
    """What all backends have in common."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32]
    format: ClassVar[type[formats.Format]]
    layouts: ClassVar[tuple[KVCacheLayout, ...] | None] = None

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        """What makes metadata."""
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Blocks of any size, or of the one that is asked for."""
        return kernel_block_sizes()

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...] | None:
        """All, unless a format speaks of whole blocks."""
        return cls.layouts

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """The specification as the format wants it."""
        return cls.format.customize(spec)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """They do."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """They do."""
        return True


@takes_the_place_of("FLASH_ATTN", Attention)
class Slots(Backend):
    """`reshape_and_cache_flash`, of whichever backend."""

    format = formats.Format


@takes_the_place_of("TRITON_ATTN", Attention)
class Scaled(Backend):
    """`triton_reshape_and_cache_flash_per_token_head_quant`: fp8_per_token_head."""

    format = formats.Scaled


@takes_the_place_of("B12X", Attention)
class Sides(Backend):
    """`B12xPagedAttentionImpl._kv_cache_views`."""

    format = formats.Sides


@takes_the_place_of("ROCM_ATTN", Attention)
class PackedSides(Backend):
    """`PagedAttention.split_kv_cache`, of ROCm's own kernels, by whichever of its writers."""

    format = formats.PackedSides
    layouts = (KVCacheLayout.LHBNC, KVCacheLayout.LBHNC)


@takes_the_place_of("ROCM_AITER_FA", Attention, called="FLASH_ATTN")
class Shuffled(Backend):
    """`reshape_and_cache_shuffle_triton`, with VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT."""

    format = formats.Shuffled
    layouts = (KVCacheLayout.LHBNC, KVCacheLayout.LBHNC)


class _MinimaxM3(Backend):
    """What has one block for each that sparse attention chooses."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """The one of that attention."""
        return [128]


@takes_the_place_of("MINIMAX_M3_SPARSE", Attention)
class MinimaxM3(_MinimaxM3):
    """`fused_minimax_m3_qknorm_rope_kv_insert`."""

    format = formats.Format


@takes_the_place_of("MINIMAX_M3_SPARSE", Attention)
class MinimaxM3Nvfp4(_MinimaxM3):
    """The same of 4 bits, by its `nvfp4_kv_cache_slots`."""

    format = nvfp4.Nvfp4Heads
    layouts = (KVCacheLayout.LBHNC,)


@takes_the_place_of("FLASHINFER", Attention)
class Nvfp4(Backend):
    """`_nvfp4_kv_views`, with scales as trtllm-gen's kernels have them, on Blackwell."""

    format = nvfp4.Nvfp4
    layouts = (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)


@takes_the_place_of("TURBOQUANT", Attention)
class TurboQuant(Backend):
    """`triton_turboquant_store`: turboquant_k8v4."""

    format = turboquant.TurboQuant
    layouts = (KVCacheLayout.LBNHC,)


@takes_the_place_of("TURBOQUANT", Attention)
class TurboQuant3(Backend):
    """The same: turboquant_3bit_nc."""

    format = turboquant.TurboQuant3
    layouts = (KVCacheLayout.LBNHC,)


@takes_the_place_of("ULTRAQUANT", Attention)
class UltraQuant(Backend):
    """`ultraquant_store`: ultraquant_4bit."""

    format = ultraquant.UltraQuant
    layouts = (KVCacheLayout.LBNHC,)


@takes_the_place_of(None, Attention)
class ScalesLast(Backend):
    """Nobody's, with what indexers do to a block."""

    format = formats.ScalesLast
    layouts = BLOCK_COMPACT


@takes_the_place_of(None, Attention)
class Scrambled(Backend):
    """Nobody's."""

    format = formats.Scrambled
    layouts = BLOCK_COMPACT

# SPDX-License-Identifier: Apache-2.0
"""The backend for caches of vLLM 0.22.1: keys and values are two planes, in either order."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.attention.backends.utils import get_kv_cache_layout

from . import formats
from .attention import Attention, Builder
from .identity import takes_the_place_of


@takes_the_place_of("FLASH_ATTN", Attention)
class Planes(AttentionBackend):
    """`reshape_and_cache_flash`, as that release's backends call it."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32]
    format = formats.Planes

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        """What makes metadata."""
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        """Blocks of any size that FlashAttention has."""
        return [MultipleOf(16)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *_: Any, **__: Any
    ) -> tuple[int, ...]:
        """FlashAttention's."""
        return 2, num_blocks, block_size, num_kv_heads, head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Tokens before heads, or heads before tokens, as `VLLM_KV_CACHE_LAYOUT` says."""
        if include_num_layers_dimension:
            raise NotImplementedError
        return (0, 1, 3, 2, 4) if get_kv_cache_layout() == "HND" else (0, 1, 2, 3, 4)

# SPDX-License-Identifier: Apache-2.0
"""What vLLM for CPU says of its own backends, where it is not what these want."""

from __future__ import annotations

from functools import wraps
from typing import Any

from vllm.platforms.cpu import CpuPlatform


def leave_block_size() -> None:
    """Let models with MLA have the blocks that were asked for, where vLLM makes them 16 tokens."""
    decide = CpuPlatform.check_and_update_config.__func__
    if hasattr(decide, "__wrapped__"):
        return

    @wraps(decide)
    def decide_but_blocks(cls: type, vllm_config: Any) -> None:
        cache = vllm_config.cache_config
        asked_for = cache.block_size if cache.user_specified_block_size else None
        decide(cls, vllm_config)
        if asked_for:
            cache.block_size = asked_for

    CpuPlatform.check_and_update_config = classmethod(decide_but_blocks)


def shuffle() -> None:
    """Say that AITER's caches are shuffled, which vLLM says on ROCm only."""
    from vllm._aiter_ops import rocm_aiter_ops

    rocm_aiter_ops.is_shuffle_kv_cache_enabled = staticmethod(lambda: True)

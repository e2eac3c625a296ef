# SPDX-License-Identifier: Apache-2.0
"""What vLLM for CPU decides for its own backends, and must not decide for these."""

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

# SPDX-License-Identifier: Apache-2.0
"""What cases depend on in the base that is installed, told without importing vLLM."""

from __future__ import annotations

import importlib.metadata

from packaging.version import Version


def planes_of_attention() -> int:
    """Planes in which a layer keeps keys and values: two in 0.22.1, later one, side by side.

    Ranks see that it is so in the caches that they make.
    """
    return 2 if _release() < (0, 32) else 1


def upstream_lists_are_arrays() -> bool:
    """Whether upstream's connector keeps descriptors in arrays: since 0.32; before in lists."""
    return _release() >= (0, 32)


def _release() -> tuple[int, ...]:
    return Version(importlib.metadata.version("vllm")).release

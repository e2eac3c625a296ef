# SPDX-License-Identifier: Apache-2.0
"""What this machine's CPU can, where that decides which engines can be started."""

from __future__ import annotations

import re
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
# What torch, which vLLM asks, means by AVX-512.
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})
_AMX = "amx_tile"
_BFLOAT16 = "avx512_bf16"


def why_no_fp8_cache(cpuinfo: str | None = None) -> str:
    """Return why vLLM's attention has no fp8 KV cache on a CPU; an empty string where it has one.

    Args:
        cpuinfo: what Linux says of the CPU; by default of this one.
    """
    flags = _flags(cpuinfo)
    if flags >= _AVX512 or _AMX in flags:
        return ""
    return "vLLM's fp8 KV cache on CPU requires x86 with AVX-512 or AMX, and this CPU has neither"


def why_no_bfloat16_operators(cpuinfo: str | None = None) -> str:
    """Return why vLLM lacks some operators on a CPU; an empty string where it has all.

    Of its three builds in one wheel only `_C` has those of DeepSeek V4 and of AMX_MLA's cache:
    `CpuPlatform.import_kernels` takes that one where AVX-512 computes bfloat16.

    Args:
        cpuinfo: what Linux says of the CPU; by default of this one.
    """
    if _flags(cpuinfo) >= _AVX512 | {_BFLOAT16}:
        return ""
    return "vLLM has its operators on x86 with AVX-512 for bfloat16, which this CPU lacks"


def _flags(cpuinfo: str | None) -> set[str]:
    said = re.search(r"^flags\s*:(.*)$", cpuinfo or _CPUINFO.read_text(), re.MULTILINE)
    return set(said[1].split()) if said else set()

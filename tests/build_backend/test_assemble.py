# SPDX-License-Identifier: Apache-2.0
"""The wheel of the product, from the small base."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
from reshard_build import build_editable, build_wheel, prepare_metadata_for_build_wheel
from reshard_build.archive import verify_wheel
from reshard_build.product import version_module

CORE = "vllm/engine/core.py"
CPU_WHEEL = "vllm-0.22.1+reshard.1.cpu-cp38-abi3-manylinux_2_28_x86_64.whl"


def _contents(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _base(frontend: Any, target: str = "cpu") -> dict[str, bytes]:
    contents = _contents(frontend.cache / frontend.base.targets[target].wheels["x86_64"].file)
    return {name: content for name, content in contents.items() if name.startswith("vllm/")}


def test_each_file_comes_from_its_owner(frontend: Any, tmp_path: Path) -> None:
    """Patched files, overlay and version are ours; all else is the base's, byte for byte."""
    core = frontend.edit_core("edit", 5, "'x'")
    frontend.add_patch("add", {}, {"vllm/added.py": b"ADDED = 1\n"})
    frontend.add_patch("drop", {"vllm/py.typed": b"gone\n"}, {})
    frontend.pin({**_base(frontend), "vllm/py.typed": b"gone\n"})
    frontend.write("vllm/own/mine.py", "MINE = 1\n")
    assert build_wheel(str(tmp_path)) == CPU_WHEEL
    built = _contents(tmp_path / CPU_WHEEL)
    verify_wheel(tmp_path / CPU_WHEEL)
    package = {name: content for name, content in built.items() if name.startswith("vllm/")}
    expected = _base(frontend) | {
        CORE: core.encode(),
        "vllm/added.py": b"ADDED = 1\n",
        "vllm/own/mine.py": b"MINE = 1\n",
        "vllm/_version.py": version_module("0.22.1+reshard.1.cpu"),
    }
    del expected["vllm/py.typed"]
    assert package == expected


def test_modes_are_kept_and_files_compressed(frontend: Any, tmp_path: Path) -> None:
    """What is executable in the base is executable in the product, which is to be fetched."""
    build_wheel(str(tmp_path))
    with zipfile.ZipFile(tmp_path / CPU_WHEEL) as archive:
        assert archive.getinfo(CORE).compress_type == zipfile.ZIP_DEFLATED
        assert archive.getinfo("vllm/vllm-rs").external_attr >> 16 == 0o100755
        assert archive.getinfo(CORE).external_attr >> 16 == 0o100644


@pytest.mark.parametrize("build", [build_wheel, build_editable])
def test_scripts_are_installed_as_commands(frontend: Any, tmp_path: Path, build: Any) -> None:
    """Both kinds of wheel bring them where installers look for commands, executable."""
    frontend.write("scripts/tool", "#!python\nprint('tool')\n")
    frontend.write("scripts/__pycache__/tool.pyc", "")
    name = build(str(tmp_path))
    verify_wheel(tmp_path / name)
    with zipfile.ZipFile(tmp_path / name) as archive:
        (path,) = (each for each in archive.namelist() if "tool" in each)
        assert path == "vllm-0.22.1+reshard.1.cpu.data/scripts/tool"
        assert archive.read(path) == b"#!python\nprint('tool')\n"
        assert archive.getinfo(path).external_attr >> 16 == 0o100755


def test_same_sources_give_the_same_bytes(frontend: Any, tmp_path: Path) -> None:
    """Two builds of one tree are equal."""
    frontend.write("vllm/own/mine.py", "MINE = 1\n")
    for directory in ("one", "two"):
        build_wheel(str(tmp_path / directory))
    assert (tmp_path / "one" / CPU_WHEEL).read_bytes() == (
        tmp_path / "two" / CPU_WHEEL
    ).read_bytes()


def test_metadata_hook_agrees_with_the_wheel(frontend: Any, tmp_path: Path) -> None:
    """The metadata that a frontend asks for first is that of the wheel."""
    name = prepare_metadata_for_build_wheel(str(tmp_path))
    build_wheel(str(tmp_path))
    built = _contents(tmp_path / CPU_WHEEL)
    prepared = {
        path.relative_to(tmp_path).as_posix(): path.read_bytes()
        for path in (tmp_path / name).rglob("*")
        if path.is_file()
    }
    assert prepared.keys() == {n for n in built if n.startswith(name)} - {f"{name}/RECORD"}
    assert all(built[path] == content for path, content in prepared.items())


def test_cuda_wheel_has_no_suffix(
    frontend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target's variable decides what is built, with or without a GPU."""
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cuda")
    name = build_wheel(str(tmp_path))
    assert name == "vllm-0.22.1+reshard.1-cp38-abi3-manylinux_2_28_x86_64.whl"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: s.write("vllm/version.py", ""), r"overlay file vllm/version\.py stands where"),
        (
            lambda s: s.edit_core("drift", 5, "'x'", core="LINE_5 = 5\n"),
            r"drift\.patch .*core\.py",
        ),
        (lambda s: s.pin(break_record=True), "Hash mismatch"),
    ],
)
def test_failure_leaves_no_wheel(frontend: Any, tmp_path: Path, spoil: Any, message: str) -> None:
    """A failed build ends in one line, and puts nothing into the directory."""
    spoil(frontend)
    with pytest.raises(SystemExit, match=message):
        build_wheel(str(tmp_path / "wheels"))
    assert not (tmp_path / "wheels").exists() or not any((tmp_path / "wheels").iterdir())


def test_version_module_of_a_release() -> None:
    """The module's names agree with each other."""
    names: dict[str, Any] = {}
    exec(version_module("0.22.1+reshard.3.cpu"), names)
    assert names["__version__"] == names["version"] == "0.22.1+reshard.3.cpu"
    assert names["__version_tuple__"] == names["version_tuple"] == (0, 22, 1, "reshard.3.cpu")

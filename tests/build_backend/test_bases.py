# SPDX-License-Identifier: Apache-2.0
"""Several bases side by side: which is chosen, and what is said where that cannot be."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
from reshard_build import build_wheel, check
from reshard_build.__main__ import main
from reshard_build.bases import (
    default_release,
    load_bases,
    releases,
    require_python_of,
    select_base,
)
from reshard_build.errors import ConfigError, PythonTooOldError, UnknownBaseError
from reshard_build.product import choose

CORE = "vllm/engine/core.py"
CPU_WHEEL = "vllm-0.33.0+reshard.1.checked.cpu-cp38-abi3-manylinux_2_28_x86_64.whl"


@pytest.fixture
def bases(frontend: Any) -> Any:
    """Return a source tree with two bases: 0.22.1, the default, and 0.33.0, only checked."""
    path = frontend.pin({"vllm/__init__.py": b"NEW = 1\n"}, release="0.33.0")
    text = path.read_text().replace('status = "run"', 'status = "checked"')
    path.write_text(text.replace('python = "3.10"', 'python = "3.11"'))
    return frontend


def test_releases_are_ordered_as_versions(bases: Any) -> None:
    """The newest stands last, however its name sorts."""
    bases.pin(release="0.9.2")
    assert releases(bases.project) == ("0.9.2", "0.22.1", "0.33.0")


def test_default_without_the_variable(bases: Any) -> None:
    """Unset or empty, the variable means the default."""
    assert select_base(bases.project, {}).version == "0.22.1"
    assert select_base(bases.project, {"VLLM_RESHARD_BASE": " "}).version == "0.22.1"
    assert select_base(bases.project, {"VLLM_RESHARD_BASE": "0.33.0"}).version == "0.33.0"


def test_unknown_base_lists_what_there_is(bases: Any) -> None:
    """The message names the bases with their targets, the default, and what is only checked."""
    with pytest.raises(UnknownBaseError) as raised:
        select_base(bases.project, {"VLLM_RESHARD_BASE": "0.30.0"})
    text = str(raised.value)
    assert "VLLM_RESHARD_BASE=0.30.0 is not a base" in text
    assert "0.22.1 (cpu, cuda; the default for cpu and cuda), 0.33.0 (cpu, cuda; only c" in text


def test_each_target_has_a_default_of_its_own(bases: Any) -> None:
    """The variable decides, else what the machine has; an unknown target gets the first."""
    bases.project.default_file.write_text("cpu 0.22.1\ncuda 0.33.0\n")
    for environ, answers, release in (
        ({}, False, "0.22.1"),
        ({}, True, "0.33.0"),
        ({"VLLM_TARGET_DEVICE": "cuda"}, False, "0.33.0"),
        ({"VLLM_TARGET_DEVICE": "cpu"}, True, "0.22.1"),
        ({"VLLM_TARGET_DEVICE": "rocm"}, True, "0.22.1"),
        ({"VLLM_RESHARD_BASE": "0.22.1"}, True, "0.22.1"),
    ):
        chosen = select_base(bases.project, environ, lambda answers=answers: answers)
        assert chosen.version == release, environ
    asked = {**bases.environ, "VLLM_TARGET_DEVICE": "cuda"}
    assert choose(bases.project, asked).config.version == "0.33.0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "bases/default is empty; give each target a line"),
        ("cpu 0.30.0\n", r"has the line 'cpu 0\.30\.0', which names none of 0\.22\.1, 0\.33\.0"),
        ("0.22.1\n", r"has the line '0\.22\.1', which names none of"),
    ],
)
def test_default_must_be_a_base(bases: Any, text: str, message: str) -> None:
    """A default that does not exist is refused before anything is built."""
    bases.project.default_file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        default_release(bases.project, "cpu")


def test_tree_without_bases_is_refused(bases: Any) -> None:
    """An incomplete source tree is named as such."""
    bases.project.default_file.unlink()
    with pytest.raises(ConfigError, match="default is missing"):
        default_release(bases.project, "cpu")
    for release in releases(bases.project):
        bases.project.base_file(release).unlink()
    with pytest.raises(ConfigError, match="holds no base"):
        releases(bases.project)


def test_old_python_is_told_which_base_it_runs(bases: Any) -> None:
    """A base that wants a newer Python says so, and names the one that does not."""
    old, new = load_bases(bases.project)
    require_python_of(old, (old, new), (3, 10, 14))
    require_python_of(new, (old, new), (3, 11, 0))
    with pytest.raises(PythonTooOldError) as raised:
        require_python_of(new, (old, new), (3, 10, 14))
    text = str(raised.value)
    assert "Python 3.10.14" in text and "too old for base 0.33.0" in text
    assert "0.22.1 needs 3.10, 0.33.0 needs 3.11" in text
    assert "set VLLM_RESHARD_BASE=0.22.1" in text


def test_build_refuses_an_old_python(bases: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The build asks before it fetches anything."""
    path = bases.project.base_file("0.33.0")
    path.write_text(path.read_text().replace('python = "3.11"', 'python = "3.99"'))
    with pytest.raises(PythonTooOldError, match=r"0\.33\.0 needs 3\.99"):
        choose(bases.project, {**bases.environ, "VLLM_RESHARD_BASE": "0.33.0"})


def test_version_says_what_is_only_checked(bases: Any) -> None:
    """A base that is not run says so in the version; CPU builds still have `cpu` in it."""
    base = select_base(bases.project, {"VLLM_RESHARD_BASE": "0.33.0"})
    assert base.targets["cuda"].version == "0.33.0+reshard.1.checked"
    assert base.targets["cpu"].version == "0.33.0+reshard.1.checked.cpu"


def test_each_base_has_patches_and_modules_of_its_own(
    bases: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel holds its base's patches and modules, and the overlay that all bases share."""
    bases.edit_core("edit", 5, "'x'")
    bases.write("vllm/own/mine.py", "MINE = 1\n")
    bases.write("bases/0.33.0/vllm/own/extra.py", "EXTRA = 1\n")
    monkeypatch.setenv("VLLM_RESHARD_BASE", "0.33.0")
    assert build_wheel(str(tmp_path)) == CPU_WHEEL
    monkeypatch.delenv("VLLM_RESHARD_BASE")
    other = build_wheel(str(tmp_path))
    with zipfile.ZipFile(tmp_path / CPU_WHEEL) as new, zipfile.ZipFile(tmp_path / other) as old:
        assert "vllm/own/extra.py" in new.namelist() and "vllm/own/mine.py" in new.namelist()
        assert CORE not in new.namelist()
        assert "vllm/own/extra.py" not in old.namelist() and "vllm/own/mine.py" in old.namelist()
        assert b"LINE_5 = 'x'" in old.read(CORE)


@pytest.mark.parametrize("clash", ["vllm/own/mine.py", "vllm/__init__.py"])
def test_module_of_one_base_clashes_with_nothing(
    bases: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clash: str
) -> None:
    """It may stand neither where the shared overlay has a file nor where upstream has one."""
    bases.write("vllm/own/mine.py", "MINE = 1\n")
    bases.write(f"bases/0.33.0/{clash}", "")
    monkeypatch.setenv("VLLM_RESHARD_BASE", "0.33.0")
    with pytest.raises(SystemExit, match=f"overlay file {clash} stands where"):
        build_wheel(str(tmp_path))
    monkeypatch.delenv("VLLM_RESHARD_BASE")
    build_wheel(str(tmp_path))


def test_scratch_repositories_are_apart(bases: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing and exporting one base leaves the other's patches alone."""
    bases.edit_core("edit", 5, "'x'")
    before = (bases.patches_dir / "series").read_bytes()
    monkeypatch.setenv("VLLM_RESHARD_BASE", "0.33.0")
    main(["--root", str(bases.root), "import"])
    main(["--root", str(bases.root), "export"])
    assert (bases.root / "build/tree-0.33.0/.git").is_dir()
    assert not (bases.root / "build/tree-0.22.1").exists()
    assert (bases.patches_dir / "series").read_bytes() == before
    assert (bases.project.patches_dir("0.33.0") / "series").read_text() == ""


def test_check_proves_every_base_or_those_named(
    bases: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All wheels of all bases by default; an unknown base is refused."""
    # What takes time, and is held elsewhere.
    monkeypatch.setattr(check, "require_types", lambda *_: None)
    main(["--root", str(bases.root), "check"])
    out = capsys.readouterr().out
    assert all(
        f"apply, {b} {t} x86_64" in out for b in releases(bases.project) for t in ("cpu", "cuda")
    )
    main(["--root", str(bases.root), "check", "0.33.0"])
    assert "0.22.1" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"0\.1 is not a base; choose from 0\.22\.1, 0\.33\.0"):
        main(["--root", str(bases.root), "check", "0.1"])

# SPDX-License-Identifier: Apache-2.0
"""What `make patches-check` proves."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from reshard_build import check
from reshard_build.__main__ import main
from reshard_build.check import run_checks

from tests.build_backend.conftest import PACKAGE

CORE = "vllm/engine/core.py"


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tree of `checked` is kept once it has been made."""
    return tmp_path_factory.mktemp("kept") / "checked"


@pytest.fixture
def checked(frontend: Any, kept: Path, tmp_path: Path) -> Any:
    """Return a source tree with two exported patches and an overlay, that passes all checks."""
    if kept.exists():
        shutil.copytree(kept, frontend.directory, dirs_exist_ok=True)
        return frontend
    core = frontend.edit_core("area: first", 5, "'a'")
    frontend.edit_core("area: second", 20, "'b'", core=core)
    frontend.write(
        "vllm/own/mine.py", "from vllm.engine.core import LINE_5\nfrom vllm import lazy\n"
    )
    main(["--root", str(frontend.root), "import", str(tmp_path / "scratch")])
    main(["--root", str(frontend.root), "export", str(tmp_path / "scratch")])
    shutil.rmtree(tmp_path / "scratch")
    for name in ("source", "cache"):
        shutil.copytree(frontend.directory / name, kept / name)
    return frontend


def _failures(source_tree: Any) -> dict[str, str]:
    return {
        proof.name: proof.text
        for proof in run_checks(source_tree.project, source_tree.environ)
        if not proof.ok
    }


def test_sound_tree_passes_for_both_bases(checked: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """One line a proof, each target named, exit status 0."""
    assert main(["--root", str(checked.root), "check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["ok   series, 0.22.1"] + [
        f"ok   {proof}, 0.22.1 {target} x86_64"
        for target in ("cpu", "cuda")
        for proof in ("apply", "re-export", "duplicates", "types", "overlay")
    ]


def test_empty_tree_passes(frontend: Any) -> None:
    """No patches and no overlay are fine."""
    assert _failures(frontend) == {}


def _edit(source_tree: Any, name: str, old: str, new: str) -> None:
    path = source_tree.patches_dir / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("spoil", "proofs", "message"),
    [
        (
            lambda s: s.write("bases/0.22.1/stray.patch", ""),
            {"series, 0.22.1"},
            r"stray\.patch is not in",
        ),
        (
            lambda s: _edit(s, "area-first.patch", "Why: ", "Because: "),
            {"series, 0.22.1"},
            r"area-first\.patch lacks Why:",
        ),
        (
            lambda s: _edit(s, "area-first.patch", "+LINE_5 = 'a'", "+LINE_5 = 'z'"),
            {"apply, 0.22.1 cpu x86_64", "apply, 0.22.1 cuda x86_64"},
            r"area-first\.patch does not apply .* not the one that the patch promises",
        ),
        (
            lambda s: _edit(s, "area-first.patch", "From: Developer", "From: Developer "),
            {"re-export, 0.22.1 cpu x86_64", "re-export, 0.22.1 cuda x86_64"},
            r"area-first\.patch would change",
        ),
        (
            lambda s: s.write("vllm/version.py", ""),
            {"overlay, 0.22.1 cpu x86_64", "overlay, 0.22.1 cuda x86_64"},
            r"vllm/version\.py stands where",
        ),
        (
            lambda s: s.write("vllm/own/bad.py", "from vllm.engine import gone\n"),
            {"types, 0.22.1 cpu x86_64", "types, 0.22.1 cuda x86_64"},
            r"vllm/own/bad\.py:1 \"gone\" is unknown import symbol",
        ),
    ],
)
def test_each_fault_fails_its_proof(
    checked: Any, spoil: Any, proofs: set[str], message: str
) -> None:
    """A fault is found by the proof that is there for it, for both bases, and by no other."""
    spoil(checked)
    failures = _failures(checked)
    assert failures.keys() == proofs
    assert all(re.search(message, text) for text in failures.values())


def test_one_drifted_base_fails_by_its_name(checked: Any) -> None:
    """A series that fits only one of the bases fails for the other."""
    cpu = checked.base.targets["cpu"].wheels["x86_64"]
    cpu_wheel = (checked.cache / cpu.file).read_bytes()
    checked.pin({"vllm/__init__.py": b"", CORE: checked.core_lines(upstream_at=20).encode()})
    drifted = checked.base.targets["cpu"].wheels["x86_64"]
    text = checked.base_file.read_text().replace(drifted.sha256, cpu.sha256)
    checked.base_file.write_text(text)
    (checked.cache / cpu.file).write_bytes(cpu_wheel)
    failures = _failures(checked)
    assert failures.keys() == {"apply, 0.22.1 cuda x86_64"}
    assert "area-second.patch" in failures["apply, 0.22.1 cuda x86_64"]


def _have_cuda_differ(source_tree: Any, **files: bytes) -> None:
    """Give the wheel for CUDA other files of `vllm/engine` than the one for CPU."""
    cpu = source_tree.base.targets["cpu"].wheels["x86_64"]
    before = (source_tree.cache / cpu.file).read_bytes()
    others = {f"vllm/engine/{name}.py": content for name, content in files.items()}
    source_tree.pin({**PACKAGE, **others})
    after = source_tree.base.targets["cpu"].wheels["x86_64"]
    text = source_tree.base_file.read_text().replace(after.sha256, cpu.sha256)
    source_tree.base_file.write_text(text)
    (source_tree.cache / cpu.file).write_bytes(before)


def test_wheel_that_differs_where_we_look_is_checked_whole(checked: Any) -> None:
    """What we import is there for CPU only, in a module that is there for both."""
    main_only = b"MAIN = 1\n"
    checked.pin({**PACKAGE, "vllm/engine/extra.py": main_only})
    checked.write("vllm/own/mine.py", "from vllm.engine.extra import MAIN as MINE\n")
    _have_cuda_differ(checked, extra=b"OTHER = 1\n")
    failures = _failures(checked)
    assert failures.keys() == {"types, 0.22.1 cuda x86_64"}
    assert '"MAIN" is unknown import symbol' in failures["types, 0.22.1 cuda x86_64"]


def test_wheel_that_differs_elsewhere_is_as_the_first(
    checked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pyright reads one of both, and what is said of the other tells so."""
    run, runs = check.require_types, []
    monkeypatch.setattr(
        check, "require_types", lambda *given: runs.append(given[-1]) or run(*given)
    )
    _have_cuda_differ(checked, bundled=b"ANY = 1\n")
    (text,) = (
        proof.text
        for proof in run_checks(checked.project, checked.environ)
        if proof.name == "types, 0.22.1 cuda x86_64"
    )
    cpu = checked.base.targets["cpu"].wheels["x86_64"].file
    assert runs == [cpu]
    assert text.endswith(f", as on {cpu}: they import none of 1 files that differ")


def test_patch_that_adds_an_overlay_path_fails(checked: Any) -> None:
    """A patch must not make a file that the overlay owns."""
    checked.add_patch("add", {}, {"vllm/own/mine.py": b"MINE = 1\n"})
    assert r"add.patch" in _failures(checked)["overlay, 0.22.1 cpu x86_64"]


def test_failure_is_the_exit_status(checked: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """One failed proof makes the command fail, after all proofs were printed."""
    checked.write("vllm/own/bad.py", "import vllm.gone\n")
    assert main(["--root", str(checked.root), "check"]) == 1
    out = capsys.readouterr().out
    assert "FAIL types, 0.22.1 cpu x86_64" in out and "ok   overlay, 0.22.1 cuda x86_64" in out

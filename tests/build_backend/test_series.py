# SPDX-License-Identifier: Apache-2.0
"""The series: what it names, and applying it exactly."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reshard_build.errors import GitError, PatchDriftError, SeriesError
from reshard_build.series import apply_series, load_series, read_series_file, touched_paths

CORE = "vllm/engine/core.py"


def _core(source_tree: Any) -> str:
    return "".join(f"LINE_{number} = {number}\n" for number in range(1, 31))


def test_empty_series_changes_nothing(source_tree: Any) -> None:
    """A directory without patches, or without `series`, is a series of none."""
    assert load_series(source_tree.patches_dir) == ()
    (source_tree.patches_dir / "series").unlink()
    assert load_series(source_tree.patches_dir) == ()
    assert apply_series((), {CORE: b""}) == {}


def test_comments_before_the_first_entry_are_kept_apart(source_tree: Any) -> None:
    """Only the comments at the top belong to the file as a whole."""
    source_tree.write("bases/0.22.1/series", "# one\n\n# two\na.patch\n# three\nb.patch\n")
    series = read_series_file(source_tree.patches_dir)
    assert series.comments == ("# one", "", "# two")
    assert series.names == ("a.patch", "b.patch")


def test_series_applies_in_order(source_tree: Any) -> None:
    """Later patches build on earlier ones."""
    first = source_tree.edit_core("first", 5, "'a'")
    second = source_tree.edit_core("second", 6, "'b'", core=first)
    patches = load_series(source_tree.patches_dir)
    assert touched_paths(patches) == (CORE,)
    result = apply_series(patches, {CORE: _core(source_tree).encode()})
    assert result == {CORE: second.encode()}


def test_new_and_deleted_files(source_tree: Any) -> None:
    """A new file appears with its content, a deleted one as `None`."""
    source_tree.add_patch("swap", {"vllm/a.py": b"a\n"}, {"vllm/sub/b.py": b"other\n"})
    patches = load_series(source_tree.patches_dir)
    result = apply_series(patches, {"vllm/a.py": b"a\n"})
    assert result == {"vllm/a.py": None, "vllm/sub/b.py": b"other\n"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.write("bases/0.22.1/series", "a.patch\na.patch\n"), r"names a\.patch twice"),
        (
            lambda s: s.write("bases/0.22.1/series", "b.patch\n"),
            r"names b\.patch, which does not exist",
        ),
        (lambda s: s.write("bases/0.22.1/c.patch", ""), r"c\.patch is not in 0\.22\.1/series"),
    ],
)
def test_series_and_files_must_agree(source_tree: Any, change: Any, message: str) -> None:
    """A doubled, missing or unlisted patch is named."""
    change(source_tree)
    with pytest.raises(SeriesError, match=message):
        load_series(source_tree.patches_dir)


def test_drift_names_patch_file_and_hunk(source_tree: Any) -> None:
    """Where the base changed under the second hunk, exactly that hunk is named."""
    old = _core(source_tree)
    new = old.replace("LINE_3 = 3", "LINE_3 = 'x'").replace("LINE_20 = 20", "LINE_20 = 'y'")
    source_tree.add_patch("two hunks", {CORE: old.encode()}, {CORE: new.encode()})
    drifted = old.replace("LINE_20 = 20", "LINE_20 = 'upstream'")
    with pytest.raises(PatchDriftError) as raised:
        apply_series(load_series(source_tree.patches_dir), {CORE: drifted.encode()})
    error = raised.value
    assert (error.patch, error.path) == ("two-hunks.patch", CORE)
    assert error.hunk.startswith("2 of 2 (@@ -19,3 +19,3 @@")
    assert "\n" not in str(error)
    assert "make patches-import" in str(error)


def test_moved_context_is_not_exact(source_tree: Any) -> None:
    """A hunk that git would still place, at another line, is refused with its offset."""
    source_tree.edit_core("edit", 20, "'x'")
    moved = "# one more line\n" + _core(source_tree)
    with pytest.raises(PatchDriftError, match=r"edit\.patch .* hunk 1 of 1 .*offset 1 line"):
        apply_series(load_series(source_tree.patches_dir), {CORE: moved.encode()})


def test_change_far_from_the_hunk_is_not_exact(source_tree: Any) -> None:
    """A file that differs anywhere is not the one that the patch was made from."""
    source_tree.edit_core("edit", 5, "'x'")
    other = _core(source_tree).replace("LINE_30 = 30", "LINE_30 = 'upstream'")
    with pytest.raises(PatchDriftError, match="not the one that the patch was made from"):
        apply_series(load_series(source_tree.patches_dir), {CORE: other.encode()})


def test_tampered_patch_is_found(source_tree: Any) -> None:
    """A patch that was edited by hand does not give what it promises."""
    source_tree.edit_core("edit", 5, "'x'")
    path = source_tree.patches_dir / "edit.patch"
    path.write_text(path.read_text().replace("+LINE_5 = 'x'", "+LINE_5 = 'y'"))
    with pytest.raises(PatchDriftError, match="not the one that the patch promises"):
        apply_series(load_series(source_tree.patches_dir), {CORE: _core(source_tree).encode()})


@pytest.mark.parametrize(
    ("before", "after", "files", "message"),
    [
        ({CORE: b"a\n"}, {CORE: b"b\n"}, {}, "the file does not exist"),
        ({}, {"vllm/n.py": b"a\n"}, {"vllm/n.py": b"a\n"}, "the file exists already"),
    ],
)
def test_missing_and_unexpected_files(
    source_tree: Any,
    before: dict[str, bytes],
    after: dict[str, bytes],
    files: dict[str, bytes],
    message: str,
) -> None:
    """A file that upstream dropped or gained is told as such."""
    source_tree.add_patch("edit", before, after)
    with pytest.raises(PatchDriftError, match=message):
        apply_series(load_series(source_tree.patches_dir), files)


def test_enclosing_repository_is_not_consulted(
    source_tree: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_developer: Any
) -> None:
    """Inside of a repository, where git apply would skip untracked paths, the patch is applied."""
    source_tree.edit_core("edit", 5, "'x'")
    outer = tmp_path / "outer"
    outer.mkdir()
    as_developer(outer, "init", "--quiet")
    monkeypatch.setattr("tempfile.tempdir", str(outer))
    monkeypatch.setenv("GIT_DIR", str(outer / ".git"))
    result = apply_series(load_series(source_tree.patches_dir), {CORE: _core(source_tree).encode()})
    assert b"LINE_5 = 'x'\n" in (result[CORE] or b"")


def test_settings_of_the_user_do_not_matter(
    source_tree: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A configuration that changes line ends and whitespace does not change the result."""
    (tmp_path / ".gitconfig").write_text(
        "[core]\n\tautocrlf = true\n\twhitespace = tab-in-indent\n[apply]\n\twhitespace = fix\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    settings = subprocess.run(
        ["git", "config", "core.autocrlf"], capture_output=True, text=True, check=True
    )
    assert settings.stdout == "true\n"
    before, after = b"a\n", b"b  \t\n"
    source_tree.add_patch("edit", {CORE: before}, {CORE: after})
    patches = load_series(source_tree.patches_dir)
    assert apply_series(patches, {CORE: before}) == {CORE: after}


def test_without_git_the_need_is_named(
    source_tree: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without git is told to get it."""
    source_tree.edit_core("edit", 5, "'x'")
    patches = load_series(source_tree.patches_dir)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(GitError, match="git is not installed"):
        apply_series(patches, {CORE: _core(source_tree).encode()})


LINES = st.lists(st.sampled_from(["", "a", "  b", "-- ", "+c", "\\ d", "From x", "é"]), max_size=12)


def _text(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


@given(before=LINES, after=LINES)
@settings(
    max_examples=10,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_text_edit_applies_exactly(
    source_tree: Any, before: list[str], after: list[str]
) -> None:
    """Whatever lines an edit has, applying its patch gives the edited text."""
    if before == after:
        after = [*after, "end"]
    source_tree.write("bases/0.22.1/series", "")
    source_tree.add_patch("edit", {CORE: _text(before)}, {CORE: _text(after)})
    patches = load_series(source_tree.patches_dir)
    assert apply_series(patches, {CORE: _text(before)}) == {CORE: _text(after)}

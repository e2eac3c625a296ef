# SPDX-License-Identifier: Apache-2.0
"""Exporting commits as patch files: the way back is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from reshard_build.__main__ import main
from reshard_build.series import load_series

CORE = "vllm/engine/core.py"
BODY = "What: a\nWhy: b\nNo-subclass: c\nForwarded: not-needed\nDrop-when: d\n"


@pytest.fixture
def scratch(frontend: Any, tmp_path: Path, as_developer: Any) -> Any:
    """Return the source tree with two patches, imported into a scratch repository."""
    core = frontend.edit_core("area: first", 5, "'a'")
    frontend.edit_core("area: second", 20, "'b'", core=core)
    frontend.write("vllm/own/mine.py", "MINE = 1\n")
    frontend.repository = tmp_path / "scratch"
    frontend.git = lambda *arguments: as_developer(frontend.repository, *arguments)
    _main(frontend, "import")
    # The fixture's own file names are not slugs; from here on they are.
    _main(frontend, "export")
    return frontend


def _main(scratch: Any, command: str) -> int:
    return main(["--root", str(scratch.root), command, str(scratch.repository)])


def _files(scratch: Any) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in scratch.patches_dir.iterdir()}


def _commit(scratch: Any, subject: str, body: str = BODY, line: int = 10) -> None:
    path = scratch.repository / CORE
    path.write_text(path.read_text().replace(f"LINE_{line} = ", f"LINE_{line} = {line} + "))
    scratch.git("commit", "--quiet", "--all", "-m", f"{subject}\n\n{body}")


def test_round_trip_is_byte_identical(scratch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Import and export again change no byte, and say so by writing nothing."""
    before = _files(scratch)
    _main(scratch, "import")
    capsys.readouterr()
    _main(scratch, "export")
    assert _files(scratch) == before
    assert "wrote" not in capsys.readouterr().out
    assert before["series"].decode().splitlines() == [
        "# Why the order matters.",
        "area-first.patch",
        "area-second.patch",
    ]


def test_new_reworded_and_dropped_commits(scratch: Any) -> None:
    """Files follow the commits: added, renamed after their subject, removed; comments stay."""
    scratch.git("reset", "--quiet", "--hard", "HEAD~1")
    _commit(scratch, "area: third, with Capitals & signs")
    _main(scratch, "export")
    assert sorted(_files(scratch)) == [
        "area-first.patch",
        "area-third-with-capitals-signs.patch",
        "base.toml",
        "series",
    ]
    assert load_series(scratch.patches_dir)[1].subject == ("area: third, with Capitals & signs")
    assert (scratch.patches_dir / "series").read_text().startswith("# Why the order")


def test_settings_of_the_user_do_not_show(
    scratch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A configuration that changes diffs, prefixes and signatures leaves the bytes alone."""
    before = _files(scratch)
    home = tmp_path / "home"
    home.mkdir()
    (home / ".gitconfig").write_text(
        "[diff]\n\tnoprefix = true\n\talgorithm = histogram\n\tcontext = 9\n"
        "\tmnemonicPrefix = true\n"
        "[format]\n\tsignature = me\n\tattach = true\n\tsubjectPrefix = RFC\n\tsignOff = true\n"
        "[core]\n\tabbrev = 5\n\tautocrlf = true\n[commit]\n\tgpgSign = true\n"
    )
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Somebody Else")
    _main(scratch, "import")
    _main(scratch, "export")
    assert _files(scratch) == before


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: (s.repository / CORE).write_text(""), "uncommitted changes"),
        (lambda s: s.git("branch", "--move", "patches", "other"), "has no refs/heads/patches"),
        (lambda s: s.git("tag", "--delete", "base"), "has no refs/tags/base"),
        (lambda s: (s.repository / ".git/rebase-merge").mkdir(), "middle of a git operation"),
        (lambda s: _commit(s, "area: first"), r"both give the file name area-first\.patch"),
        (lambda s: _commit(s, "äöü"), "gives no file name"),
        (lambda s: _commit(s, "area: third", "just prose"), "neither a field nor indented"),
        (lambda s: _commit(s, "area: third", "What: a\n"), "lacks Why:"),
        (lambda s: s.git("commit", "--allow-empty", "-m", "area: none"), "changes no file"),
        (lambda s: _commit(s, ": third"), r"third\.patch would change"),
        (lambda s: _commit(s, "area: third", f"{BODY}---\nlost: 1\n"), "neither a field nor"),
        (lambda s: _overlay_commit(s), r"touches vllm/own/mine\.py, which belongs to the overlay"),
        (lambda s: _merge(s), "is a merge"),
        (lambda s: _stray(s), "'area: stray' is committed on fork"),
        (lambda s: _orphan(s), "does not start at base"),
    ],
)
def test_what_cannot_be_exported_is_named(scratch: Any, spoil: Any, message: str) -> None:
    """Each is refused, and no file is changed."""
    before = _files(scratch)
    spoil(scratch)
    with pytest.raises(SystemExit, match=message):
        _main(scratch, "export")
    assert _files(scratch) == before


def _overlay_commit(scratch: Any) -> None:
    path = scratch.repository / "vllm/own/mine.py"
    path.parent.mkdir()
    path.write_text("MINE = 2\n")
    scratch.git("add", "--all")
    scratch.git("commit", "--quiet", "-m", f"area: overlay\n\n{BODY}")


def _merge(scratch: Any) -> None:
    scratch.git("checkout", "--quiet", "-b", "side", "HEAD~1")
    _commit(scratch, "area: side", line=29)
    scratch.git("checkout", "--quiet", "patches")
    scratch.git("merge", "--quiet", "--no-edit", "side")


def _stray(scratch: Any) -> None:
    scratch.git("checkout", "--quiet", "fork")
    _commit(scratch, "area: stray")


def _orphan(scratch: Any) -> None:
    scratch.git("checkout", "--quiet", "--orphan", "lonely")
    scratch.git("commit", "--quiet", "-m", "root")
    scratch.git("branch", "--force", "patches", "lonely")


def test_no_repository_is_told_so(frontend: Any, tmp_path: Path) -> None:
    """Exporting from nowhere names the directory and the way to get one."""
    frontend.repository = tmp_path / "nowhere"
    with pytest.raises(SystemExit, match="nowhere is not a git repository; import"):
        _main(frontend, "export")

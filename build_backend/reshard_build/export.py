# SPDX-License-Identifier: Apache-2.0
"""Turns the commits of a scratch repository back into patch files."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from .errors import ScratchError
from .git import git_text, run_git
from .overlay import clashes
from .patchfile import describe
from .roundtrip import read_commits, require_round_trip
from .scratch import BASE_TAG, PATCHES_BRANCH, mark_saved, strays
from .series import SERIES, read_series_file, touched_paths


@dataclass(frozen=True)
class Exported:
    """What an export did to the directory of patches.

    Attributes:
        names: The series.
        written: Files that are new or changed.
        removed: Files whose commits are gone.
    """

    names: tuple[str, ...]
    written: tuple[str, ...]
    removed: tuple[str, ...]


def export_series(repository: Path, patches_dir: Path, overlay: Collection[str]) -> Exported:
    """Write the commits `base..patches` as patch files and as `series`.

    Nothing is written unless every commit can be exported.

    Args:
        repository: A scratch repository.
        patches_dir: Directory of the series; comments at the top of `series` are kept.
        overlay: Paths of the overlay, which no patch may touch.

    Raises:
        ScratchError: The repository is not clean, or a commit cannot be a patch.
        PatchFormatError: A commit is not described, or changes something other than text.
        SeriesError: Importing the patches would not give the same commits again.
    """
    _require_clean(repository)
    patches = read_commits(repository)
    for patch in patches:
        describe(patch)
        if touched := clashes(overlay, patch.paths):
            raise ScratchError(
                f"{patch.subject!r} touches {touched[0]}, which belongs to the overlay",
                "edit the file in vllm/ and take it out of the commit",
            )
    base = {path: _base_file(repository, path) for path in touched_paths(patches)}
    require_round_trip(patches, {path: c for path, c in base.items() if c is not None})
    comments = read_series_file(patches_dir).comments if patches_dir.is_dir() else ()
    patches_dir.mkdir(parents=True, exist_ok=True)
    names = tuple(patch.name for patch in patches)
    written = [p.name for p in patches if _write(patches_dir / p.name, p.content)]
    series = "".join(f"{line}\n" for line in (*comments, *names))
    written += [SERIES] if _write(patches_dir / SERIES, series.encode()) else []
    removed = sorted({path.name for path in patches_dir.glob("*.patch")} - set(names))
    for name in removed:
        (patches_dir / name).unlink()
    mark_saved(repository)
    return Exported(names=names, written=tuple(written), removed=tuple(removed))


def _base_file(repository: Path, path: str) -> bytes | None:
    result = run_git(repository, "cat-file", "blob", f"{BASE_TAG}:{path}", check=False)
    return None if result.returncode else result.stdout


def _require_clean(repository: Path) -> None:
    if not (repository / ".git").is_dir():
        raise ScratchError(f"{repository} is not a git repository", "import the series first")
    for name in (f"refs/tags/{BASE_TAG}", f"refs/heads/{PATCHES_BRANCH}"):
        if run_git(repository, "rev-parse", "--verify", "--quiet", name, check=False).returncode:
            raise ScratchError(f"{repository} has no {name}", "import the series first")
    for state in ("rebase-apply", "rebase-merge", "MERGE_HEAD", "CHERRY_PICK_HEAD"):
        if (repository / ".git" / state).exists():
            raise ScratchError(
                f"{repository} is in the middle of a git operation ({state})",
                "finish it with --continue, or --abort it",
            )
    if changed := git_text(repository, "status", "--porcelain").splitlines():
        raise ScratchError(
            f"{repository} has uncommitted changes ({changed[0].strip()})",
            "commit them or discard them",
        )
    ancestor = run_git(
        repository, "merge-base", "--is-ancestor", BASE_TAG, PATCHES_BRANCH, check=False
    )
    if ancestor.returncode:
        raise ScratchError(
            f"branch {PATCHES_BRANCH} does not start at {BASE_TAG}", "rebase it, or import again"
        )
    if stray := strays(repository):
        raise ScratchError(
            f"{stray[0]!r} is committed on fork, so it would not be exported",
            f"cherry-pick it to {PATCHES_BRANCH} and drop it from fork, "
            "or make the edit in the overlay",
        )


def _write(path: Path, content: bytes) -> bool:
    if path.is_file() and path.read_bytes() == content:
        return False
    path.write_bytes(content)
    return True

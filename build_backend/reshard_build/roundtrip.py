# SPDX-License-Identifier: Apache-2.0
"""Reads commits as patches, and proves that patches survive the way to commits and back."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from .errors import ScratchError, SeriesError
from .git import git_text, run_git
from .patchfile import Patch, parse_patch, slug
from .scratch import BASE_TAG, PATCHES_BRANCH, init_history

# Spelt out where git has a setting or a default that could change.
_FORMAT = (
    *("format-patch", "--stdout", "-1", "--zero-commit", "--no-signature", "--no-stat"),
    *("--full-index", "-N", "-U1", "--no-renames", "--no-ext-diff", "--no-textconv", "--no-color"),
    *("--diff-algorithm=myers", "--indent-heuristic", "--src-prefix=a/", "--dst-prefix=b/"),
    *("--no-attach", "--no-thread", "--no-cover-letter", "--no-base", "--binary"),
)


def read_commits(repository: Path) -> tuple[Patch, ...]:
    """Return the commits `base..patches` as patches, named after their subjects.

    Raises:
        ScratchError: There is a merge, an empty commit, or two subjects with one name.
        PatchFormatError: A commit changes something other than text.
    """
    history = f"{BASE_TAG}..{PATCHES_BRANCH}"
    if merges := git_text(repository, "log", "--merges", "--format=%s", history, "--"):
        raise ScratchError(
            f"{merges.splitlines()[0]!r} is a merge", f"rebase {PATCHES_BRANCH} to a straight line"
        )
    by_name: dict[str, Patch] = {}
    for commit in git_text(repository, "rev-list", "--reverse", history, "--").split():
        subject = git_text(repository, "log", "-1", "--format=%s", commit, "--")
        name = f"{slug(subject)}.patch"
        if name == ".patch":
            raise ScratchError(f"{subject!r} gives no file name", "use words of letters and digits")
        if name in by_name:
            raise ScratchError(
                f"{by_name[name].subject!r} and {subject!r} both give the file name {name}",
                "reword one of them",
            )
        content = run_git(repository, *_FORMAT, commit).stdout
        if not content:
            raise ScratchError(f"{subject!r} changes no file", "drop the commit")
        by_name[name] = parse_patch(name, content)
    return tuple(by_name.values())


def require_round_trip(patches: tuple[Patch, ...], files: Mapping[str, bytes]) -> None:
    """Import a series as commits and export them again; a diff needs only the files it touches.

    Git takes a commit's message apart when it imports a patch: a colon at the start of the subject
    or a line of dashes would get lost.

    Args:
        patches: The series.
        files: Content of those touched files that the base has, by path.

    Raises:
        SeriesError: A patch is rejected, or comes back different.
    """
    with tempfile.TemporaryDirectory(prefix="reshard-check-") as directory:
        repository = Path(directory) / "tree"
        repository.mkdir()
        for name, content in files.items():
            (repository / name).parent.mkdir(parents=True, exist_ok=True)
            (repository / name).write_bytes(content)
        if not init_history(repository, patches, 0, "Base"):
            raise SeriesError("git am rejects the series", "import it, mend it and export it")
        if found := differences(patches, read_commits(repository)):
            raise SeriesError(
                f"importing the series and exporting it again is not the same: {'; '.join(found)}",
                "import and export it and look at the difference; subjects start with a word, and "
                "messages have no line of dashes",
            )


def differences(series: Iterable[Patch], again: Iterable[Patch]) -> list[str]:
    """Return in words how an export differs from the series that was imported."""
    old, new = {p.name: p for p in series}, {p.name: p for p in again}
    names = {patch.content: patch.name for patch in new.values()}
    found: list[str] = []
    for name, patch in old.items():
        if name in new:
            if new[name].content != patch.content:
                found.append(f"{name} would change")
        elif patch.content in names:
            found.append(f"{name} would be named {names[patch.content]}")
        else:
            found.append(f"{name} would be dropped")
    renamed = {patch.content for patch in old.values()}
    found += [
        f"{name} would be new"
        for name, patch in new.items()
        if name not in old and patch.content not in renamed
    ]
    if not found and list(old) != list(new):
        found.append("the order would change")
    return found

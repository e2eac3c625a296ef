# SPDX-License-Identifier: Apache-2.0
"""The patch series: which patches, in which order, and applying them exactly."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .archive import BaseWheel
from .errors import PatchDriftError, SeriesError
from .git import blob_id, run_git
from .patchfile import NO_BLOB, FileChange, Patch, parse_patch

SERIES = "series"


@dataclass(frozen=True)
class SeriesFile:
    """The file `series` of a base.

    Attributes:
        comments: Lines before the first entry, each a comment or blank.
        names: File names of the patches, in the order of application.
    """

    comments: tuple[str, ...]
    names: tuple[str, ...]


def read_series_file(patches_dir: Path) -> SeriesFile:
    """Read `series`; a directory without one is an empty series.

    Raises:
        SeriesError: A patch is named twice.
    """
    path = patches_dir / SERIES
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    entries = [line.strip() for line in lines]
    names = [entry for entry in entries if entry and not entry.startswith("#")]
    if doubled := {name for name in names if names.count(name) > 1}:
        raise SeriesError(
            f"{path.parent.name}/{SERIES} names {min(doubled)} twice", "remove one of them"
        )
    first = entries.index(names[0]) if names else len(lines)
    return SeriesFile(comments=tuple(lines[:first]), names=tuple(names))


def load_series(patches_dir: Path) -> tuple[Patch, ...]:
    """Read and parse the patches of the series.

    Raises:
        SeriesError: `series` and the files in the directory do not name the same patches.
        PatchFormatError: A patch is not an exported commit.
    """
    names = read_series_file(patches_dir).names
    present = {path.name for path in patches_dir.glob("*.patch")}
    if missing := [name for name in names if name not in present]:
        raise SeriesError(
            f"{patches_dir.name}/{SERIES} names {missing[0]}, which does not exist",
            "remove the entry or restore the file",
        )
    if unlisted := present - set(names):
        raise SeriesError(
            f"{min(unlisted)} is not in {patches_dir.name}/{SERIES}",
            "add it where it is to be applied, or delete it",
        )
    return tuple(parse_patch(name, (patches_dir / name).read_bytes()) for name in names)


def touched_paths(patches: Iterable[Patch]) -> tuple[str, ...]:
    """Return the files that a series touches, sorted."""
    return tuple(sorted({path for patch in patches for path in patch.paths}))


def base_files(base: BaseWheel, paths: Iterable[str]) -> dict[str, bytes]:
    """Read those of some files that the base has."""
    return {path: base.read(path) for path in paths if path in base}


def apply_series(patches: Iterable[Patch], files: Mapping[str, bytes]) -> dict[str, bytes | None]:
    """Apply a series with `git apply`, and prove that the result is exact.

    Exact means: before each patch, each file that it touches is the blob that the patch was made
    from, and afterwards the blob that it makes. Git itself would accept a hunk that has moved.

    Args:
        patches: In the order of application.
        files: Content of the touched files that the base has, by path.

    Returns:
        New content of each touched file, by path; `None` for a file that is deleted.

    Raises:
        PatchDriftError: A patch does not apply exactly.
        GitError: There is no git.
    """
    patches = tuple(patches)
    paths = touched_paths(patches)
    if not paths:
        return {}
    with tempfile.TemporaryDirectory(prefix="reshard-series-") as directory:
        tree = Path(directory) / "tree"
        tree.mkdir()
        for path in paths:
            if path in files:
                (tree / path).parent.mkdir(parents=True, exist_ok=True)
                (tree / path).write_bytes(files[path])
        # A hunk that cannot be placed tells more than a file that differs elsewhere, so the latter
        # is reported only when all patches could be placed.
        strays = [stray for patch in patches if (stray := _apply(patch, tree)) is not None]
        if strays:
            raise strays[0]
        return {path: _content(tree / path) for path in paths}


def _apply(patch: Patch, tree: Path) -> PatchDriftError | None:
    """Apply one patch; return what is not exact about it although git could place it."""
    strayed = next((c for c in patch.changes if _blob(tree / c.path) != c.old_blob), None)
    result = run_git(
        tree, "apply", "--verbose", "--whitespace=nowarn", stdin=patch.content, check=False
    )
    output = result.stderr.decode("utf-8", "replace")
    if result.returncode != 0:
        raise _rejected(patch, output)
    if strayed is not None:
        return _moved(patch, strayed, output)
    for change in patch.changes:
        if _blob(tree / change.path) != change.new_blob:
            return _drift(patch, change, None, "the result is not the one that the patch promises")
    return None


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _blob(path: Path) -> str:
    content = _content(path)
    return NO_BLOB if content is None else blob_id(content)


def _rejected(patch: Patch, output: str) -> PatchDriftError:
    """Read from git's messages which hunk of which file it could not place."""
    if failed := re.search(r"^error: patch failed: (.+):(\d+)$", output, re.MULTILINE):
        change = _change(patch, failed[1])
        line = int(failed[2])
        at = next((i for i, hunk in enumerate(change.hunks) if hunk.old_start == line), None)
        return _drift(patch, change, at, "the lines that it expects are not there")
    for change in patch.changes:
        if re.search(rf"^error: {re.escape(change.path)}: ", output, re.MULTILINE):
            if change.old_blob == NO_BLOB:
                return _drift(patch, change, None, "the file exists already")
            return _drift(patch, change, None, "the file does not exist")
    reason = next(iter(re.findall(r"^error: (.+)$", output, re.MULTILINE)), "git rejects it")
    return _drift(patch, patch.changes[0], None, reason)


def _moved(patch: Patch, change: FileChange, output: str) -> PatchDriftError:
    """Git placed all hunks, but the file is not the one that the patch was made from."""
    section = re.split(r"^Checking patch ", output, flags=re.MULTILINE)
    mine = next((part for part in section if part.startswith(f"{change.path}...")), "")
    hunk = re.search(r"^Hunk #(\d+) succeeded at \d+ \((offset .+?)\)", mine, re.MULTILINE)
    reason = "the file is not the one that the patch was made from"
    if hunk is None:
        return _drift(patch, change, None, reason)
    return _drift(patch, change, int(hunk[1]) - 1, f"{reason} ({hunk[2]})")


def _change(patch: Patch, path: str) -> FileChange:
    return next((c for c in patch.changes if c.path == path), patch.changes[0])


def _drift(patch: Patch, change: FileChange, hunk: int | None, reason: str) -> PatchDriftError:
    number = 0 if hunk is None else hunk
    header = change.hunks[number].header if number < len(change.hunks) else "(no hunk)"
    return PatchDriftError(
        patch.name,
        change.path,
        f"{number + 1} of {len(change.hunks)} ({header})",
        reason,
        "mend its commit (`make patches-import`, then `make patches-export`)",
    )

# SPDX-License-Identifier: Apache-2.0
"""The scratch git repository: the base as one commit, each patch as one, the overlay as one.

Branch `patches` ends with the last patch, branch `fork` with the overlay; tags `base` and `overlay`
name the first and the last commit that were written. Compiled files lie in the work tree, untracked
and excluded, so that the tree can run.
"""

from __future__ import annotations

import calendar
import logging
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from .archive import BaseWheel
from .editable import unpack
from .errors import PatchDriftError, ScratchError
from .git import git_text, run_git
from .patchfile import Patch
from .product import Product
from .series import apply_series, base_files, touched_paths
from .staging import staging_folder

BASE_TAG = "base"
OVERLAY_TAG = "overlay"
PATCHES_BRANCH = "patches"
FORK_BRANCH = "fork"

# What was imported or last exported: work beyond it exists nowhere else.
SAVED_REF = "refs/reshard/saved"

_IDENTITY = {"NAME": "vllm-reshard", "EMAIL": "vllm-reshard@localhost"}

log = logging.getLogger(__name__)


def write_tree(product: Product, patches: Iterable[Patch], repository: Path) -> None:
    """Write base, patches and overlay, with `fork` checked out.

    Args:
        product: Composed from the same patches, so they apply exactly.
        patches: The series.
        repository: Where to write; an earlier scratch repository without own work is replaced.

    Raises:
        ScratchError: The directory holds something that would be lost.
    """
    _write(product.base, tuple(patches), product.overlay, repository, checkout=FORK_BRANCH)


def write_import(
    base: BaseWheel, patches: Iterable[Patch], overlay: Mapping[str, Path], repository: Path
) -> None:
    """Write base, patches and overlay, with `patches` checked out for editing.

    Where a patch does not apply, the repository is left with the patches before it applied and
    `git am` waiting for the conflict to be solved; there is no branch `fork` then.

    Args:
        base: The open base wheel.
        patches: The series.
        overlay: Source of the overlay's files by path.
        repository: Where to write; an earlier scratch repository without own work is replaced.

    Raises:
        ScratchError: The directory holds something that would be lost.
        PatchDriftError: A patch does not apply; says how to go on.
    """
    _write(base, tuple(patches), overlay, repository, checkout=PATCHES_BRANCH)


def init_history(repository: Path, patches: Iterable[Patch], date_s: int, subject: str) -> bool:
    """Make a repository of what lies in a directory, and commit a series on top of it.

    Args:
        repository: Holds the base's files; `.git/info/exclude` names those not to be tracked.
        patches: The series.
        date_s: Time of the first commit, in seconds of the epoch.
        subject: Subject of the first commit.

    Returns:
        Whether all patches were applied. If not, `git am` waits in the repository.

    Raises:
        GitError: There is no git, or it failed otherwise.
    """
    stamp = {
        f"GIT_{role}_{key}": value
        for role in ("AUTHOR", "COMMITTER")
        for key, value in {**_IDENTITY, "DATE": f"@{date_s} +0000"}.items()
    }
    run_git(repository, "init", "--quiet", "--template=")
    run_git(repository, "symbolic-ref", "HEAD", f"refs/heads/{PATCHES_BRANCH}")
    run_git(repository, "config", "core.autocrlf", "false")
    run_git(repository, "add", "--all")
    run_git(repository, "commit", "--quiet", "--allow-empty", "-m", subject, env=stamp)
    run_git(repository, "tag", BASE_TAG)
    mailbox = b"".join(patch.content for patch in patches)
    if not mailbox:
        return True
    result = run_git(
        repository,
        *("am", "--quiet", "--keep-cr", "--keep-non-patch", "--no-scissors", "--no-3way"),
        *("--committer-date-is-author-date", "--whitespace=nowarn"),
        stdin=mailbox,
        env=stamp,
        check=False,
    )
    return result.returncode == 0


def require_replaceable(repository: Path) -> None:
    """Refuse to overwrite a directory that holds work which exists nowhere else.

    Args:
        repository: A directory that may not exist, may be empty or an untouched scratch repository.

    Raises:
        ScratchError: It is something else, or has changes that were not exported.
    """
    if not repository.exists() or (repository.is_dir() and not any(repository.iterdir())):
        return
    remedy = f"remove {repository} if you do not need it, or choose another directory"
    saved = _resolve(repository, SAVED_REF) if (repository / ".git").is_dir() else ""
    if not saved:
        raise ScratchError(f"{repository} exists and is not a scratch repository", remedy)
    if git_text(repository, "status", "--porcelain"):
        raise ScratchError(f"{repository} has uncommitted changes", f"export them, or {remedy}")
    if (_resolve(repository, PATCHES_BRANCH) or saved) != saved or strays(repository):
        raise ScratchError(
            f"{repository} has commits that were not exported", f"export them, or {remedy}"
        )


def strays(repository: Path) -> list[str]:
    """Return subjects of commits on `fork` after the overlay's: they are not part of the series."""
    if not (_resolve(repository, FORK_BRANCH) and _resolve(repository, OVERLAY_TAG)):
        return []
    listed = git_text(
        repository,
        "log",
        "--format=%s",
        f"{OVERLAY_TAG}..{FORK_BRANCH}",
        f"^{PATCHES_BRANCH}",
        "--",
    )
    return listed.splitlines()


def mark_saved(repository: Path) -> None:
    """Note that the commits of `patches` exist as patch files."""
    run_git(repository, "update-ref", SAVED_REF, f"refs/heads/{PATCHES_BRANCH}")


def _write(
    base: BaseWheel,
    patches: tuple[Patch, ...],
    overlay: Mapping[str, Path],
    repository: Path,
    *,
    checkout: str,
) -> None:
    require_replaceable(repository)
    with staging_folder(f".{repository.name}-", repository.parent) as staging:
        new = staging / "new"
        new.mkdir()
        new.chmod(0o755)
        unpack(base, base.names, new)
        _exclude_binaries(base, new)
        whole = init_history(
            new, patches, calendar.timegm(base.record_time), f"Base: {base.path.name}"
        )
        if whole:
            _commit_overlay(overlay, new)
            mark_saved(new)
            run_git(new, "checkout", "--quiet", checkout)
        if repository.exists():
            shutil.rmtree(repository)
        new.rename(repository)
    log.info("wrote %s with %d patches", repository, len(patches))
    if not whole:
        raise _conflict(base, patches, repository)


def _exclude_binaries(base: BaseWheel, staging: Path) -> None:
    # Git's own rule of thumb for what is not text. The path is taken literally: `/` in front,
    # special characters escaped.
    special = str.maketrans({c: f"\\{c}" for c in "\\*?[ "})
    lines = [
        f"/{name.translate(special)}\n"
        for name in base.names
        if b"\0" in (staging / name).read_bytes()[:8000]
    ]
    (staging / ".git" / "info").mkdir(parents=True)
    (staging / ".git" / "info" / "exclude").write_text("".join([*lines, "__pycache__/\n"]))


def _commit_overlay(overlay: Mapping[str, Path], staging: Path) -> None:
    run_git(staging, "checkout", "--quiet", "-b", FORK_BRANCH)
    for name, source in overlay.items():
        path = staging / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, path)
    run_git(staging, "add", "--all")
    date = git_text(staging, "log", "-1", "--format=@%ct +0000")
    stamp = {
        f"GIT_{role}_{key}": value
        for role in ("AUTHOR", "COMMITTER")
        for key, value in {**_IDENTITY, "DATE": date}.items()
    }
    run_git(staging, "commit", "--quiet", "--allow-empty", "-m", "Overlay", env=stamp)
    run_git(staging, "tag", OVERLAY_TAG)


def _conflict(base: BaseWheel, patches: tuple[Patch, ...], repository: Path) -> Exception:
    """Name the hunk that stopped `git am`, and say how to go on from there."""
    done = int(git_text(repository, "rev-list", "--count", f"{BASE_TAG}..{PATCHES_BRANCH}"))
    how = (
        f"in {repository}: apply what fits with `git am --show-current-patch=diff | git apply "
        "--reject`, mend the rest, `git add`, `git am --continue`; then export"
    )
    try:
        apply_series(patches[: done + 1], base_files(base, touched_paths(patches[: done + 1])))
    except PatchDriftError as error:
        return PatchDriftError(error.patch, error.path, error.hunk, error.reason, how)
    return ScratchError(f"git am stopped at {patches[done].name}", how)


def _resolve(repository: Path, name: str) -> str:
    """Return the commit that a name stands for, or nothing."""
    result = run_git(
        repository, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", check=False
    )
    return result.stdout.decode().strip()

# SPDX-License-Identifier: Apache-2.0
"""Which state of the sources a plugin was built from, as a part of its version.

pip keeps the files of a wheel that is installed under the same version, so no two builds may share
one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from .errors import GitError
from .git import git_text
from .project import Project


def commit_suffix(project: Project, files: Mapping[str, Path]) -> str:
    """Return what follows the release in a version, so that a later commit gives a newer one.

    Args:
        project: Source tree.
        files: Source by path in the wheel.

    Returns:
        `.postTIME+gCOMMIT`, with `.dDIGEST` of the files where some are not committed; `+dDIGEST`
        of a tree without git.
    """
    commit = commit_of(project)
    if commit and commit[-1] != ".":
        return commit
    digest = hashlib.sha256()
    for path, source in files.items():
        content = source.read_bytes()
        digest.update(f"{path}\0{len(content)}\0".encode() + content)
    return f"{commit or '+'}d{digest.hexdigest()[:8]}"


def commit_of(project: Project) -> str:
    """Return `.postTIME+gCOMMIT` of a checkout, or as a source archive has it.

    A dot follows where some files of the plugin are not committed. Empty without git.
    """
    if project.commit_file.is_file():
        return project.commit_file.read_text(encoding="utf-8")
    built_from = [str(project.overlay_dir), str(project.plugin_dir)]
    # The time and not the number of commits, which a shallow clone does not know.
    log = ("log", "-1", "--date=format-local:%Y%m%d%H%M", "--format=.post%cd+g%h")
    try:
        is_changed = git_text(project.root, "status", "--porcelain", "--", *built_from)
        return git_text(project.root, *log) + ("." if is_changed else "")
    except GitError:
        return ""

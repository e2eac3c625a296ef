# SPDX-License-Identifier: Apache-2.0
"""Runs git so that neither the user's configuration nor an enclosing repository has a say."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from .errors import GitError

# Settings that change what git writes or how it applies; the attributes and ignore files of the
# user are settings too, but are found without a configuration file.
_SETTINGS = (
    f"core.attributesFile={os.devnull}",
    f"core.excludesFile={os.devnull}",
    f"core.hooksPath={os.devnull}",
    "core.autocrlf=false",
    "core.quotePath=true",
    "commit.gpgSign=false",
    "gc.auto=0",
    "advice.detachedHead=false",
)


def blob_id(content: bytes) -> str:
    """Return the name that git gives to a file of this content, 40 hexadecimal digits."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def run_git(
    cwd: Path,
    *arguments: str,
    stdin: bytes = b"",
    env: dict[str, str] | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[bytes]:
    """Run git in a directory, without regard to the user's settings.

    Args:
        cwd: Where to run. A repository that encloses it is not discovered: `git apply` inside of
            one would silently skip files outside of its index.
        arguments: Subcommand and its arguments.
        stdin: What git reads from its standard input.
        env: Further environment variables.
        check: Whether a failure is an error.

    Returns:
        The finished process with `stdout` and `stderr`.

    Raises:
        GitError: There is no git, or it failed and `check` is set.
    """
    executable = shutil.which("git")
    if executable is None:
        raise GitError(
            "git is not installed: patches are applied with it", "install git and try again"
        )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment |= {
        "GIT_CEILING_DIRECTORIES": str(cwd.resolve().parent),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "LC_ALL": "C",
        **(env or {}),
    }
    command = [executable]
    for setting in _SETTINGS:
        command += ["-c", setting]
    result = subprocess.run(
        [*command, *arguments],
        cwd=cwd,
        env=environment,
        input=stdin,
        capture_output=True,
        check=False,
    )
    if check and result.returncode != 0:
        output = (result.stderr or result.stdout).decode(errors="replace").strip().splitlines()
        raise GitError(
            f"git {arguments[0]} failed in {cwd}: {output[-1] if output else 'no output'}",
            "see git's message",
        )
    return result


def git_text(cwd: Path, *arguments: str) -> str:
    """Run git and return what it prints, without the last line break.

    Raises:
        GitError: There is no git, or it failed.
    """
    return run_git(cwd, *arguments).stdout.decode("utf-8", "surrogateescape").rstrip("\n")

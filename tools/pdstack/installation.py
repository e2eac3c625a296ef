# SPDX-License-Identifier: Apache-2.0
"""Another installation of vLLM on this machine: which release it is, and what it cannot serve."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .engine import find_script
from .errors import UsageError

_ROOT = Path(__file__).parents[2]
_LIMIT_S = 120.0
_ASK = """
import importlib.metadata, json, sys
from tools.pdstack.families import choose, split_by_vllm
print(json.dumps([importlib.metadata.version("vllm"), split_by_vllm(choose(sys.argv[1:]))[1]]))
"""


@dataclass(frozen=True)
class Installation:
    """A vLLM that is not the one of this process.

    Attributes:
        release: of vLLM, without what is behind it in the version.
        scripts: where its console scripts are.
    """

    release: str
    scripts: Path

    def __str__(self) -> str:
        return self.release


def release_of(version: str) -> str:
    """Return the release of vLLM that a version is built on."""
    return version.partition("+")[0]


def release_here() -> str:
    """Return the release of this process's installation."""
    return release_of(importlib.metadata.version("vllm"))


def ask(scripts: Path, families: Iterable[str]) -> tuple[Installation, dict[str, str]]:
    """Return what an installation is, and by family why it cannot serve it.

    Args:
        scripts: where its console scripts are.
        families: names of those that are asked for.

    Raises:
        UsageError: there is none that answers.
    """
    find_script("vllm", scripts)
    done = subprocess.run(
        [find_script("python", scripts), "-c", _ASK, *families],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
    if done.returncode:
        cause = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        raise UsageError(f"{scripts} is no installation that a sweep can use: {cause}")
    version, left_out = json.loads(done.stdout)
    return Installation(release_of(version), scripts), left_out

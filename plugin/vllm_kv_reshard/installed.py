# SPDX-License-Identifier: Apache-2.0
"""Which vLLM the plugin is loaded into, and whether it was checked with that one."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

#: Distribution of this package.
DISTRIBUTION = "vllm-kv-reshard"
#: Releases that every name and contract was checked with, of which some were run.
CHECKED = ((0, 32), (0, 33))

_FORK_MARK = "+reshard."


class UnsuitableVllmError(RuntimeError):
    """The plugin cannot work with this vLLM. The message is one line that ends with the remedy."""


class Verdict(Enum):
    """What is known of a release."""

    #: Names and contracts were checked.
    CHECKED = "checked"
    #: A newer one; most likely it works, and nobody has seen it.
    UNCHECKED = "not checked"


@dataclass(frozen=True)
class InstalledVllm:
    """A vLLM as it lies here.

    Attributes:
        version: What it says of itself.
        distributions: Names of the installed distributions that the package may have come from;
            more than one of them means that one lies over another.
    """

    version: str
    distributions: tuple[str, ...]

    def __str__(self) -> str:
        named = " and ".join(self.distributions) or "an unnamed distribution"
        return f"vLLM {self.version} of {named}"

    def verdict(self) -> Verdict:
        """Tell what is known of it.

        Raises:
            UnsuitableVllmError: It is the fork, too old, or without a number.
        """
        if _FORK_MARK in self.version:
            raise UnsuitableVllmError(
                f"{self} is the fork, which holds what {DISTRIBUTION} brings: uninstall one of the "
                f"two, with `pip uninstall {DISTRIBUTION}` or by installing vLLM as released"
            )
        numbers = re.match(r"(\d+)\.(\d+)", self.version)
        if numbers is None:
            raise UnsuitableVllmError(
                f"{self} tells no release, so that {DISTRIBUTION} cannot know what it has: build "
                "it from a tree with tags, or set SETUPTOOLS_SCM_PRETEND_VERSION for that"
            )
        release = (int(numbers[1]), int(numbers[2]))
        if release < CHECKED[0]:
            raise UnsuitableVllmError(
                f"{self} is too old for {DISTRIBUTION}, as its engine core does not tell a "
                f"connector of several pipeline stages: install vLLM {_range()}, or the fork of "
                f"this release"
            )
        return Verdict.CHECKED if release in CHECKED else Verdict.UNCHECKED


def find_vllm() -> InstalledVllm:
    """Return the vLLM that this process imports."""
    import vllm

    site = Path(vllm.__file__).parent.parent
    # What lies beside the package has brought it: another site directory may hold a second one,
    # which this process does not see. An editable installation points to it from elsewhere.
    names = _names_of(importlib.metadata.distributions(path=[str(site)]))
    names = names or _names_of(importlib.metadata.distributions())
    return InstalledVllm(vllm.__version__, tuple(sorted(names)))


def _names_of(distributions: Iterable[importlib.metadata.Distribution]) -> set[str]:
    """Return the names of those that hold the package `vllm`.

    Vendors have names of their own for it, and all that are known have its name in them.
    """
    named = ((distribution.metadata["Name"] or "", distribution) for distribution in distributions)
    return {
        name
        for name, distribution in named
        if "vllm" in name.lower()
        and "vllm" in (distribution.read_text("top_level.txt") or "").split()
    }


def checked_releases() -> str:
    """Return the releases in words."""
    return " and ".join(".".join(map(str, release)) for release in CHECKED)


def _range() -> str:
    oldest, newest = (".".join(map(str, release)) for release in (CHECKED[0], CHECKED[-1]))
    return f"{oldest} to {newest}"

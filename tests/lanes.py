# SPDX-License-Identifier: Apache-2.0
"""Which tests decide each change, which run nightly, and in which part.

A test without a mark decides each change: `make test`. One that is marked `nightly` runs with
`make test-full`, in the part that its path has here; a path that a part names as a whole needs no
marks. One that is marked `release` runs with `make release-check`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[1]
RESHARD = "vllm/distributed/kv_transfer/kv_connector/v1/reshard"


@dataclass(frozen=True)
class Part:
    """A part of the nightly lane.

    Attributes:
        what: What its tests show.
        sources: Paths below which a change asks for this part.
        wholly: Tests of it that need no mark: paths of modules and folders.
        marked: Folders whose tests that are marked `nightly` belong to it.
    """

    what: str
    sources: tuple[str, ...]
    wholly: tuple[str, ...] = ()
    marked: tuple[str, ...] = ()

    @property
    def is_selection(self) -> bool:
        """Whether it selects tests; any other one is a target of `make` by itself."""
        return bool(self.wholly or self.marked)


PARTS = {
    "caches": Part(
        "MLA, windows, state, DeepSeek V4, formats of GPUs and shares of tokens, with engines",
        (f"{RESHARD}/engine/caches", f"{RESHARD}/memory", "tools/pdstack/modules/gpu_caches"),
        wholly=tuple(
            f"tests/e2e/test_{name}.py"
            for name in (
                *("deepseek_v4", "gpu_caches", "hybrid", "mla"),
                *("model_families", "shared_tokens"),
            )
        ),
    ),
    "pairs": Part(
        "other layouts, drafts, early dispatch, traces, a real model, LIBFABRIC, and how they end",
        (f"{RESHARD}/engine", f"{RESHARD}/plan", f"{RESHARD}/transport", "bases"),
        wholly=tuple(
            f"tests/e2e/test_{name}.py"
            for name in (
                *("drafts", "early", "first_tokens", "launcher", "libfabric"),
                *("pd_serving", "startup_refusal", "traces"),
            )
        ),
        marked=("tests/e2e",),
    ),
    "faults": Part(
        "faults whose twins in the first lane need no engines",
        (f"{RESHARD}/engine", f"{RESHARD}/protocol", f"{RESHARD}/transport"),
        marked=("tests/faults",),
    ),
    "workers": Part(
        "whole workers of each kind of cache in every layout, every exception, long fuzzing",
        (RESHARD,),
        marked=("tests/v1",),
    ),
    "wheels": Part(
        "the wheels of all targets, and other pairs of the plugin on vLLM as released",
        ("build_backend", "plugin", "pyproject.toml", "bases"),
        marked=("tests/build_backend", "tests/plugin"),
    ),
    "tools": Part(
        "tools for tests, benchmarks and examples",
        ("tools", "benchmarks", "examples"),
        wholly=("tests/benchmarks", "tests/examples", "tests/tools"),
    ),
    "oldest-base": Part(
        "a pair of engines on 0.22.1",
        ("bases/0.22.1", f"{RESHARD}/engine/compat.py"),
    ),
    "schedules": Part(
        "100,000 schedules of the simulation",
        (f"{RESHARD}/engine", f"{RESHARD}/protocol", f"{RESHARD}/transport"),
    ),
    "soak": Part(
        "engines under load while others are stopped and killed, for ten minutes",
        (f"{RESHARD}/engine", f"{RESHARD}/protocol", f"{RESHARD}/transport"),
    ),
}
"""The nightly lane, in the order in which it runs."""

APART = ("tests/faults/test_hosts.py", "tests/plugin")
"""Tests of the first lane with engines of their own; all others share the stage."""

DECIDING = frozenset(
    f"tests/{path}"
    for path in (
        *(
            "tools/test_verify.py",
            "tools/test_weight.py",
            "tools/soak/test_checker.py",
            "tools/pdstack/test_gpu_caches.py",
        ),
        *("tools/pdstack/test_accuracy.py", "tools/pdstack/test_metrics.py"),
        "examples/test_kubernetes.py",
    )
)
"""What decides each change below folders of which all else is nightly: it judges others."""


def part_of(path: str, is_marked: bool) -> str | None:
    """The nightly part that a test belongs to; None for one that decides each change.

    Args:
        path: Of its module, from the root of the repository.
        is_marked: Whether it is marked `nightly`.

    Raises:
        pytest.UsageError: It is marked, and no part has its path.
    """
    for name, part in PARTS.items():
        if path not in DECIDING and any(_is_below(path, each) for each in part.wholly):
            return name
    if not is_marked:
        return None
    for name, part in PARTS.items():
        if any(_is_below(path, each) for each in (*part.marked, *part.wholly)):
            return name
    raise pytest.UsageError(f"no part of tests/lanes.py has the nightly tests of {path}")


def sort(items: Sequence[Any]) -> None:
    """Give each test that is nightly its mark, with its part."""
    for item in items:
        path = item.path.relative_to(ROOT).as_posix()
        part = part_of(path, item.get_closest_marker("nightly") is not None)
        if part is not None:
            item.add_marker(pytest.mark.nightly)
            item.user_properties.append(("part", part))


class ByEngines(LoadScopeScheduling):  # type: ignore[misc]
    """Has tests that share engines run in one process, one after the other.

    Those of `APART` by module, and all others together. xdist's own groups need a pytest before 9.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return path if any(_is_below(path, each) for each in APART) else "stage"


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(f"{root}/")

# SPDX-License-Identifier: Apache-2.0
"""All pages of docs/, and CONTRIBUTING, as they ought to be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import docs_performance

from . import bases, deadlines, kv_plan, lanes, metrics, options, results, states
from .blocks import ROOT, Tables, fill

WRITTEN: Tables = {
    "deadlines": deadlines.lines,
    "lanes": lanes.lines,
    "labels": metrics.label_lines,
    "metrics": metrics.metric_lines,
    "options": options.lines,
    "patches": bases.patch_lines,
    "spans": metrics.span_lines,
    "states": states.lines,
    "wheels": bases.wheel_lines,
}


def written() -> dict[Path, str]:
    """What each page and each drawing of `kv-plan` ought to be."""
    found = {}
    with TemporaryDirectory() as directory:
        drawings = Path(directory)
        for path in (ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))):
            found[path] = rewrite(path.read_text(encoding="utf-8"), drawings)
        for path in sorted(drawings.rglob("*.svg")):
            found[ROOT / path.relative_to(drawings)] = path.read_text(encoding="utf-8")
    return found


def outdated(pages: Mapping[Path, str]) -> list[Path]:
    """Those of some pages and drawings that are not as they ought to be."""
    return [
        path
        for path, text in pages.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]


def rewrite(page: str, drawings: Path) -> str:
    """The same page with all that is written as it is now.

    Args:
        page: Its text.
        drawings: Directory that takes the place of the repository's root for drawings.

    Raises:
        MarkerError: It is not clear where a table begins or ends, or which one it is.
    """
    page = fill(page, "written", WRITTEN)
    page = fill(page, "results", results.TABLES)
    page = docs_performance.rewrite(page)
    return kv_plan.rewrite(page, drawings)

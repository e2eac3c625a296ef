# SPDX-License-Identifier: Apache-2.0
"""Each bound that docs/security.md names is measured in a test, which it names, too."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"^\| (?P<what>[^|]+) \| (?P<bound>[^|]+) \| (?P<test>[^|]+) \|$", re.MULTILINE)


def names_in(path: Path) -> set[str]:
    """The tests of a module, as pytest calls them."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}::{each.name}"
                for each in node.body
                if isinstance(each, ast.FunctionDef)
            }
    return {f"{path.name}::{name}" for name in found if name.split("::")[-1].startswith("test_")}


def test_every_bound_names_the_test_that_measures_it():
    """The test is there, under that name."""
    text = (ROOT / "docs/security.md").read_text()
    table = text[text.index("## What a peer may cost") : text.index("## NIXL metadata")]
    heading, dashes, *rows = _ROW.finditer(table)
    assert heading["test"] == "measured in" and set(dashes["test"]) == {"-"}
    assert len(rows) >= 14
    tests = set().union(*(map(names_in, (ROOT / "tests/v1").rglob("test_*.py"))))
    for row in rows:
        assert row["test"].strip("`") in tests, row["what"]

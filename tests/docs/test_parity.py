# SPDX-License-Identifier: Apache-2.0
"""The table of features names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
UNIT = "tests/v1/kv_connector/unit/reshard"
STATES = {"yes", "partly", "upstream", "not needed"}


def test_every_row_has_a_state_and_tests_that_exist():
    """Whoever renames a test finds the row that rests on it."""
    lines = (ROOT / "docs/parity.md").read_text(encoding="utf-8").splitlines()
    rows = [
        line.strip("| ").split(" | ")
        for line in lines
        if line.startswith("| ") and not line.startswith(("| upstream's |", "| --- |"))
    ]
    assert len(rows) > 20
    for feature, here, tests in rows:
        assert here.partition(":")[0] in STATES, feature
        named = re.findall(r"`([\w/.]+)::(\w+)`", tests)
        assert named and len(named) == tests.count("::"), feature
        for file, name in named:
            (path,) = [ROOT / file] if "/" in file else (ROOT / UNIT).rglob(f"{file}.py")
            assert f"def {name}(" in path.read_text(encoding="utf-8"), f"{feature}: {file}::{name}"

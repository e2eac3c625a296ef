# SPDX-License-Identifier: Apache-2.0
"""What tests share lies in modules of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("tests", "benchmarks", "tools", "scripts")
IMPORT = re.compile(
    r"""^\s*(from\s+\S*\btest_\w+\s+import\b|import\s+\S*\btest_|from\s+\S+\s+import\s+.*\btest_)""",
    re.MULTILINE,
)


def imports_of_tests(text: str) -> list[str]:
    """The imports from modules of tests, also those in scripts within strings."""
    return [match[0].strip() for match in IMPORT.finditer(text)]


@pytest.mark.parametrize(
    "line",
    [
        "from tests.engine.test_worker import Engine",
        "    from tests.engine.test_worker import (",
        "from tests.engine import ranks, test_worker",
        "import tests.engine.test_worker",
        "from . import test_worker",
    ],
)
def test_imports_are_seen(line):
    """In all their forms, at the top and within functions."""
    assert imports_of_tests(f"import re\n{line}\n") != []


@pytest.mark.parametrize(
    "line", ["from tests.engine.workers import Engine", "from tests import latest_run", "#import"]
)
def test_other_imports_are_none(line):
    """Nor are names that only look like a test's."""
    assert imports_of_tests(f"{line}\ntest_worker = 1\n") == []


def test_no_module_imports_from_tests():
    """A fixture that several modules use can be changed without reading one's tests."""
    found = {
        str(path.relative_to(ROOT)): imports
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if (imports := imports_of_tests(path.read_text())) and path != Path(__file__)
    }
    assert found == {}

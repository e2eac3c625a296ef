# SPDX-License-Identifier: Apache-2.0
"""Lanes: what is nightly has a part, faults among it have twins, and planted defects are found."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.twins import TWINS
from tests.lanes import DECIDING, PARTS, ROOT, part_of

TESTS = ROOT / "tests"
UNIT = TESTS / "v1/kv_connector/unit/reshard"
README = (TESTS / "README.md").read_text(encoding="utf-8")


def functions(path: Path) -> dict[str, ast.FunctionDef]:
    """The functions of a module, also of its classes, by name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def is_nightly(function: ast.FunctionDef) -> bool:
    """Whether a test, or any case of it, is marked."""
    return any("nightly" in ast.unparse(each) for each in function.decorator_list)


def nightly_faults() -> Iterator[str]:
    """The faults that are acted out nightly, as `file::function`."""
    for path in sorted((TESTS / "faults").glob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        wholly = re.search(r"^pytestmark = .*nightly", source, re.MULTILINE) is not None
        for name, function in functions(path).items():
            if name.startswith("test_") and (wholly or is_nightly(function)):
                yield f"{path.name}::{name}"


def test_every_nightly_fault_has_a_twin_in_the_first_lane():
    """A defect that is planted and found there, or a test that runs there."""
    assert sorted(nightly_faults()) == sorted(TWINS)
    planted = functions(UNIT / "simulation/test_mutations.py")
    for fault, twins in TWINS.items():
        for twin in twins:
            file, _, name = twin.rpartition("::")
            if file:
                assert not is_nightly(functions(UNIT / file)[name]), (fault, twin)
            else:
                assert "monkeypatch" in ast.unparse(planted[twin].args), (fault, twin)


def test_paths_of_parts_exist():
    """Of tests, and of sources whose change asks for a part."""
    for name, part in PARTS.items():
        for path in (*part.sources, *part.wholly, *part.marked):
            assert (ROOT / path).exists(), (name, path)
    assert [path for path in DECIDING if not (ROOT / path).is_file()] == []


def test_make_runs_every_part():
    """Those that select tests by one rule, and each other one by a target of its own."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (selections,) = re.findall(
        r"^NIGHTLY := \$\(addprefix nightly-,(.+)\)$", makefile, re.MULTILINE
    )
    (others,) = re.findall(r"^test-full: \$\(NIGHTLY\) (.+?)  ##", makefile, re.MULTILINE)
    # Told with a space, a part that is called like a folder would be taken for a path.
    assert "--part=$*" in makefile
    assert selections.split() == [name for name, part in PARTS.items() if part.is_selection]
    assert others.split() == [
        f"nightly-{name}" for name, part in PARTS.items() if not part.is_selection
    ]


def test_each_marked_test_has_one_part():
    """By its path; what needs no mark has one, too, but for what judges others."""
    assert part_of("tests/faults/test_hosts.py", True) == "faults"
    assert part_of("tests/faults/test_hosts.py", False) is None
    assert part_of("tests/e2e/test_mla.py", False) == "caches"
    assert part_of("tests/e2e/test_layouts.py", True) == "pairs"
    assert part_of("tests/tools/soak/test_nemesis.py", False) == "tools"
    assert part_of("tests/tools/soak/test_checker.py", False) is None
    with pytest.raises(pytest.UsageError, match="no part"):
        part_of("tests/docs/test_site.py", True)


def test_planted_defects_are_counted():
    """The page has the number of each kind, and its module is in the first lane."""
    rows = re.findall(r"^\| \[`(.+?)`\]\((.+?)\) \| (\d+) \| ", README, re.MULTILINE)
    assert len(rows) > 3
    for _, path, told in rows:
        source = (TESTS / path).read_text(encoding="utf-8")
        assert "nightly" not in source, path
        assert part_of((Path("tests") / path).as_posix(), False) is None, path
        assert planted(source) == int(told), path


def planted(source: str) -> int:
    """How many defects a module of tests plants: as many as its table has."""
    (table,) = (
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and re.match(r"PLANTED\b", ast.unparse(node))
    )
    return len(table.keys if isinstance(table, ast.Dict) else table.elts)

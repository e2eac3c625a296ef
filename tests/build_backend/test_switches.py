# SPDX-License-Identifier: Apache-2.0
"""Which branches of a switch run on a base."""

from __future__ import annotations

import ast

import pytest
from reshard_build.contracts import Contracts
from reshard_build.switches import settle
from reshard_build.symbols import imports_of, missing
from reshard_build.universe import Universe

COMPAT = """\
try:
    from vllm.new import View
except ImportError:
    View = None
    from vllm.old import shape
HAS_VIEW = View is not None
"""
USE = """\
from vllm.own.compat import HAS_VIEW, View
if HAS_VIEW:
    from vllm.new import only_new
else:
    from vllm.old import only_old
SIZE = View(1) if View is not None else 2
def read():
    if not HAS_VIEW:
        return only_old(1, 2)
    return only_new(1)
"""
OWN = {"vllm/own/a_use.py": USE, "vllm/own/compat.py": COMPAT}
NEW = {"vllm/new.py": "class View:\n    def __init__(self, a): ...\ndef only_new(a): ...\n"}
OLD = {"vllm/old.py": "def shape(): ...\ndef only_old(a, b): ...\n"}


def _universe(files: dict[str, str], release: tuple[int, ...] = (1, 0)) -> Universe:
    universe = Universe(frozenset(files), lambda path: files[path].encode())
    settle(universe, OWN, release)
    return universe


@pytest.mark.parametrize("base", [NEW, OLD], ids=["new", "old"])
def test_only_the_branch_that_runs_is_checked(base: dict[str, str]) -> None:
    """On either base, also where a module imports the switch, neither branch is a fault."""
    universe = _universe({**base, **OWN})
    for path in OWN:
        assert missing(universe, imports_of(path, universe.tree(path))) == []
        assert Contracts(universe, OWN).of(path) == []


def test_branch_that_runs_is_checked_to_the_end() -> None:
    """A fault behind a switch is found on the base that gets there."""
    universe = _universe({**OLD, **OWN, "vllm/old.py": "def shape(): ...\ndef only_old(a): ...\n"})
    (breach,) = Contracts(universe, OWN).of("vllm/own/a_use.py")
    assert "only_old" in breach.text and breach.line == 9


def test_handler_must_hold_where_it_runs() -> None:
    """Where the first import fails, the one in its place has to exist."""
    universe = _universe({**OWN, "vllm/old.py": "def only_old(a, b): ...\n"})
    path = "vllm/own/compat.py"
    assert [i.name for i in missing(universe, imports_of(path, universe.tree(path)))] == ["shape"]


@pytest.mark.parametrize(
    "source",
    [
        "try:\n    import numpy\nexcept ImportError:\n    numpy = None\n",
        "try:\n    from vllm.old import gone\nexcept ValueError:\n    gone = None\n",
        "import os\nif os.name:\n    A = 1\nelse:\n    A = 2\n",
    ],
)
def test_other_branches_are_left_alone(source: str) -> None:
    """What is not a switch of vLLM's keeps all its branches."""
    files = {**OLD, "vllm/own/compat.py": source, "vllm/own/a_use.py": ""}
    tree = _universe(files).tree("vllm/own/compat.py")
    assert ast.dump(tree) == ast.dump(ast.parse(source))


BY_RELEASE = """\
from packaging.version import Version
from vllm import __version__ as _version
_IS_OLD = Version(_version).release < (2, 1)
if _IS_OLD:
    from vllm.old import shape
else:
    from vllm.new import View
def read(config):
    if _IS_OLD:
        return shape()
    from vllm.new import only_new
    return only_new(config)
def is_wanted(config):
    return not _IS_OLD and only_new(config)
def is_needed(config):
    return _IS_OLD or only_new(config)
"""


@pytest.mark.parametrize(
    ("release", "gone"),
    [((2, 0, 9), ["View", "only_new"]), ((2, 1, 0), ["shape"]), ((2, 2), ["shape"])],
)
def test_release_decides(release: tuple[int, ...], gone: list[str]) -> None:
    """Imports and names of the other side of a comparison are not asked for."""
    files = {"vllm/own/compat.py": BY_RELEASE, "vllm/own/a_use.py": "", "vllm/__init__.py": ""}
    tree = _universe(files, release).tree("vllm/own/compat.py")
    text = ast.unparse(tree)
    assert all(f"import {name}" not in text for name in gone)
    is_old = "View" in gone
    assert f"return {'shape()' if is_old else 'only_new(config)'}" in text
    assert text.count("only_new(config)") == (0 if is_old else 3)


@pytest.mark.parametrize(
    "test",
    ["Version(other).release < (2, 1)", "Version(_version) < Version('2.1')", "_version < '2.1'"],
)
def test_other_comparisons_are_left_alone(test: str) -> None:
    """Both branches stay where nothing is known."""
    branches = f"if {test}:\n    A = 1\nelse:\n    A = 2\n"
    source = f"from vllm import __version__ as _version\n{branches}"
    files = {"vllm/own/compat.py": source, "vllm/own/a_use.py": "", "vllm/__init__.py": ""}
    tree = _universe(files, (2, 0)).tree("vllm/own/compat.py")
    assert ast.dump(tree) == ast.dump(ast.parse(source))

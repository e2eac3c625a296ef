# SPDX-License-Identifier: Apache-2.0
"""Patches that still apply though upstream has what they add."""

from __future__ import annotations

import pytest
from reshard_build.check import run_checks
from reshard_build.duplicates import require_no_duplicates
from reshard_build.errors import DuplicateError

BASE = b"import os\n\nLIMIT = 1\n\n\nclass Connector:\n    role = 1\n\n    def load(self): ...\n"


@pytest.mark.parametrize(
    ("added", "named"),
    [
        (b"\n    def load(self, more): ...\n", r"Connector\.load"),
        (b"\n    role = 2\n", r"Connector\.role"),
        (b"\n    role: int\n", r"Connector\.role"),
        (b"\n\nclass Connector: ...\n", "Connector"),
        (b"\n\ndef os(): ...\n", "os"),
        (b"\nimport os\n", "os"),
        (b"\nLIMIT = 2\n", "LIMIT"),
        (b"\ndef new(): ...\n\ndef new(): ...\n", "new"),
    ],
)
def test_second_definition_is_named(added: bytes, named: str) -> None:
    """A method, attribute, class, function, import or constant that is there twice is refused."""
    with pytest.raises(DuplicateError, match=rf"vllm/x\.py has {named} twice once patched"):
        require_no_duplicates("vllm/x.py", BASE, BASE + added)


@pytest.mark.parametrize(
    "added",
    [
        b"\n    def store(self): ...\n",
        b"\nimport os.path\n",
        b"\nLIMIT = LIMIT + 1\n",
        b"\nif LIMIT:\n    LIMIT = 2\n",
        b"\n    @property\n    def a(self): ...\n    @a.setter\n    def a(self, value): ...\n",
        b"\n    @overload\n    def b(self): ...\n    @overload\n    def b(self, c): ...\n"
        b"    def b(self, c=0): ...\n",
        b"\n\nclass Other:\n    role = 1\n    def load(self): ...\n",
    ],
)
def test_what_belongs_together_is_fine(added: bytes) -> None:
    """New names, families of one name, and conditional definitions are no duplicates."""
    require_no_duplicates("vllm/x.py", BASE, BASE + added)


def test_duplicates_of_the_base_are_its_own_affair() -> None:
    """What the base has twice may stay so."""
    require_no_duplicates("vllm/x.py", BASE + BASE, BASE + BASE + b"A = 1\n")


def test_invalid_result_is_named() -> None:
    """A patch that leaves no valid Python is refused, also in a new file."""
    with pytest.raises(DuplicateError, match=r"vllm/x\.py is not valid Python once patched"):
        require_no_duplicates("vllm/x.py", None, b"def\n")


def test_check_notices_a_merged_patch(frontend) -> None:
    """A patch that applies exactly, to a base that has its method, fails its own proof only."""
    name = "vllm/connector.py"
    frontend.pin({"vllm/__init__.py": b"", name: BASE})
    frontend.add_patch(
        "area-add", {name: BASE}, {name: BASE + b"\n    def load(self, more): ...\n"}
    )
    failed = [p for p in run_checks(frontend.project, frontend.environ) if not p.ok]
    assert [p.name for p in failed] == [f"duplicates, 0.22.1 {t} x86_64" for t in ("cpu", "cuda")]
    assert "Connector.load" in failed[0].text

# SPDX-License-Identifier: Apache-2.0
"""The package stands wherever it is put: as part of vLLM, or under a name of its own."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

from vllm.distributed.kv_transfer.kv_connector.v1 import reshard


def test_own_modules_are_imported_by_relative_names():
    """An absolute name would load a second copy, or none, where the package has another name."""
    sources = sorted(Path(reshard.__file__).parent.rglob("*.py"))
    assert sources
    imported = {
        (path.name, name)
        for path in sources
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom) and node.level == 0
            else [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else []
        )
    }
    assert {found for found in imported if "reshard" in found[1]} == set()


PACKAGES = [
    path.parent.relative_to(Path(reshard.__file__).parent).as_posix().replace("/", ".")
    for path in sorted(Path(reshard.__file__).parent.rglob("*/__init__.py"))
]


def test_packages_tell_what_their_modules_are_for():
    """Each module has its place in its package's table, and what has gone is not in it any more."""
    for name in PACKAGES:
        assert_tells(importlib.import_module(f"{reshard.__name__}.{name}"))


def assert_tells(package):
    """A package's table has its modules, and no other one."""
    # Names begin a line, one or several with commas; a comma at its end has them go on in the next.
    told = {
        name
        for line in package.__doc__.splitlines()
        if (names := re.match(r"\w+(?:, ?\w+)*(?=,$| {2,})", line))
        for name in re.split(r", ?", names[0])
    }
    folder = Path(package.__file__).parent
    modules = {path.stem for path in folder.glob("[!_]*.py")}
    assert told == modules | {path.parent.name for path in folder.glob("*/__init__.py")}

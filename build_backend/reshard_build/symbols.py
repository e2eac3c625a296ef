# SPDX-License-Identifier: Apache-2.0
"""Checks without importing anything that what the overlay imports from vLLM exists there."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass

from .errors import SymbolError
from .universe import Universe, absolute, is_ours, package_of


@dataclass(frozen=True)
class Import:
    """One imported thing.

    Attributes:
        path: File that imports it.
        line: Line number, from 1.
        module: Absolute name of the module.
        name: Name in the module; empty where the module itself is imported.
    """

    path: str
    line: int
    module: str
    name: str


def imports_of(path: str, tree: ast.Module) -> list[Import]:
    """Return what a file imports from vLLM, wherever in the file it does so.

    Args:
        path: Of the file in the product; relative imports start from it.
        tree: Its content.
    """
    package = package_of(path)
    found: list[Import] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [Import(path, node.lineno, a.name, "") for a in node.names if is_ours(a.name)]
        elif isinstance(node, ast.ImportFrom):
            module = absolute(node, package)
            if is_ours(module):
                found += [
                    Import(path, node.lineno, module, "" if a.name == "*" else a.name)
                    for a in node.names
                ]
    return found


def missing(universe: Universe, imports: Iterable[Import]) -> list[Import]:
    """Return those imports that would fail."""
    return [
        wanted
        for wanted in imports
        if not universe.has_module(wanted.module)
        or (wanted.name and not universe.has_name(wanted.module, wanted.name))
    ]


def require_symbols(universe: Universe, overlay: Iterable[str], where: str) -> int:
    """Check all imports of the overlay.

    Args:
        universe: Patched base and overlay.
        overlay: Paths of the overlay's files.
        where: Which base it is, for the message.

    Returns:
        How many imports were checked.

    Raises:
        SymbolError: Some would fail; names each with its file and line.
    """
    imports = [
        wanted
        for path in overlay
        if path.endswith(".py")
        for wanted in imports_of(path, universe.tree(path))
    ]
    if lacking := missing(universe, imports):
        listed = ", ".join(
            f"{i.path}:{i.line} imports {f'{i.name} from {i.module}' if i.name else i.module}"
            for i in lacking
        )
        raise SymbolError(
            f"{where} lacks what the overlay imports: {listed}",
            "follow upstream to where it went, or correct the import",
        )
    return len(imports)

# SPDX-License-Identifier: Apache-2.0
"""Settles what is switched by base: which branches of the overlay run on the base at hand.

A switch is an import that may fail, and what depends on it::

    try:
        from vllm.new import View
    except ImportError:
        View = None

    if View is not None: ...

Of `try` with `except ImportError` around an import from vLLM the branch that runs is kept, and so
it is of `if` and of conditional expressions whose test is such a name, also in modules that import
it. The checks then see what would run.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection

from .signatures import last_name
from .universe import Universe, absolute, is_ours, package_of

_IMPORT_ERRORS = frozenset({"ImportError", "ModuleNotFoundError"})


def settle(universe: Universe, overlay: Collection[str]) -> None:
    """Replace the trees of the overlay by what runs on the base.

    Args:
        universe: Patched base and overlay.
        overlay: Paths of the overlay's files.

    Raises:
        SymbolError: A file is not valid Python.
    """
    known: dict[str, dict[str, bool]] = {}

    def settled(path: str) -> dict[str, bool]:
        if path not in known:
            known[path] = {}  # For modules that import from each other in a circle.
            settler = _Settler(universe, path, switches_of)
            tree = settler.visit(universe.tree(path))
            universe.replace(path, tree)
            known[path] = settler.known
        return known[path]

    def switches_of(module: str) -> dict[str, bool]:
        path = universe.source(module)
        return settled(path) if path in paths else {}

    paths = {path for path in overlay if path.endswith(".py")}
    for path in sorted(paths):
        settled(path)


class _Settler(ast.NodeTransformer):
    """Keeps the branches that run.

    Args:
        universe: Tells which imports succeed.
        path: File that is settled.
        switches_of: Returns the switches of another module.
    """

    def __init__(
        self, universe: Universe, path: str, switches_of: Callable[[str], dict[str, bool]]
    ) -> None:
        self._universe = universe
        self._package = package_of(path)
        self._switches_of = switches_of
        #: Names that are switches, and whether each is true.
        self.known: dict[str, bool] = {}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        """Take over the switches of another module."""
        module = absolute(node, self._package)
        if is_ours(module):
            switches = self._switches_of(module)
            for alias in node.names:
                if alias.name in switches:
                    self.known[alias.asname or alias.name] = switches[alias.name]
        return node

    def visit_Try(self, node: ast.Try) -> ast.AST | list[ast.AST]:
        """Keep one branch of an import that may fail."""
        imports = [s for s in node.body if isinstance(s, ast.Import | ast.ImportFrom)]
        handler = next((h for h in node.handlers if _catches_import_error(h)), None)
        wanted = [target for statement in imports for target in self._targets(statement)]
        if handler is None or not wanted:
            return self.generic_visit(node)
        holds = all(self._exists(module, name) for module, name in wanted)
        if holds:
            for statement in imports:
                for alias in statement.names:
                    self.known[alias.asname or alias.name.partition(".")[0]] = True
        chosen = [*node.body, *node.orelse] if holds else handler.body
        return self._all([*chosen, *node.finalbody])

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        """Note constants, and what follows from switches."""
        self.generic_visit(node)
        truth = self._truth(node.value)
        for target in node.targets:
            if isinstance(target, ast.Name) and (target.id.isupper() or target.id[0].isupper()):
                if truth is None:
                    self.known.pop(target.id, None)
                else:
                    self.known[target.id] = truth
        return node

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.AST]:
        """Keep the branch that runs, where a switch decides."""
        truth = self._truth(node.test) if _names(node.test) else None
        if truth is None:
            return self.generic_visit(node)
        return self._all(node.body if truth else node.orelse)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        """Keep the value that is used, where a switch decides."""
        truth = self._truth(node.test) if _names(node.test) else None
        if truth is None:
            return self.generic_visit(node)
        chosen: ast.AST = self.visit(node.body if truth else node.orelse)
        return chosen

    def _all(self, statements: list[ast.stmt]) -> list[ast.AST]:
        kept: list[ast.AST] = []
        for statement in statements:
            result = self.visit(statement)
            kept += result if isinstance(result, list) else [result]
        return kept or [ast.Pass()]

    def _targets(self, statement: ast.Import | ast.ImportFrom) -> list[tuple[str, str]]:
        if isinstance(statement, ast.ImportFrom):
            module = absolute(statement, self._package)
            return [(module, a.name) for a in statement.names] if is_ours(module) else []
        return [(alias.name, "") for alias in statement.names if is_ours(alias.name)]

    def _exists(self, module: str, name: str) -> bool:
        if not self._universe.has_module(module):
            return False
        return name in {"", "*"} or self._universe.has_name(module, name)

    def _truth(self, test: ast.expr) -> bool | None:
        if isinstance(test, ast.Constant):
            return bool(test.value)
        if isinstance(test, ast.Name):
            return self.known.get(test.id)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            truth = self._truth(test.operand)
            return None if truth is None else not truth
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            against = test.comparators[0]
            if isinstance(against, ast.Constant) and against.value is None:
                truth = self._truth(test.left) if isinstance(test.left, ast.Name) else None
                if truth is not None and isinstance(test.ops[0], ast.Is):
                    return not truth
                return truth if isinstance(test.ops[0], ast.IsNot) else None
        return None


def _names(test: ast.expr) -> bool:
    """Tell whether a test asks for a name: a plain constant is none of our switches."""
    return any(isinstance(node, ast.Name) for node in ast.walk(test))


def _catches_import_error(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is not None and last_name(kind) in _IMPORT_ERRORS for kind in kinds)

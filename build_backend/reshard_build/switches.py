# SPDX-License-Identifier: Apache-2.0
"""Settles what is switched by base: which branches of the overlay run on the base at hand.

A switch is a comparison with vLLM's release or an import that may fail, and what depends on it::

    IS_OLD = Version(vllm_version).release < (0, 32)

    try:
        from vllm.new import View
    except ImportError:
        View = None

    if View is not None and not IS_OLD: ...

Of `try` with `except ImportError` around an import from vLLM the branch that runs is kept, and so
it is of `if`, of conditional expressions, and of `and` and `or`, where such names decide, also in
modules that import them. What stands behind a `return` that is kept goes. The checks then see what
would run.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Collection

from .signatures import last_name
from .universe import PACKAGE, Universe, absolute, is_ours, package_of

_ORDERS: dict[type[ast.cmpop], Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
}

_IMPORT_ERRORS = frozenset({"ImportError", "ModuleNotFoundError"})


def settle(universe: Universe, overlay: Collection[str], release: tuple[int, ...]) -> None:
    """Replace the trees of the overlay by what runs on the base.

    Args:
        universe: Patched base and overlay.
        overlay: Paths of the overlay's files.
        release: The base's, as `(0, 32, 0)`.

    Raises:
        SymbolError: A file is not valid Python.
    """
    known: dict[str, dict[str, bool]] = {}

    def settled(path: str) -> dict[str, bool]:
        if path not in known:
            known[path] = {}  # For modules that import from each other in a circle.
            settler = _Settler(universe, path, switches_of, release)
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
        release: The base's.
    """

    def __init__(
        self,
        universe: Universe,
        path: str,
        switches_of: Callable[[str], dict[str, bool]],
        release: tuple[int, ...],
    ) -> None:
        self._universe = universe
        self._package = package_of(path)
        self._switches_of = switches_of
        self._release = release
        # Names that vLLM's version has here.
        self._versions: set[str] = set()
        #: Names that are switches, and whether each is true.
        self.known: dict[str, bool] = {}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        """Take over the switches of another module."""
        module = absolute(node, self._package)
        if module == PACKAGE:
            self._versions |= {a.asname or a.name for a in node.names if a.name == "__version__"}
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

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        """Drop what a switch keeps from being asked, and the switch itself."""
        decisive = isinstance(node.op, ast.Or)
        kept: list[ast.expr] = []
        for value in node.values:
            truth = self._truth(value) if _names(value) else None
            if truth is None:
                kept.append(self.visit(value))
            elif truth is decisive:
                kept.append(ast.copy_location(ast.Constant(truth), value))
                break
        if len(kept) > 1:
            return ast.copy_location(ast.BoolOp(node.op, kept), node)
        return kept[0] if kept else ast.copy_location(ast.Constant(not decisive), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Drop what stands behind a `return` that a switch has kept."""
        self.generic_visit(node)
        for position, statement in enumerate(node.body, 1):
            if isinstance(statement, ast.Return | ast.Raise):
                del node.body[position:]
                break
        return node

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
            if (truth := self._compared(test)) is not None:
                return truth
            against = test.comparators[0]
            if isinstance(against, ast.Constant) and against.value is None:
                truth = self._truth(test.left) if isinstance(test.left, ast.Name) else None
                if truth is not None and isinstance(test.ops[0], ast.Is):
                    return not truth
                return truth if isinstance(test.ops[0], ast.IsNot) else None
        return None

    def _compared(self, test: ast.Compare) -> bool | None:
        """Settle `Version(vllm_version).release < (0, 32)`; None for anything else."""
        match test.left, test.comparators[0]:
            case (
                ast.Attribute(
                    value=ast.Call(func=ast.Name(id="Version"), args=[ast.Name(id=name)]),
                    attr="release",
                ),
                ast.Tuple(elts=parts),
            ) if name in self._versions:
                order = _ORDERS.get(type(test.ops[0]))
                than = tuple(ast.literal_eval(part) for part in parts)
                return None if order is None else order(self._release, than)
        return None


def _names(test: ast.expr) -> bool:
    """Tell whether a test asks for a name: a plain constant is none of our switches."""
    return any(isinstance(node, ast.Name) for node in ast.walk(test))


def _catches_import_error(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is not None and last_name(kind) in _IMPORT_ERRORS for kind in kinds)

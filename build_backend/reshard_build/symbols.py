# SPDX-License-Identifier: Apache-2.0
"""Checks without importing anything that what the overlay imports from vLLM exists there.

Modules are read as syntax trees. A name counts as bound in a module when a statement at its top
level binds it, also inside of `if`, `try`, `with` and loops; when it is a submodule; when a star
import brings it; or when the module has a `__getattr__` and spells the name in a string, as the
lazy tables of upstream do.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from .errors import SymbolError

PACKAGE = "vllm"


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


@dataclass(frozen=True)
class _Module:
    names: frozenset[str]
    stars: tuple[str, ...]
    lazy: frozenset[str]


@dataclass
class Universe:
    """All modules of the product, parsed on demand.

    Attributes:
        paths: Files of the product.
        read: Returns the content of one of them.
    """

    paths: frozenset[str]
    read: Callable[[str], bytes]
    _parsed: dict[str, _Module] = field(default_factory=dict)
    _packages: set[str] = field(default_factory=set)
    _binaries: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for path in self.paths:
            pure = PurePosixPath(path)
            if pure.suffix in {".py", ".so"}:
                self._packages.update(".".join(p.parts) for p in pure.parents if p.parts)
            if pure.suffix == ".so":
                stem = pure.name.partition(".")[0]
                self._binaries.add(".".join((*pure.parent.parts, stem)))

    def has_module(self, module: str) -> bool:
        """Tell whether a module or package of that absolute name exists."""
        return (
            self._source(module) is not None or module in self._packages or module in self._binaries
        )

    def has_name(self, module: str, name: str, _seen: frozenset[str] = frozenset()) -> bool:
        """Tell whether `from module import name` would find something."""
        if self.has_module(f"{module}.{name}"):
            return True
        if module in self._binaries:
            return True  # What a compiled module holds cannot be read.
        source = self._source(module)
        if source is None or module in _seen:
            return False
        parsed = self._parse(module, source)
        if name in parsed.names or name in parsed.lazy:
            return True
        if name.startswith("_"):
            return False
        return any(
            not _is_ours(star) or self.has_name(star, name, _seen | {module})
            for star in parsed.stars
        )

    def _source(self, module: str) -> str | None:
        stem = module.replace(".", "/")
        return next((p for p in (f"{stem}.py", f"{stem}/__init__.py") if p in self.paths), None)

    def _parse(self, module: str, path: str) -> _Module:
        if module not in self._parsed:
            tree = ast.parse(self.read(path), filename=path)
            names: set[str] = set()
            stars: list[str] = []
            package = _package_of(path)
            for statement in _top_level(tree.body):
                if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
                    stars.append(_absolute(statement, package))
                names.update(_bound(statement))
            lazy: frozenset[str] = frozenset()
            if "__getattr__" in names:
                lazy = frozenset(
                    node.value
                    for node in ast.walk(tree)
                    if isinstance(node, ast.Constant) and isinstance(node.value, str)
                )
            self._parsed[module] = _Module(frozenset(names), tuple(stars), lazy)
        return self._parsed[module]


def imports_of(path: str, source: bytes) -> list[Import]:
    """Return what a file imports from vLLM, wherever in the file it does so.

    Args:
        path: Of the file in the product; relative imports start from it.
        source: Its content.

    Raises:
        SymbolError: The file is not valid Python.
    """
    try:
        tree = ast.parse(source, filename=path)
    except (SyntaxError, ValueError) as error:
        raise SymbolError(f"{path} is not valid Python: {error}", "correct it") from None
    package = _package_of(path)
    found: list[Import] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [Import(path, node.lineno, a.name, "") for a in node.names if _is_ours(a.name)]
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(node, package)
            if _is_ours(module):
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
        for wanted in imports_of(path, universe.read(path))
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


def _is_ours(module: str) -> bool:
    return module == PACKAGE or module.startswith(f"{PACKAGE}.")


def _package_of(path: str) -> tuple[str, ...]:
    """Return the package in which the relative imports of a file start."""
    return PurePosixPath(path).parent.parts


def _absolute(node: ast.ImportFrom, package: tuple[str, ...]) -> str:
    if not node.level:
        return node.module or ""
    start = package[: len(package) - node.level + 1]
    return ".".join((*start, node.module) if node.module else start)


def _top_level(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run when a module is imported, also nested ones."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for part in ast.iter_child_nodes(statement):
            if isinstance(part, ast.stmt):
                yield from _top_level([part])
            elif isinstance(part, ast.ExceptHandler | ast.match_case):
                yield from _top_level(part.body)


def _bound(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement binds by itself, not those that nested ones bind."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
        return
    if isinstance(statement, ast.Import):
        yield from (a.asname or a.name.partition(".")[0] for a in statement.names)
        return
    if isinstance(statement, ast.ImportFrom):
        yield from (a.asname or a.name for a in statement.names if a.name != "*")
        return
    if isinstance(statement, ast.AnnAssign) and statement.value is None:
        return
    for part in ast.iter_child_nodes(statement):
        if not isinstance(part, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from (
                node.id
                for node in ast.walk(part)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            )

# SPDX-License-Identifier: Apache-2.0
"""The modules of one product as syntax trees: which there are, and which names they bind.

Nothing is imported. A name counts as bound in a module when a statement at its top level binds it,
also inside of `if`, `try`, `with` and loops; when it is a submodule; when a star import brings it;
or when the module has a `__getattr__` and spells the name in a string, as the lazy tables of
upstream do.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from .errors import SymbolError

PACKAGE = "vllm"


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
    _trees: dict[str, ast.Module] = field(default_factory=dict)
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
            self.source(module) is not None or module in self._packages or module in self._binaries
        )

    def has_name(self, module: str, name: str, _seen: frozenset[str] = frozenset()) -> bool:
        """Tell whether `from module import name` would find something."""
        if self.has_module(f"{module}.{name}"):
            return True
        if module in self._binaries:
            return True  # What a compiled module holds cannot be read.
        source = self.source(module)
        if source is None or module in _seen:
            return False
        parsed = self._parse(module, source)
        if name in parsed.names or name in parsed.lazy:
            return True
        if name.startswith("_"):
            return False
        return any(
            not is_ours(star) or self.has_name(star, name, _seen | {module})
            for star in parsed.stars
        )

    def tree(self, path: str) -> ast.Module:
        """Return the syntax tree of a file.

        Raises:
            SymbolError: The file is not valid Python.
        """
        if path not in self._trees:
            try:
                self._trees[path] = ast.parse(self.read(path), filename=path)
            except (SyntaxError, ValueError) as error:
                raise SymbolError(f"{path} is not valid Python: {error}", "correct it") from None
        return self._trees[path]

    def replace(self, path: str, tree: ast.Module) -> None:
        """Let another tree stand for a file."""
        self._trees[path] = tree
        self._parsed.pop(module_of(path), None)

    def source(self, module: str) -> str | None:
        """Return the path of a module's file; `None` where there is none to read."""
        stem = module.replace(".", "/")
        return next((p for p in (f"{stem}.py", f"{stem}/__init__.py") if p in self.paths), None)

    def _parse(self, module: str, path: str) -> _Module:
        if module not in self._parsed:
            tree = self.tree(path)
            names: set[str] = set()
            stars: list[str] = []
            package = package_of(path)
            for statement in top_level(tree.body):
                if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
                    stars.append(absolute(statement, package))
                names.update(bound(statement))
            lazy: frozenset[str] = frozenset()
            if "__getattr__" in names:
                lazy = frozenset(
                    node.value
                    for node in ast.walk(tree)
                    if isinstance(node, ast.Constant) and isinstance(node.value, str)
                )
            self._parsed[module] = _Module(frozenset(names), tuple(stars), lazy)
        return self._parsed[module]


def is_ours(module: str) -> bool:
    """Tell whether a module is vLLM's, upstream's or the overlay's."""
    return module == PACKAGE or module.startswith(f"{PACKAGE}.")


def package_of(path: str) -> tuple[str, ...]:
    """Return the package in which the relative imports of a file start."""
    return PurePosixPath(path).parent.parts


def module_of(path: str) -> str:
    """Return the absolute name of the module that a file holds."""
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def absolute(node: ast.ImportFrom, package: tuple[str, ...]) -> str:
    """Return the absolute name of the module that an import names."""
    if not node.level:
        return node.module or ""
    start = package[: len(package) - node.level + 1]
    return ".".join((*start, node.module) if node.module else start)


def top_level(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run when a module is imported, also nested ones."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for part in ast.iter_child_nodes(statement):
            if isinstance(part, ast.stmt):
                yield from top_level([part])
            elif isinstance(part, ast.ExceptHandler | ast.match_case):
                yield from top_level(part.body)


def bound(statement: ast.stmt) -> Iterator[str]:
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

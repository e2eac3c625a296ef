# SPDX-License-Identifier: Apache-2.0
"""Finds what a name stands for, and what a class has: through re-exports and base classes.

What cannot be told from the source is `None`, and then nothing is claimed about it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from .signatures import (
    FunctionNode,
    Parameter,
    Signature,
    decorators,
    is_transparent,
    last_name,
    signature_of,
)
from .universe import Universe, absolute, bound, is_ours, package_of, top_level

# Base classes from elsewhere that give a class no attribute that it would be asked for.
_PLAIN = frozenset({"object", "ABC", "Generic", "Protocol"})
# Decorators that make a constructor of the annotated names.
_DATACLASS = frozenset({"dataclass", "config"})


@dataclass(frozen=True)
class Module:
    """A module that a name stands for."""

    name: str


@dataclass(frozen=True, eq=False)
class Definition:
    """A class or function, and where it stands.

    Attributes:
        path: Of the file.
        node: Its syntax.
    """

    path: str
    node: ast.ClassDef | FunctionNode

    @property
    def name(self) -> str:
        """Its name."""
        return self.node.name


@dataclass(frozen=True, eq=False)
class Member:
    """What a class binds in its body or its methods bind on `self`.

    Attributes:
        owner: The class.
        node: The method, or the statement that binds it.
        method: The method that binds it on `self`; `None` for what the body binds.
    """

    owner: Definition
    node: ast.AST
    method: FunctionNode | None = None


Meaning = Definition | Module


@dataclass
class Definitions:
    """All that the modules of a product define.

    Attributes:
        universe: The modules.
    """

    universe: Universe
    _tables: dict[str, Mapping[str, list[ast.stmt]]] = field(default_factory=dict)
    _defined: dict[int, Definition] = field(default_factory=dict)
    _chains: dict[Definition, Chain] = field(default_factory=dict)

    def table(self, path: str) -> Mapping[str, list[ast.stmt]]:
        """Return the statements at the top of a file that bind each name."""
        if path not in self._tables:
            found: dict[str, list[ast.stmt]] = {}
            for statement in top_level(self.universe.tree(path).body):
                for name in bound(statement):
                    found.setdefault(name, []).append(statement)
            self._tables[path] = found
        return self._tables[path]

    def find(self, module: str, name: str, depth: int = 0) -> Meaning | None:
        """Return what `from module import name` gives."""
        path = self.universe.source(module)
        meaning = self.at(path, name, depth) if path is not None else None
        if meaning is None and self.universe.has_module(f"{module}.{name}"):
            return Module(f"{module}.{name}")
        return meaning

    def at(self, path: str, name: str, depth: int = 0) -> Meaning | None:
        """Return what a name stands for at the top of a file."""
        if depth > 20:
            return None  # Modules that import from each other in a circle.
        meanings = {
            self._meaning(path, statement, name, depth)
            for statement in self.table(path).get(name, ())
            if not (isinstance(statement, FunctionNode) and "overload" in decorators(statement))
        }
        if not meanings and not name.startswith("_"):
            meanings = {
                meaning
                for module in self._stars(path)
                if (meaning := self.find(module, name, depth + 1)) is not None
            }
        return meanings.pop() if len(meanings) == 1 else None

    def _stars(self, path: str) -> Iterator[str]:
        """Yield the modules of vLLM's from which a file imports everything."""
        for statement in top_level(self.universe.tree(path).body):
            if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
                module = absolute(statement, package_of(path))
                if is_ours(module):
                    yield module

    def of(self, path: str, expression: ast.expr) -> Meaning | None:
        """Return what a dotted name stands for in a file."""
        if isinstance(expression, ast.Name):
            return self.at(path, expression.id)
        if isinstance(expression, ast.Attribute):
            owner = self.of(path, expression.value)
            return self.find(owner.name, expression.attr) if isinstance(owner, Module) else None
        return None

    def define(self, path: str, node: ast.ClassDef | FunctionNode) -> Definition:
        """Return the definition of a node: one and the same each time."""
        return self._defined.setdefault(id(node), Definition(path, node))

    def chain(self, cls: Definition) -> Chain:
        """Return a class with all classes that it inherits from."""
        if cls not in self._chains:
            self._chains[cls] = Chain((cls,), complete=False)  # For classes in a circle.
            self._chains[cls] = self._linearize(cls)
        return self._chains[cls]

    def constructor(self, cls: Definition) -> Signature | None:
        """Return the arguments that make an instance of a class."""
        chain = self.chain(cls)
        for each in chain.classes:
            for name in ("__init__", "__new__"):
                member = chain.of(each).get(name)
                if member is not None and isinstance(member.node, FunctionNode):
                    return (
                        signature_of(member.node, bound=True)
                        if is_transparent(member.node)
                        else None
                    )
            if decorators(each.node) & _DATACLASS or _external(each) & {"NamedTuple", "Struct"}:
                return _fields(chain, each)
            if decorators(each.node) or any(k.arg == "metaclass" for k in _keywords(each)):
                return None
        return Signature() if chain.complete else None

    def _meaning(self, path: str, statement: ast.stmt, name: str, depth: int) -> Meaning | None:
        if isinstance(statement, ast.ClassDef | FunctionNode):
            return self.define(path, statement)
        return self.imported(path, statement, name, depth)

    def imported(self, path: str, statement: ast.stmt, name: str, depth: int = 0) -> Meaning | None:
        """Return what an import, or an assignment of a dotted name, binds a name to."""
        if isinstance(statement, ast.ImportFrom):
            module = absolute(statement, package_of(path))
            for alias in statement.names:
                if (alias.asname or alias.name) == name and is_ours(module):
                    return self.find(module, alias.name, depth + 1)
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                if alias.asname == name and is_ours(alias.name):
                    return Module(alias.name)
                if alias.asname is None and alias.name.partition(".")[0] == name and is_ours(name):
                    return Module(name)
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name):
            return self.at(path, statement.value.id, depth + 1)
        return None

    def _linearize(self, cls: Definition) -> Chain:
        """Order a class and its bases as Python does, as far as they are known."""
        assert isinstance(cls.node, ast.ClassDef)
        parents: list[Chain] = []
        complete = True
        for base in cls.node.bases:
            plain = base.value if isinstance(base, ast.Subscript) else base
            meaning = self.of(cls.path, plain)
            if isinstance(meaning, Definition) and isinstance(meaning.node, ast.ClassDef):
                parents.append(self.chain(meaning))
            elif last_name(plain) not in _PLAIN:
                complete = False
        complete = complete and all(parent.complete for parent in parents)
        lists = [list(parent.classes) for parent in parents]
        lists.append([parent.classes[0] for parent in parents])
        order = [cls]
        while lists := [each for each in lists if each]:
            head = next(
                (first for first, *_ in lists if not any(first in rest[1:] for rest in lists)),
                lists[0][0],
            )
            order.append(head)
            lists = [[each for each in rest if each is not head] for rest in lists]
        return Chain(tuple(order), complete)


@dataclass(frozen=True, eq=False)
class Chain:
    """A class and those that it inherits from, in the order of lookup.

    Attributes:
        classes: The class first.
        complete: Whether all are known that could have attributes.
    """

    classes: tuple[Definition, ...]
    complete: bool

    @cached_property
    def _members(self) -> Mapping[Definition, Mapping[str, Member]]:
        return {each: dict(_members(each)) for each in self.classes}

    def of(self, cls: Definition) -> Mapping[str, Member]:
        """Return what one class of the chain has by itself."""
        return self._members[cls]

    def member(self, name: str, *, after: Definition | None = None) -> Member | None:
        """Look a name up.

        Args:
            name: What is looked for.
            after: Look only in the classes behind this one, as `super()` does.
        """
        classes = self.classes
        if after is not None:
            classes = classes[classes.index(after) + 1 :]
        return next((m for each in classes if (m := self.of(each).get(name)) is not None), None)

    @property
    def closed(self) -> bool:
        """Whether a name that is not found does not exist."""
        return self.complete and not any("__getattr__" in self.of(each) for each in self.classes)


def _members(cls: Definition) -> Iterator[tuple[str, Member]]:
    """Yield the members of one class; what the body binds comes last and so wins."""
    assert isinstance(cls.node, ast.ClassDef)
    body = list(top_level(cls.node.body))
    for method in body:
        if not isinstance(method, FunctionNode) or not method.args.args:
            continue
        receiver = method.args.args[0].arg
        # Annotated bindings come last: they tell more.
        for kind in (ast.Assign, ast.AugAssign, ast.For, ast.With, ast.AnnAssign):
            for statement in ast.walk(method):
                if isinstance(statement, kind):
                    for name in _bound_on(statement, receiver):
                        yield name, Member(cls, statement, method)
    for statement in body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id, Member(cls, statement)
        for name in bound(statement):
            yield name, Member(cls, statement)


def _bound_on(statement: ast.stmt, receiver: str) -> Iterator[str]:
    for part in ast.iter_child_nodes(statement):
        if isinstance(part, ast.stmt):
            continue
        for node in ast.walk(part):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
                and node.value.id == receiver
            ):
                yield node.attr


def _keywords(cls: Definition) -> list[ast.keyword]:
    assert isinstance(cls.node, ast.ClassDef)
    return cls.node.keywords


def _external(cls: Definition) -> set[str]:
    assert isinstance(cls.node, ast.ClassDef)
    return {last_name(base) for base in cls.node.bases}


def _says(keywords: list[ast.keyword], name: str) -> bool:
    return any(
        k.arg == name and isinstance(k.value, ast.Constant) and k.value.value is True
        for k in keywords
    )


def _fields(chain: Chain, cls: Definition) -> Signature | None:
    """Return the constructor that annotated names make, as of a dataclass."""
    positional: dict[str, bool] = {}
    keywords: dict[str, bool] = {}
    known = _external(cls) | {"Struct", "NamedTuple"}
    for each in reversed(chain.classes[chain.classes.index(cls) :]):
        assert isinstance(each.node, ast.ClassDef)
        makers = [d for d in each.node.decorator_list if last_name(d) in _DATACLASS]
        if not makers and not _external(each) & known:
            continue
        options = [k for d in makers if isinstance(d, ast.Call) for k in d.keywords]
        options += each.node.keywords
        by_name = _says(options, "kw_only")
        for statement in each.node.body:
            if not (
                isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
            ):
                continue
            kind = last_name(statement.annotation)
            if kind == "KW_ONLY":
                by_name = True
                continue
            default = statement.value
            call = default.keywords if isinstance(default, ast.Call) else []
            is_field = isinstance(default, ast.Call) and last_name(default) in {"field", "Field"}
            if kind == "ClassVar" or (is_field and _denies(call, "init")):
                continue
            name = statement.target.id
            required = default is None or (
                is_field
                and isinstance(default, ast.Call)
                and not default.args
                and not {k.arg for k in call} & {"default", "default_factory"}
            )
            positional.pop(name, None) if by_name else keywords.pop(name, None)
            (keywords if by_name or _says(call, "kw_only") else positional)[name] = required
    return Signature(tuple(Parameter(n, r) for n, r in positional.items()), keywords)


def _denies(keywords: list[ast.keyword], name: str) -> bool:
    return any(
        k.arg == name and isinstance(k.value, ast.Constant) and k.value.value is False
        for k in keywords
    )

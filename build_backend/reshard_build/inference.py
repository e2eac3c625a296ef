# SPDX-License-Identifier: Apache-2.0
"""Tells of an expression which class of vLLM its value is of, from annotations and constructors.

Far less than a type checker does, and cautious: a name that is bound twice, a union, or a value
that `isinstance` is asked about is unknown, and nothing is claimed about it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .definitions import Definition, Definitions, Member, Module
from .signatures import FunctionNode, decorators, is_property, last_name

_SEQUENCES = frozenset(
    {
        *("list", "set", "frozenset", "tuple", "deque", "Sequence", "Collection", "Iterable"),
        *("Iterator", "AbstractSet", "Set", "List", "Generator"),
    }
)
_MAPPINGS = frozenset({"dict", "Mapping", "MutableMapping", "defaultdict", "OrderedDict", "Dict"})
_WRAPPERS = frozenset({"Annotated", "ClassVar", "Final", "Optional", "Required", "NotRequired"})


@dataclass(frozen=True)
class Instance:
    """An object of a class."""

    cls: Definition


@dataclass(frozen=True)
class Container:
    """A collection.

    Attributes:
        element: What iterating gives.
        value: What a subscript gives.
    """

    element: Value | None
    value: Value | None


Value = Instance | Container | Definition | Module
Names = Mapping[str, "Value | None"]


class Inference:
    """Tells what expressions stand for."""

    def __init__(self, definitions: Definitions) -> None:
        self.definitions = definitions
        #: What was told before; `None` also while it is being found out, for circles.
        self._attributes: dict[tuple[Definition, str], Value | None] = {}
        self._locals: dict[FunctionNode, Names] = {}

    def annotation(self, path: str, expression: ast.expr | None) -> Value | None:
        """Return what an annotation in a file says a value is."""
        if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
            try:
                expression = ast.parse(expression.value, mode="eval").body
            except SyntaxError:
                return None
        if isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.BitOr):
            return self._only(path, [expression.left, expression.right])
        if isinstance(expression, ast.Subscript):
            return self._subscripted(path, expression)
        if isinstance(expression, ast.Name | ast.Attribute):
            meaning = self.definitions.of(path, expression)
            if isinstance(meaning, Definition) and isinstance(meaning.node, ast.ClassDef):
                return Instance(meaning)
        return None

    def evaluate(self, path: str, expression: ast.expr, names: Names) -> Value | None:
        """Return what an expression stands for.

        Args:
            path: File that it stands in.
            expression: The expression.
            names: What local names stand for; `None` for what is not known.
        """
        if isinstance(expression, ast.Name):
            if expression.id in names:
                return names[expression.id]
            return self.definitions.at(path, expression.id)
        if isinstance(expression, ast.Attribute):
            owner = self.evaluate(path, expression.value, names)
            if isinstance(owner, Module):
                return self.definitions.find(owner.name, expression.attr)
            return (
                self.attribute(owner.cls, expression.attr) if isinstance(owner, Instance) else None
            )
        if isinstance(expression, ast.Subscript):
            owner = self.evaluate(path, expression.value, names)
            return owner.value if isinstance(owner, Container) else None
        if isinstance(expression, ast.Call):
            return self._called(path, expression, names)
        return None

    def attribute(self, cls: Definition, name: str) -> Value | None:
        """Return what an attribute of an instance stands for."""
        key = (cls, name)
        if key not in self._attributes:
            self._attributes[key] = None
            member = self.definitions.chain(cls).member(name)
            self._attributes[key] = None if member is None else self._member(member)
        return self._attributes[key]

    def locals_of(
        self, path: str, function: FunctionNode | ast.Lambda, cls: Definition | None, outer: Names
    ) -> Names:
        """Return what the names in a function stand for.

        Args:
            path: File that it stands in.
            function: Its definition.
            cls: The class that it is a method of; `None` for other functions.
            outer: Names of the function around it.
        """
        names = dict(outer)
        spec = function.args
        for parameter in [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]:
            names[parameter.arg] = self.annotation(path, parameter.annotation)
        for rest in (spec.vararg, spec.kwarg):
            if rest is not None:
                names[rest.arg] = None
        receivers = [*spec.posonlyargs, *spec.args][:1]
        if cls is not None and receivers and isinstance(function, FunctionNode):
            kinds = decorators(function)
            if "staticmethod" not in kinds:
                names[receivers[0].arg] = cls if "classmethod" in kinds else Instance(cls)
        own: set[str] = set()
        for name, value in self._bindings(path, function, names):
            names[name] = value if name not in own or names[name] == value else None
            own.add(name)
        return names

    def _only(self, path: str, options: list[ast.expr]) -> Value | None:
        """Return the one option that is not `None` itself."""
        told = [o for o in options if not (isinstance(o, ast.Constant) and o.value is None)]
        return self.annotation(path, told[0]) if len(told) == 1 else None

    def _subscripted(self, path: str, expression: ast.Subscript) -> Value | None:
        kind = last_name(expression.value)
        inner = expression.slice
        parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        if kind in _WRAPPERS:
            return self.annotation(path, parts[0])
        if kind in _MAPPINGS and len(parts) == 2:
            return Container(self.annotation(path, parts[0]), self.annotation(path, parts[1]))
        if kind == "tuple" and not (
            len(parts) == 2 and isinstance(parts[1], ast.Constant) and parts[1].value is Ellipsis
        ):
            return None
        if kind in _SEQUENCES:
            element = self.annotation(path, parts[0])
            return Container(element, element)
        if kind in {"Union"}:
            return self._only(path, parts)
        if kind == "type":
            told = self.annotation(path, parts[0])
            return told.cls if isinstance(told, Instance) else None
        return None

    def _called(self, path: str, call: ast.Call, names: Names) -> Value | None:
        if isinstance(call.func, ast.Attribute):
            owner = self.evaluate(path, call.func.value, names)
            if isinstance(owner, Container):
                if call.func.attr == "values":
                    return Container(owner.value, None)
                return owner.value if call.func.attr in {"get", "pop", "popleft"} else None
            if isinstance(owner, Instance | Definition):
                cls = owner.cls if isinstance(owner, Instance) else owner
                if not isinstance(cls.node, ast.ClassDef):
                    return None
                member = self.definitions.chain(cls).member(call.func.attr)
                if member is not None and isinstance(member.node, FunctionNode):
                    return self._returned(member.owner.path, member.node)
                return None
        target = self.evaluate(path, call.func, names)
        if isinstance(target, Definition):
            if isinstance(target.node, ast.ClassDef):
                return Instance(target)
            return self._returned(target.path, target.node)
        return None

    def _returned(self, path: str, node: FunctionNode) -> Value | None:
        if isinstance(node, ast.AsyncFunctionDef) or decorators(node) & {"contextmanager"}:
            return None
        return self.annotation(path, node.returns)

    def _member(self, member: Member) -> Value | None:
        path, node = member.owner.path, member.node
        if isinstance(node, ast.AnnAssign):
            return self.annotation(path, node.annotation)
        if isinstance(node, FunctionNode) and is_property(node):
            return self.annotation(path, node.returns)
        if isinstance(node, ast.Assign) and member.method is not None and len(node.targets) == 1:
            if not isinstance(node.targets[0], ast.Attribute):
                return None
            if member.method not in self._locals:
                self._locals[member.method] = {}
                self._locals[member.method] = self.locals_of(path, member.method, member.owner, {})
            return self.evaluate(path, node.value, self._locals[member.method])
        return None

    def _bindings(
        self, path: str, function: FunctionNode | ast.Lambda, names: Names
    ) -> Iterator[tuple[str, Value | None]]:
        """Yield what a function binds; `names` grows meanwhile, so that later ones see earlier."""
        body = function.body if isinstance(function.body, list) else [function.body]
        for node in _own_nodes(body):
            if isinstance(node, FunctionNode | ast.ClassDef):
                yield node.name, None
            elif isinstance(node, ast.Assign):
                told = self.evaluate(path, node.value, names)
                for target in node.targets:
                    yield from _bind(target, told)
            elif isinstance(node, ast.AnnAssign):
                yield from _bind(node.target, self.annotation(path, node.annotation))
            elif isinstance(node, ast.NamedExpr):
                yield from _bind(node.target, self.evaluate(path, node.value, names))
            elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
                yield from self._iterated(path, node, names)
            elif isinstance(node, ast.ImportFrom | ast.Import):
                for alias in node.names:
                    name = alias.asname or alias.name.partition(".")[0]
                    yield name, self.definitions.imported(path, node, name)
            elif isinstance(node, ast.withitem) and node.optional_vars is not None:
                yield from _bind(node.optional_vars, None)
            elif isinstance(node, ast.ExceptHandler) and node.name:
                yield node.name, None

    def _iterated(
        self, path: str, node: ast.For | ast.AsyncFor | ast.comprehension, names: Names
    ) -> Iterator[tuple[str, Value | None]]:
        source, target = node.iter, node.target
        if isinstance(source, ast.Call) and isinstance(target, ast.Tuple):
            kind = last_name(source.func)
            if kind in {"zip", "enumerate"}:
                counted: list[ast.expr | None] = [None] if kind == "enumerate" else []
                for each, place in zip([*counted, *source.args], target.elts, strict=False):
                    told = None if each is None else self.evaluate(path, each, names)
                    yield from _bind(place, told.element if isinstance(told, Container) else None)
                return
        if isinstance(source, ast.Call) and isinstance(source.func, ast.Attribute):
            owner = self.evaluate(path, source.func.value, names)
            if (
                source.func.attr == "items"
                and isinstance(owner, Container)
                and isinstance(target, ast.Tuple)
                and len(target.elts) == 2
            ):
                yield from _bind(target.elts[0], owner.element)
                yield from _bind(target.elts[1], owner.value)
                return
        told = self.evaluate(path, source, names)
        yield from _bind(target, told.element if isinstance(told, Container) else None)


def _own_nodes(body: list[ast.stmt] | list[ast.expr]) -> Iterator[ast.AST]:
    """Yield the nodes of a function in the order of the source, without functions inside of it."""
    for node in body:
        yield node
        if not isinstance(node, FunctionNode | ast.ClassDef | ast.Lambda):
            yield from _own_nodes(list(ast.iter_child_nodes(node)))  # type: ignore[arg-type]


def _bind(target: ast.expr, value: Value | None) -> Iterator[tuple[str, Value | None]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    else:
        for node in ast.walk(target):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id, None

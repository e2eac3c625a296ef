# SPDX-License-Identifier: Apache-2.0
"""What the connector's code puts into text, and whether that may be text itself.

Read off the syntax: every value of an f-string, and every argument of a line of the log, is traced
to the annotations that say what it is. What is a number, or an object of ours that has no text,
cannot begin another line. Text can, wherever it is from; so can what nothing is known of.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

QUOTING = {"quote", "one_line", "repr", "ascii"}
"""Calls that make text fit for one line."""

_NUMBERS = {"len", "sum", "round", "int", "float", "hash", "id", "ord", "bool", "perf_counter"}
_PASSING = set(
    "join sorted max min str list tuple set next fromkeys chain pairwise zip enumerate reversed "  # noqa: SIM905
    "range divmod type product uuid4 getpid".split()
)
"""Calls whose results hold what their arguments do."""

_TAKING = set("keys values get pop popleft result removesuffix strip split".split())  # noqa: SIM905
"""Methods whose results hold what their object does."""

_PLAIN = set(
    "int float bool None bytes tuple list dict set frozenset Sequence Iterable Iterator Mapping "  # noqa: SIM905
    "Collection deque Counter range array NDArray np npt int32 int64 integer Final ClassVar".split()
)
"""Numbers, and what they are kept in; what else a type is made of is looked up."""

_NAMES_OF_CODE = {"__name__", "__module__", "__qualname__", "lineno", "nbytes"}

_NUMERIC_SPEC = re.compile(r"[-+ #0-9.,_]*[bcdeEfFgGnoxX%]")
_PLACEHOLDER = re.compile(r"%(?:%|[-#0 +]*[\d*]*(?:\.[\d*]+)?([a-zA-Z]))")
_LOG_CALLS = {"debug", "info", "warning", "error", "exception", "critical", "log"}


class Formatted(NamedTuple):
    """A value that becomes text.

    Attributes:
        where: Its file and line.
        source: The expression.
    """

    where: str
    source: str


class Package:
    """All modules of a package.

    Args:
        root: Its folder.
    """

    def __init__(self, root: Path) -> None:
        self._modules = {
            path.relative_to(root): ast.parse(path.read_text())
            for path in sorted(root.rglob("*.py"))
        }
        # Annotations of whatever has a name: fields, parameters, results, aliases.
        self._types: dict[str, list[ast.expr]] = defaultdict(list)
        self._classes: dict[str, ast.ClassDef] = {}
        self._plain: dict[str, bool] = {}
        self._busy: set[str] = set()
        self._values: dict[str, list[tuple[ast.AST, ast.expr]]] = defaultdict(list)
        for module in self._modules.values():
            self._note(module, module)

    def unquoted(self, is_of_interest: Callable[[Path, ast.Module], bool]) -> list[Formatted]:
        """All values that may be text, and are formatted as they are.

        Args:
            is_of_interest: Which modules to look into.
        """
        found = []
        for name, module in self._modules.items():
            if not is_of_interest(name, module):
                continue
            for scope, value in _formatted(module):
                if not self._is_plain(value, scope, frozenset()):
                    found.append(Formatted(f"{name}:{value.lineno}", ast.unparse(value)))
        return found

    def _note(self, node: ast.AST, scope: ast.AST) -> None:
        """Take note of all that has a name but variables."""
        match node:
            case ast.ClassDef():
                self._classes[node.name] = node
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                if node.returns is not None and not isinstance(scope, ast.FunctionDef):
                    self._types[node.name].append(node.returns)
                scope = node
            case ast.AnnAssign(target=ast.Attribute(attr=name), annotation=annotation):
                self._types[name].append(annotation)
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                if ast.unparse(annotation) == "TypeAlias":
                    self._types[name].append(node.value)
                elif isinstance(scope, ast.ClassDef | ast.Module):
                    self._types[name].append(annotation)
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                for target, value in zip(targets, values, strict=True):
                    if isinstance(target, ast.Attribute):
                        self._values[target.attr].append((scope, value))
            case ast.Assign(targets=[ast.Attribute(attr=name)], value=value):
                self._values[name].append((scope, value))
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                if isinstance(scope, ast.ClassDef | ast.Module):
                    self._values[name].append((scope, value))
        if isinstance(node, ast.ClassDef):
            scope = node
        for child in ast.iter_child_nodes(node):
            self._note(child, scope)

    def _is_plain(self, value: ast.expr, scope: ast.AST, seen: frozenset[str]) -> bool:
        """Whether a value can hold no text but what this package itself has written."""
        match value:
            case ast.Constant() | ast.JoinedStr() | ast.Compare():
                return True
            case ast.UnaryOp():
                return True
            case ast.BinOp(op=ast.Add() | ast.Mod() | ast.BitOr()):
                return self._is_plain(value.left, scope, seen) and self._is_plain(
                    value.right, scope, seen
                )
            case ast.BinOp(op=ast.Mult()):
                return self._is_plain(value.left, scope, seen)
            case ast.BinOp():
                return True
            case ast.IfExp():
                return self._is_plain(value.body, scope, seen) and self._is_plain(
                    value.orelse, scope, seen
                )
            case ast.BoolOp(values=values) | ast.Tuple(elts=values) | ast.List(elts=values):
                return all(self._is_plain(each, scope, seen) for each in values)
            case ast.NamedExpr():
                return self._is_plain(value.value, scope, seen)
            case ast.Subscript() | ast.Starred():
                return self._is_plain(value.value, scope, seen)
            case ast.GeneratorExp() | ast.ListComp() | ast.SetComp():
                return self._is_plain(value.elt, scope, seen)
            case ast.Call():
                return self._is_plain_call(value, scope, seen)
            case ast.Attribute(attr="value"):
                return self._is_plain(value.value, scope, seen)
            case ast.Attribute():
                return value.attr in _NAMES_OF_CODE or self._is_plain_name(value.attr)
            case ast.Name():
                return self._is_plain_variable(value.id, scope, seen)
        return False

    def _is_plain_call(self, call: ast.Call, scope: ast.AST, seen: frozenset[str]) -> bool:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        name = call.func.id if isinstance(call.func, ast.Name) else name
        if name in QUOTING | _NUMBERS:
            return True
        if name == "map" and isinstance(call.args[0], ast.Name):
            function = call.args[0].id
            if function in QUOTING | _NUMBERS:
                return True
            return function == "str" and self._is_plain(call.args[1], scope, seen)
        if name in _PASSING:
            return all(self._is_plain(each, scope, seen) for each in call.args)
        if name in _TAKING and isinstance(call.func, ast.Attribute):
            return self._is_plain(call.func.value, scope, seen)
        return self._is_plain_name(name)

    def _is_plain_name(self, name: str) -> bool:
        """Whether all that has a name, anywhere in the package, holds no text."""
        if name in self._classes:
            return self._is_plain_class(name)
        if name in self._busy:
            return True
        self._busy.add(name)
        try:
            types, values = self._types.get(name, []), self._values.get(name, [])
            return (
                bool(types or values)
                and all(map(self._is_plain_type, types))
                and (bool(types) or all(self._is_plain(v, of, frozenset()) for of, v in values))
            )
        finally:
            self._busy.discard(name)

    def _is_plain_type(self, annotation: ast.expr) -> bool:
        match annotation:
            case ast.Constant(value=str(text)):
                return self._is_plain_type(ast.parse(text, mode="eval").body)
            case ast.Constant():
                return True
            case ast.Subscript(value=ast.Name(id="Literal")):
                return True
            case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[first, *_])):
                return self._is_plain_type(first)
            case ast.Subscript():
                return self._is_plain_type(annotation.value) and self._is_plain_type(
                    annotation.slice
                )
            case ast.BinOp():
                return self._is_plain_type(annotation.left) and self._is_plain_type(
                    annotation.right
                )
            case ast.Tuple(elts=elts) | ast.List(elts=elts):
                return all(map(self._is_plain_type, elts))
            case ast.Attribute(attr=name) | ast.Name(id=name):
                if name in _PLAIN:
                    return True
                if name in self._classes:
                    return self._is_plain_class(name)
                return name in self._types and self._is_plain_name(name)
        return False

    def _is_plain_class(self, name: str) -> bool:
        """Whether objects of a class hold no text; what errors of ours say is quoted."""
        if name not in self._plain:
            self._plain[name] = True
            node = self._classes[name]
            bases = [ast.unparse(base).split(".")[-1] for base in node.bases]
            is_ours = name.endswith("Error") and any(
                base == "ValueError" or base in self._classes for base in bases
            )
            is_enum = any(base.endswith("Enum") for base in bases)
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            self._plain[name] = (
                is_ours
                or is_enum
                or (bool(fields) and all(self._is_plain_type(each.annotation) for each in fields))
            )
        return self._plain[name]

    def _is_plain_variable(self, name: str, scope: ast.AST, seen: frozenset[str]) -> bool:
        """Whether whatever a name stands for in a function holds no text."""
        if name in seen:
            return True
        seen |= {name}
        bound: list[bool] = []
        for node in ast.walk(scope):
            match node:
                case ast.arg(arg=found, annotation=annotation) if found == name:
                    bound.append(annotation is not None and self._is_plain_type(annotation))
                case ast.ExceptHandler(name=found, type=kind) if found == name:
                    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
                    bound += [each is not None and self._is_plain_type(each) for each in kinds]
                case ast.AnnAssign(target=ast.Name(id=found)) if found == name:
                    bound.append(self._is_plain_type(node.annotation))
                case ast.Assign():
                    bound += self._bind(name, node.targets, node.value, scope, seen)
                case ast.AugAssign(target=ast.Name(id=found)) if found == name:
                    bound.append(self._is_plain(node.value, scope, seen))
                case ast.NamedExpr():
                    bound += self._bind(name, [node.target], node.value, scope, seen)
                case ast.For() | ast.AsyncFor() | ast.comprehension():
                    bound += self._bind(name, [node.target], node.iter, scope, seen)
                case ast.withitem(optional_vars=ast.Name(id=found)) if found == name:
                    bound.append(False)
                case ast.MatchAs(name=found) if found == name:
                    bound.append(False)
        if bound:
            return all(bound)
        return self._is_plain_name(name)

    def _bind(
        self,
        name: str,
        targets: list[ast.expr],
        value: ast.expr,
        scope: ast.AST,
        seen: frozenset[str],
    ) -> Iterator[bool]:
        for target in targets:
            if isinstance(target, ast.Name) and target.id == name:
                yield self._is_plain(value, scope, seen)
            elif isinstance(target, ast.Tuple | ast.List):
                elts = target.elts
                values = value.elts if isinstance(value, ast.Tuple | ast.List) else None
                for place, each in enumerate(elts):
                    if values is not None and len(values) == len(elts):
                        yield from self._bind(name, [each], values[place], scope, seen)
                    elif (
                        place == 0
                        and isinstance(value, ast.Call)
                        and isinstance(value.func, ast.Name)
                        and value.func.id == "enumerate"
                    ):
                        continue
                    else:
                        yield from self._bind(name, [each], value, scope, seen)


def _formatted(module: ast.Module) -> Iterator[tuple[ast.AST, ast.expr]]:
    """Values that become text as they are, each with the function that it stands in."""

    def visit(node: ast.AST, scope: ast.AST) -> Iterator[tuple[ast.AST, ast.expr]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            scope = node
        for value in _values(node):
            yield scope, value
        for child in ast.iter_child_nodes(node):
            yield from visit(child, scope)

    return visit(module, module)


def _values(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.FormattedValue(conversion=conversion) if conversion in (ord("r"), ord("a")):
            return []
        case ast.FormattedValue(value=value, format_spec=spec):
            text = "" if spec is None else ast.unparse(spec)[2:-1]
            return [] if _NUMERIC_SPEC.fullmatch(text) else [value]
        case ast.Call(func=ast.Attribute(attr=attr, value=ast.Name(id="logger"))):
            return _logged(node) if attr in _LOG_CALLS else []
        case ast.Call(func=ast.Name(id="log")):
            return _logged(node)
        case ast.Call(func=ast.Attribute(attr="format", value=of)):
            return [*node.args, *(each.value for each in node.keywords)] if of else []
    return []


def _logged(call: ast.Call) -> list[ast.expr]:
    """The arguments of a line of the log that are put in as they are."""
    head, *arguments = call.args
    if not isinstance(head, ast.Constant):
        return [head, *arguments]
    kinds = [each[1] for each in _PLACEHOLDER.finditer(head.value) if each[1]]
    assert len(kinds) == len(arguments), ast.unparse(call)
    return [each for kind, each in zip(kinds, arguments, strict=True) if kind == "s"]

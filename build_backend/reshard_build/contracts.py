# SPDX-License-Identifier: Apache-2.0
"""Checks that the overlay keeps to what vLLM's classes and functions are, not only to their names.

Of each overlay class that inherits from one of vLLM's: all abstract methods are implemented, an
override takes what callers of the overridden method may give, and what is read of `self` and called
of `super()` exists. Of each call to a class, function or method of vLLM's: the arguments fit. Of
each value that is known to be of a class of vLLM's: the attributes that are read exist. Of files
that patches touch: their calls to the overlay fit it.

All is read from syntax trees; nothing is imported. What the source does not tell is not checked.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from .definitions import Chain, Definition, Definitions, Member
from .errors import ContractError
from .inference import Inference, Instance, Names, Value
from .signatures import (
    FunctionNode,
    Signature,
    decorators,
    is_property,
    is_transparent,
    last_name,
    misfit,
    narrower,
    signature_of,
)
from .universe import Universe, absolute, package_of

_OF_ANY_OBJECT = frozenset(dir(object))
# Whoever asks one of these about a value knows more of it than its annotation tells.
_NARROWING = frozenset({"isinstance", "issubclass", "hasattr", "getattr", "type"})


@dataclass(frozen=True)
class Breach:
    """Something that does not hold.

    Attributes:
        path: File of the overlay, or one that a patch touches.
        line: Line number, from 1.
        text: What does not hold.
    """

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.text}"


def require_contracts(
    universe: Universe, overlay: Collection[str], patched: Iterable[str], where: str
) -> int:
    """Check all contracts between the overlay and a base.

    Args:
        universe: Patched base and overlay.
        overlay: Paths of the overlay's files.
        patched: Paths of the files that patches touch.
        where: Which base it is, for the message.

    Returns:
        How many uses of vLLM's classes and functions were checked.

    Raises:
        ContractError: Some do not hold; names each with its file and line.
    """
    contracts = Contracts(universe, overlay)
    breaches = [breach for path in overlay if path.endswith(".py") for breach in contracts.of(path)]
    for path in patched:
        if path.endswith(".py") and path in universe.paths:
            breaches += contracts.calls_to_the_overlay(path)
    if breaches:
        raise ContractError(
            f"{where} breaks contracts of the overlay: {'; '.join(map(str, breaches))}",
            "follow upstream, in compat.py where bases differ",
        )
    return contracts.checked


class Contracts:
    """Finds what does not hold in one product.

    Args:
        universe: Patched base and overlay.
        overlay: Paths of the overlay's files.
    """

    def __init__(self, universe: Universe, overlay: Collection[str]) -> None:
        self._universe = universe
        self._overlay = frozenset(overlay)
        self._definitions = Definitions(universe)
        self._inference = Inference(self._definitions)
        #: How many uses were checked so far.
        self.checked = 0

    def of(self, path: str) -> list[Breach]:
        """Return what does not hold in a file of the overlay, in the order of lines."""
        return self._found(_Walk(path, self._inference, lambda d: d.path not in self._overlay))

    def calls_to_the_overlay(self, path: str) -> list[Breach]:
        """Return what does not hold of the calls to the overlay in a file of upstream."""
        walk = _Walk(path, self._inference, lambda d: d.path in self._overlay)
        tree = self._universe.tree(path)
        names = self._names_of_the_overlay(path, tree)
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        found = [breach for call in calls for breach in walk.call(call, names, None)]
        self.checked += walk.checked
        return found

    def _names_of_the_overlay(self, path: str, tree: ast.Module) -> Names:
        """Return what a file imports from the overlay, wherever it does so; it hides all else."""
        names: dict[str, Value | None] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = (
                    absolute(node, package_of(path)) if isinstance(node, ast.ImportFrom) else ""
                )
                for alias in node.names:
                    name = alias.asname or alias.name.partition(".")[0]
                    sources = map(self._universe.source, (module or alias.name, f"{module}.{name}"))
                    if self._overlay.isdisjoint(s for s in sources if s):
                        names.setdefault(name)
                    else:
                        names[name] = self._definitions.imported(path, node, name)
            elif isinstance(node, ast.Name):
                names.setdefault(node.id)
        return names

    def _found(self, walk: _Walk) -> list[Breach]:
        found = {*walk.statement(self._universe.tree(walk.path), {}, None)}
        self.checked += walk.checked
        return sorted(found, key=lambda breach: (breach.line, breach.text))


class _Walk:
    """Goes through one file.

    Args:
        path: The file.
        inference: Tells what expressions stand for.
        theirs: Whether a definition belongs to the other side of the contract.
    """

    def __init__(
        self, path: str, inference: Inference, theirs: Callable[[Definition], bool]
    ) -> None:
        self.path = path
        self.checked = 0
        self._inference = inference
        self._definitions = inference.definitions
        self._theirs = theirs
        self._narrowed: frozenset[str] = frozenset()

    def statement(self, node: ast.AST, names: Names, cls: Definition | None) -> Iterator[Breach]:
        """Yield what does not hold in a node.

        Args:
            node: Any part of the file.
            names: What local names stand for.
            cls: The class whose body, or whose method, this is.
        """
        if isinstance(node, ast.ClassDef):
            own = self._definitions.define(self.path, node)
            yield from self._class(own)
            for part in ast.iter_child_nodes(node):
                yield from self.statement(part, names, own)
            return
        if isinstance(node, FunctionNode | ast.Lambda):
            around, self._narrowed = self._narrowed, self._narrowed | _narrowed(node)
            inner = self._inference.locals_of(self.path, node, self._receiver(node, cls), names)
            for part in ast.iter_child_nodes(node):
                yield from self.statement(part, inner, cls)
            self._narrowed = around
            return
        if isinstance(node, ast.Call):
            yield from self.call(node, names, cls)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield from self._read(node, names, cls)
        for part in ast.iter_child_nodes(node):
            yield from self.statement(part, names, cls)

    def _receiver(
        self, node: FunctionNode | ast.Lambda, cls: Definition | None
    ) -> Definition | None:
        """Return the class whose instance is a function's first argument."""
        direct = cls is not None and isinstance(cls.node, ast.ClassDef) and node in cls.node.body
        return cls if direct else None

    def _breach(self, node: ast.expr | ast.stmt, text: str) -> Breach:
        return Breach(self.path, node.lineno, text)

    # Calls

    def call(self, call: ast.Call, names: Names, cls: Definition | None) -> Iterator[Breach]:
        """Yield what does not hold in a call."""
        target = self._target(call.func, names, cls)
        if target is None:
            return
        name, signature = target
        self.checked += 1
        if problem := misfit(signature, call):
            yield self._breach(call, f"calls {name} but {problem}")

    def _target(
        self, func: ast.expr, names: Names, cls: Definition | None
    ) -> tuple[str, Signature] | None:
        """Return name and signature of what a call goes to, if it is theirs and known."""
        if isinstance(func, ast.Attribute):
            if chain := self._super_chain(func.value, cls):
                return self._method(chain.member(func.attr, after=cls), instance=True)
            owner = self._value(func.value, names)
            if isinstance(owner, Instance):
                chain = self._definitions.chain(owner.cls)
                return self._method(chain.member(func.attr), instance=True)
            if isinstance(owner, Definition):
                if not isinstance(owner.node, ast.ClassDef):
                    return None
                chain = self._definitions.chain(owner)
                return self._method(chain.member(func.attr), instance=False)
        meaning = self._inference.evaluate(self.path, func, names)
        if not isinstance(meaning, Definition) or not self._theirs(meaning):
            return None
        if isinstance(meaning.node, ast.ClassDef):
            made = self._definitions.constructor(meaning)
            return None if made is None else (meaning.name, made)
        if not is_transparent(meaning.node):
            return None
        return meaning.name, signature_of(meaning.node, bound=False)

    def _method(self, member: Member | None, *, instance: bool) -> tuple[str, Signature] | None:
        if member is None or not self._theirs(member.owner):
            return None
        node = member.node
        if not isinstance(node, FunctionNode) or not is_transparent(node):
            return None
        kinds = decorators(node)
        bound = "staticmethod" not in kinds and (instance or "classmethod" in kinds)
        return f"{member.owner.name}.{node.name}", signature_of(node, bound=bound)

    # Attributes

    def _read(self, node: ast.Attribute, names: Names, cls: Definition | None) -> Iterator[Breach]:
        if node.attr in _OF_ANY_OBJECT or node.attr.startswith("__"):
            return
        if chain := self._super_chain(node.value, cls):
            self.checked += 1
            if chain.closed and chain.member(node.attr, after=cls) is None:
                yield self._breach(node, f"asks super() for {node.attr}, which no base class has")
            return
        owner = self._value(node.value, names)
        if isinstance(owner, Instance):
            known = owner.cls
        elif isinstance(owner, Definition) and isinstance(owner.node, ast.ClassDef):
            known = owner
        else:
            return
        chain = self._definitions.chain(known)
        if not any(map(self._theirs, chain.classes)):
            return
        complete = chain.closed or (known is owner and _is_enum(chain) and node.attr.isupper())
        if not complete:
            return
        self.checked += 1
        if chain.member(node.attr) is None:
            yield self._breach(node, f"reads {node.attr} of {known.name}, which has none")

    def _super_chain(self, node: ast.expr, cls: Definition | None) -> Chain | None:
        """Return the chain behind `super()`; `None` for anything else, and where it is all ours."""
        if cls is None or not isinstance(node, ast.Call) or node.args:
            return None
        if not isinstance(node.func, ast.Name) or node.func.id != "super":
            return None
        chain = self._definitions.chain(cls)
        return chain if any(map(self._theirs, chain.classes)) else None

    def _value(self, expression: ast.expr, names: Names) -> Value | None:
        if ast.unparse(expression) in self._narrowed:
            return None
        return self._inference.evaluate(self.path, expression, names)

    # Classes

    def _class(self, cls: Definition) -> Iterator[Breach]:
        chain = self._definitions.chain(cls)
        if self._theirs(cls) or not any(map(self._theirs, chain.classes)):
            return
        own = chain.of(cls)
        if not any(_is_abstract(member) for member in own.values()):
            yield from self._unimplemented(cls, chain)
        for name, member in own.items():
            inherited = chain.member(name, after=cls)
            if inherited is None or not self._theirs(inherited.owner) or name.startswith("__"):
                continue
            if isinstance(member.node, FunctionNode) and isinstance(inherited.node, FunctionNode):
                self.checked += 1
                if problem := _unlike(member.node, inherited.node):
                    text = (
                        f"{cls.name}.{name} overrides {inherited.owner.name}.{name} but {problem}"
                    )
                    yield self._breach(member.node, text)

    def _unimplemented(self, cls: Definition, chain: Chain) -> Iterator[Breach]:
        names = {name for each in chain.classes for name in chain.of(each)}
        for name in sorted(names):
            member = chain.member(name)
            if member is not None and _is_abstract(member) and self._theirs(member.owner):
                text = f"{cls.name} lacks {name}, which is abstract in {member.owner.name}"
                yield self._breach(cls.node, text)


def _is_abstract(member: Member) -> bool:
    return isinstance(member.node, FunctionNode) and bool(
        decorators(member.node) & {"abstractmethod", "abstractproperty"}
    )


def _is_enum(chain: Chain) -> bool:
    return any(
        "Enum" in last_name(base)
        for each in chain.classes
        if isinstance(each.node, ast.ClassDef)
        for base in each.node.bases
    )


def _unlike(ours: FunctionNode, theirs: FunctionNode) -> str:
    """Say in words how an override differs for those who call the method."""
    if is_property(ours) != is_property(theirs):
        return "is a property" if is_property(ours) else "is no property"
    if is_property(ours):
        return ""
    if isinstance(ours, ast.AsyncFunctionDef) != isinstance(theirs, ast.AsyncFunctionDef):
        return "only one of them is a coroutine"
    for kind in ("classmethod", "staticmethod"):
        if (kind in decorators(ours)) != (kind in decorators(theirs)):
            return f"only one of them is a {kind}"
    if not (is_transparent(ours) and is_transparent(theirs)):
        return ""
    bound = "staticmethod" not in decorators(ours)
    return narrower(signature_of(ours, bound=bound), signature_of(theirs, bound=bound))


def _narrowed(node: ast.AST) -> frozenset[str]:
    """Return the expressions in a function that it asks about at run time."""
    return frozenset(
        ast.unparse(call.args[0])
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and last_name(call.func) in _NARROWING and call.args
    )

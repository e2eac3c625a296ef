# SPDX-License-Identifier: Apache-2.0
"""Which arguments a function takes: read from its definition, compared with calls and overrides."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field

# Decorators that leave the arguments as they are.
_TRANSPARENT = frozenset(
    {
        *("abstractmethod", "asynccontextmanager", "cache", "classmethod", "contextmanager"),
        *("deprecated", "final", "inference_mode", "lru_cache", "no_grad", "override"),
        *("staticmethod", "torch_compile"),
    }
)
_PROPERTIES = frozenset({"property", "cached_property", "abstractproperty", "setter"})

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Parameter:
    """A parameter that can be given by position.

    Attributes:
        name: Its name; empty where it cannot be given by name.
        required: Whether it has no default.
    """

    name: str
    required: bool


@dataclass(frozen=True)
class Signature:
    """The arguments of a function, without `self` or `cls`.

    Attributes:
        positional: Those that can be given by position, in order.
        keywords: Those that can be given by name alone, and whether they are required.
        more_positional: Whether it takes any number of them.
        more_keywords: Whether it takes any keyword.
    """

    positional: tuple[Parameter, ...] = ()
    keywords: Mapping[str, bool] = field(default_factory=dict)
    more_positional: bool = False
    more_keywords: bool = False

    @property
    def names(self) -> set[str]:
        """All names that can be given."""
        return {p.name for p in self.positional if p.name} | set(self.keywords)


def decorators(node: FunctionNode | ast.ClassDef) -> set[str]:
    """Return the last part of the name of each decorator."""
    return {name for d in node.decorator_list if (name := last_name(d))}


def last_name(expression: ast.expr) -> str:
    """Return `c` of `a.b.c`, of `a.b.c(...)` and of `a.b.c[...]`; nothing for anything else."""
    if isinstance(expression, ast.Call):
        return last_name(expression.func)
    if isinstance(expression, ast.Subscript):
        return last_name(expression.value)
    if isinstance(expression, ast.Attribute):
        return expression.attr
    return expression.id if isinstance(expression, ast.Name) else ""


def is_property(node: FunctionNode) -> bool:
    """Tell whether a method is read as an attribute."""
    return bool(decorators(node) & _PROPERTIES)


def is_transparent(node: FunctionNode) -> bool:
    """Tell whether calls of a function meet the arguments of its definition."""
    return decorators(node) <= _TRANSPARENT


def signature_of(node: FunctionNode, *, bound: bool) -> Signature:
    """Read a signature.

    Args:
        node: The definition.
        bound: Whether the first parameter is given by the call's own receiver.
    """
    spec = node.args
    every = [*spec.posonlyargs, *spec.args]
    first_default = len(every) - len(spec.defaults)
    positional = tuple(
        Parameter("" if at < len(spec.posonlyargs) else each.arg, at < first_default)
        for at, each in enumerate(every)
    )
    return Signature(
        positional=positional[1:] if bound else positional,
        keywords={
            each.arg: default is None
            for each, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)
        },
        more_positional=spec.vararg is not None,
        more_keywords=spec.kwarg is not None,
    )


def misfit(signature: Signature, call: ast.Call) -> str:
    """Say in words why a call does not fit a signature; nothing where it does."""
    spread = any(isinstance(each, ast.Starred) for each in call.args)
    given = [each for each in call.args if not isinstance(each, ast.Starred)]
    if len(given) > len(signature.positional) and not signature.more_positional:
        return f"gives {len(given)} arguments by position, {len(signature.positional)} fit"
    named = {each.arg for each in call.keywords if each.arg is not None}
    if not signature.more_keywords and (unknown := sorted(named - signature.names)):
        return f"gives {unknown[0]}, which does not exist"
    by_position = signature.positional[: len(given)]
    if twice := sorted(named & {p.name for p in by_position}):
        return f"gives {twice[0]} twice"
    if any(each.arg is None for each in call.keywords):
        return ""
    required = {name for name, needed in signature.keywords.items() if needed}
    if not spread:
        required |= {p.name for p in signature.positional[len(given) :] if p.required}
    if lacking := sorted(required - named):
        return f"lacks {', '.join(lacking)}"
    return ""


def narrower(ours: Signature, theirs: Signature) -> str:
    """Say in words what a method's callers may give that its override does not take.

    Args:
        ours: Signature of the override.
        theirs: Signature of the method that it overrides.
    """
    for at, wanted in enumerate(theirs.positional):
        if at >= len(ours.positional):
            if not (ours.more_positional and (ours.more_keywords or not wanted.name)):
                return f"does not take {wanted.name or 'an argument'} at position {at + 1}"
            continue
        mine = ours.positional[at]
        if wanted.name and mine.name != wanted.name:
            return f"takes {mine.name or 'an unnamed one'} at position {at + 1}, not {wanted.name}"
        if mine.required and not wanted.required:
            return f"requires {mine.name}, which has a default upstream"
    for mine in ours.positional[len(theirs.positional) :]:
        if mine.required and mine.name not in theirs.keywords:
            return f"requires {mine.name}, which upstream does not give"
    mine_required = {p.name: p.required for p in ours.positional} | dict(ours.keywords)
    for name, needed in theirs.keywords.items():
        if name not in mine_required:
            if not ours.more_keywords:
                return f"does not take {name}"
        elif mine_required[name] and not needed:
            return f"requires {name}, which has a default upstream"
    for name, needed in ours.keywords.items():
        if needed and name not in theirs.names:
            return f"requires {name}, which upstream does not give"
    if theirs.more_positional and not ours.more_positional:
        return "does not take any number of arguments by position"
    if theirs.more_keywords and not ours.more_keywords:
        return "does not take any keyword"
    return ""

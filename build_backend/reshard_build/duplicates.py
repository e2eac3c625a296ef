# SPDX-License-Identifier: Apache-2.0
"""Finds what a patch defines though the base has it already: a sign that upstream merged it.

Such a patch may still apply: its method then stands beside upstream's, and the later one wins.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

from .errors import DuplicateError

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

# Several functions of one name that belong together.
_FAMILY = frozenset({"overload", "setter", "getter", "deleter", "register"})


def require_no_duplicates(path: str, before: bytes | None, after: bytes) -> None:
    """Refuse a patched file that defines something once more than the base does.

    Args:
        path: Of the file, for the message.
        before: Content in the base; `None` where the base has no such file.
        after: Content with the patches applied.

    Raises:
        DuplicateError: A module or class binds a name twice which the base binds less often, or
            the patched file is not valid Python.
    """
    try:
        old = Counter(dict(_scopes(ast.parse(before or b""))))
        new = dict(_scopes(ast.parse(after)))
    except (SyntaxError, ValueError) as error:
        raise DuplicateError(
            f"{path} is not valid Python once patched: {error}", "mend it"
        ) from None
    doubled = sorted(key for key, count in new.items() if count > max(1, old[key]))
    if doubled:
        listed = ", ".join(".".join(part for part in key if part) for key in doubled)
        raise DuplicateError(
            f"{path} has {listed} twice once patched",
            "drop what upstream has now from the patches, or the patches",
        )


def _scopes(tree: ast.Module) -> Iterator[tuple[tuple[str, str], int]]:
    """Yield (scope, name) with how often the name is bound there, whatever happens."""
    yield from _scope("", tree.body)


def _scope(scope: str, body: list[ast.stmt]) -> Iterator[tuple[tuple[str, str], int]]:
    counts = Counter(name for statement in body for name in _defined(statement))
    for name, count in counts.items():
        yield (scope, name), count
    for statement in body:
        if isinstance(statement, ast.ClassDef):
            inner = f"{scope}.{statement.name}" if scope else statement.name
            yield from _scope(inner, statement.body)


def _defined(statement: ast.stmt) -> Iterator[str]:
    """Yield what a statement defines; a value made from the earlier one is no second definition."""
    if isinstance(statement, FunctionNode):
        if not any(_last_name(each) in _FAMILY for each in statement.decorator_list):
            yield statement.name
    elif isinstance(statement, ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in statement.names if alias.name != "*")
    elif isinstance(statement, ast.Import):
        # `import a.b` and `import a.c` both bind `a`, and are two things.
        yield from (alias.asname or alias.name for alias in statement.names)
    elif isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        read = {node.id for node in ast.walk(statement.value) if isinstance(node, ast.Name)}
        yield from (t.id for t in targets if isinstance(t, ast.Name) and t.id not in read)
    elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        yield statement.target.id


def _last_name(decorator: ast.expr) -> str:
    """Return `c` of `a.b.c` and of `a.b.c(...)`; nothing for anything else."""
    if isinstance(decorator, ast.Call):
        return _last_name(decorator.func)
    if isinstance(decorator, ast.Attribute):
        return decorator.attr
    return decorator.id if isinstance(decorator, ast.Name) else ""

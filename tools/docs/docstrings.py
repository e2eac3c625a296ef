# SPDX-License-Identifier: Apache-2.0
"""Reads what docstrings tell, entry by entry."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from enum import Enum
from itertools import pairwise


def section(docstring: str | None, title: str) -> dict[str, str]:
    """The entries of a section of Google's style, each in one line, by name.

    Raises:
        ValueError: There is no such section.
    """
    text = f"{inspect.cleandoc(docstring or '')}\n"
    found = re.search(rf"^{title}:\n((?:    .*\n|\n(?=    ))+)", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"no section {title}: of the docstring")
    entries = (each.partition(":") for each in re.split(r"^ {4}(?=\S)", found[1], flags=re.M)[1:])
    return {name: " ".join(words.split()) for name, _, words in entries}


def members(enum: type[Enum]) -> dict[str, str]:
    """The string below each member of an enumeration, in one line, by the member's value.

    Raises:
        KeyError: A member has none.
    """
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(enum))).body
    assert isinstance(definition, ast.ClassDef)
    texts = {
        member.targets[0].id: " ".join(below.value.value.split())
        for member, below in pairwise(definition.body)
        if isinstance(member, ast.Assign)
        and isinstance(member.targets[0], ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }
    return {member.value: texts[member.name] for member in enum}

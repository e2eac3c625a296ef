# SPDX-License-Identifier: Apache-2.0
"""Finds the tables of a page that are written, and fills them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]

Tables = Mapping[str, Callable[[], list[str]]]
"""The lines of each table, by the name in its marker."""


def fill(page: str, kind: str, tables: Tables) -> str:
    """The same page with all tables of a kind as they are now.

    Args:
        page: Its text.
        kind: First word of its markers, as in `<!-- KIND: NAME -->` and `<!-- /KIND -->`.
        tables: Those that there are.

    Raises:
        KeyError: A marker has a name that is not known.
        ValueError: A marker has no end.
    """
    block = re.compile(rf"^<!-- {kind}: (.+?) -->\n.*?^<!-- /{kind} -->$", re.M | re.S)
    begins = re.findall(rf"^<!-- {kind}: (.+?) -->$", page, re.M)
    if [found[1] for found in block.finditer(page)] != begins:
        raise ValueError(f"a table of {', '.join(begins)} does not end: add <!-- /{kind} -->")

    def text(found: re.Match[str]) -> str:
        lines = "\n".join(tables[found[1]]())
        return f"<!-- {kind}: {found[1]} -->\n\n{lines}\n\n<!-- /{kind} -->"

    return block.sub(text, page)


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: int | None = None
) -> list[str]:
    """The lines of a table.

    Args:
        head: Its first row.
        rows: The others.
        numbers: First of the columns that are aligned to the right; None for no such column.
    """
    first = len(head) if numbers is None else numbers
    rules = ["---" if column < first else "---:" for column in range(len(head))]
    return [f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in (head, rules, *rows)]


def code(text: str) -> str:
    """A text as code."""
    return f"`{text}`"

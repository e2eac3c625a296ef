# SPDX-License-Identifier: Apache-2.0
"""Finds the tables of a page that are written, and fills them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]

Tables = Mapping[str, Callable[[], list[str]]]
"""The lines of each table, by the name in its marker."""


class MarkerError(Exception):
    """A page has markers between which no table can be written."""


def fill(page: str, kind: str, tables: Tables) -> str:
    """The same page with all tables of a kind as they are now.

    Args:
        page: Its text.
        kind: First word of its markers, as in `<!-- KIND: NAME -->` and `<!-- /KIND -->`.
        tables: Those that there are.

    Raises:
        MarkerError: It is not clear where a table begins or ends, or which one it is.
    """
    block = re.compile(rf"^<!-- {kind}: (.+?) -->\n(.*?)^<!-- /{kind} -->$", re.M | re.S)
    like_a_marker = re.compile(rf"<!--\s*/?\s*{kind}\b.*")

    def text(found: re.Match[str]) -> str:
        name, before = found.groups()
        if name not in tables or like_a_marker.search(before):
            raise MarkerError(
                f"{name} is not one table of {kind}: there are {', '.join(tables)}, each with its "
                f"<!-- /{kind} -->"
            )
        lines = "\n".join(tables[name]())
        return f"<!-- {kind}: {name} -->\n\n{lines}\n\n<!-- /{kind} -->"

    if stray := like_a_marker.search(block.sub("", page)):
        raise MarkerError(
            f"{stray[0]} is neither <!-- {kind}: NAME --> nor <!-- /{kind} --> of a table"
        )
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

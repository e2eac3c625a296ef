# SPDX-License-Identifier: Apache-2.0
"""What the page of troubleshooting quotes is what the connector says.

A message ends with its remedy. The page has those of which more is to be said.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tools.docs.blocks import ROOT
from tools.docs.deadlines import PACKAGE

PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
GAP = "…"


def no_messages(tree: ast.Module) -> Iterator[int]:
    """The strings of a module that nobody is shown, and those that are parts of others."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            yield id(node.value)
        elif isinstance(node, ast.JoinedStr):
            yield from (id(part) for part in ast.walk(node) if part is not node)


def messages(path: Path) -> Iterator[str]:
    """The strings of a module, with a gap for what differs."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = set(no_messages(tree))
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%[a-z.\d]+", GAP, node.value)
        elif isinstance(node, ast.JoinedStr):
            yield "".join(
                part.value if isinstance(part, ast.Constant) else GAP for part in node.values
            )


@cache
def known_messages() -> set[str]:
    """All that the connector can say, but for `kv-plan`."""
    modules = [path for path in PACKAGE.rglob("*.py") if PACKAGE / "cli" not in path.parents]
    return {text for path in (*modules, *(ROOT / "bases").rglob("*.py")) for text in messages(path)}


def patched_lines() -> list[str]:
    """What patches add to upstream's files, with strings that go over several lines joined."""
    added = (
        line[1:].strip()
        for path in sorted((ROOT / "bases").glob("*/*.patch"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("+")
    )
    return re.sub(r'"\nf?"', "", "\n".join(added)).splitlines()


def quotes() -> list[str]:
    """What the page quotes in the first column of its tables."""
    rows = re.findall(r"^\| (`.+?) \| ", PAGE, re.MULTILINE)
    return [quote for row in rows for quote in re.findall(r"`([^`]+)`", row)]


def found_in(quote: str, text: str) -> bool:
    """Whether a message has a quote's words in their order, with nothing but gaps between them."""
    pattern = ".*".join(re.escape(part.strip()) for part in quote.split(GAP))
    return re.search(pattern, text, re.DOTALL) is not None


def test_every_quote_is_a_message():
    """Nobody looks for words that no engine says any more."""
    known = {*known_messages(), *patched_lines()}
    assert len(quotes()) > 30
    stale = [quote for quote in quotes() if not any(found_in(quote, text) for text in known)]
    assert not stale, "\n".join(stale)


def test_quotes_tell_messages_apart():
    """No quote is so short that it would stand for whatever is added."""
    loose = [
        (quote, found)
        for quote in quotes()
        if len(found := [text for text in known_messages() if found_in(quote, text)]) > 3
    ]
    assert not loose

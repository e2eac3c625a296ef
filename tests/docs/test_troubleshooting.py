# SPDX-License-Identifier: Apache-2.0
"""Every message that the connector can give is explained, and none that it cannot give."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/troubleshooting.md"
PACKAGE = ROOT / "vllm/distributed/kv_transfer/kv_connector/v1/reshard"
COMMAND = PACKAGE / "cli"
"""`kv-plan`, which answers to who has just typed: its lines say all there is to say."""
BESIDE_IT = sorted((ROOT / "bases").rglob("*.py"))
SILENT = {"verify.py", "stats.py", "arrangement.py", "releases.py"}
"""Modules whose sentences are no messages: faults of a plan, which the worker's message quotes,
help texts of metrics, words for a plan, for ways to fill a block, and reasons of changes."""

FEWEST_WORDS = 4
"""A string of fewer words is a name, or a part of a message."""
GAP = "…"


def no_messages(tree):
    """The strings of a module that nobody is shown, and those that are parts of others."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            yield id(node.value)
        elif isinstance(node, ast.Assert) and node.msg is not None:
            yield from (id(part) for part in ast.walk(node.msg))
        elif isinstance(node, ast.JoinedStr):
            yield from (id(part) for part in ast.walk(node) if part is not node)


def messages(path):
    """The sentences in a module's strings, with a gap for what differs, by where they stand."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = set(no_messages(tree))
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = re.sub(r"%[a-z.\d]+", GAP, node.value)
        elif isinstance(node, ast.JoinedStr):
            text = "".join(
                part.value if isinstance(part, ast.Constant) else GAP for part in node.values
            )
        else:
            continue
        if len(text.replace(GAP, " ").split()) >= FEWEST_WORDS:
            yield f"{path.name}:{node.lineno}", text


def patched_text():
    """What patches add to upstream's files, with strings that go over several lines joined."""
    lines = (
        line[1:].strip()
        for path in sorted((ROOT / "bases").glob("*/*.patch"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("+")
    )
    return re.sub(r'"\nf?"', "", "\n".join(lines))


def known_messages():
    """All messages, by where they stand."""
    modules = [
        path
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name not in SILENT and COMMAND not in path.parents
    ]
    return {where: text for path in [*modules, *BESIDE_IT] for where, text in messages(path)}


def quotes(heading, column):
    """What the page quotes in a column of all tables with a heading in their first column."""
    inside = False
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        row = line.strip("| ").split(" | ")
        if not line.startswith("| "):
            inside = False
        elif inside:
            yield from re.findall(r"`([^`]+)`", row[column])
        else:
            inside = row[0] == heading


def quoted_messages():
    """The beginnings, ends or middles of messages."""
    return list(quotes("message", 0))


def quoted_remedies():
    """Remedies in full, which messages end with."""
    return set(quotes("differs", 1))


def found_in(quote, text):
    """Whether a message has a quote's words in their order, with nothing but gaps between them."""
    pattern = ".*".join(re.escape(part.strip()) for part in quote.split(GAP))
    return re.search(pattern, text, re.DOTALL) is not None


def test_every_message_is_explained():
    """Whoever adds or rewords a message finds the page that explains it."""
    messages, remedies = quoted_messages(), quoted_remedies()
    forgotten = [
        f"{where}: {text}"
        for where, text in known_messages().items()
        if text not in remedies and not any(found_in(quote, text) for quote in messages)
    ]
    assert not forgotten, "\n".join(forgotten)


def test_every_quote_is_a_message():
    """Nobody looks for words that no engine says any more."""
    known = [*known_messages().values(), *patched_text().splitlines()]
    stale = [
        quote for quote in quoted_messages() if not any(found_in(quote, text) for text in known)
    ]
    stale += quoted_remedies() - set(known)
    assert not stale, "\n".join(stale)


def test_quotes_tell_messages_apart():
    """No quote is so short that it would stand for whatever is added."""
    texts = set(known_messages().values())
    loose = [
        (quote, found)
        for quote in quoted_messages()
        if len(found := [text for text in texts if found_in(quote, text)]) > 3
    ]
    assert not loose

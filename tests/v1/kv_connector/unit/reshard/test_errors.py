# SPDX-License-Identifier: Apache-2.0
"""No name that others have chosen begins a line of the log."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.v1.kv_connector.unit.reshard.formatted import Formatted, Package
from vllm.distributed.kv_transfer.kv_connector.v1 import reshard
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import one_line, quote

ROOT = Path(reshard.__file__).parent

_OF_ONES_OWN = ("protocol.compatibility", "protocol.bounds")
"""What an engine reads its own configuration with."""


def meets_others(path: Path, module: ast.Module) -> bool:
    """Whether a module handles what other processes say: all of floors 3 and 4, and their users.

    What `engine` reads of its own configuration alone is its user's. `plan` and `memory` are given
    numbers, and names of layers, which must be printable to be understood.
    """
    if path.parts[0] in ("protocol", "transport"):
        return True
    imports = [node for node in module.body if isinstance(node, ast.ImportFrom) and node.module]
    return path.parts[0] == "engine" and any(
        {"quote", "one_line"} & {each.name for each in node.names}
        if node.module == "errors"
        else node.module.startswith(("protocol.", "transport.")) and node.module not in _OF_ONES_OWN
        for node in imports
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "unset"),
        ("plain", "plain"),
        ("two\nlines", r"'two\nlines'"),
        ("\x1b[31m", r"'\x1b[31m'"),
        ("x" * 200, "x" * 200),
        ("x" * 300, "x" * 200 + "..."),
        ("x" * 199 + "\n", "'" + "x" * 199 + "..."),
        ("x" * 200 + "\n", "x" * 200 + "..."),
    ],
)
def test_quoted_text_is_one_short_printable_line(text, expected):
    """What a peer wrote can neither break lines of a log nor flood it."""
    assert quote(text) == expected


def test_message_keeps_what_it_says():
    """It is longer than a name, and what was quoted before is not quoted again."""
    message = "x" * 3000 + f" of {quote('a' + chr(10) + 'b')}"
    assert one_line(message) == message
    assert "\n" not in one_line(ValueError(f"first{chr(10)}second"))
    assert len(one_line("x" * 10_000)) < 5000


def test_all_text_is_quoted_where_it_is_formatted():
    """Whatever may be text, in any message, goes through `quote` or `one_line`."""
    assert Package(ROOT).unquoted(meets_others) == []


def test_what_is_not_quoted_is_found(tmp_path):
    """Names, text of libraries, and what nothing is known of; numbers are none."""
    (tmp_path / "protocol").mkdir()
    (tmp_path / "protocol" / "code.py").write_text(CODE)
    found = Package(tmp_path).unquoted(meets_others)
    assert [each.source for each in found] == [
        "name",
        "peer.engine_id",
        "error",
        "made",
        "', '.join(names)",
        "self._host",
        "unknown()",
        "name",
    ]
    assert found[0] == Formatted("protocol/code.py:24", "name")


CODE = """
import logging
from dataclasses import dataclass

logger = logging.getLogger()
WORDS = "always the same"

@dataclass
class Place:
    row: int
    column: int

@dataclass
class Peer:
    engine_id: str
    place: Place
    ports: tuple[int, ...]

class Talk:
    def __init__(self, host: str, count: int):
        self._host, self.count = host, count

    def tell(self, name: str, peer: Peer, count: int, names: list[str]):
        logger.info("%s of %d", name, count)
        text = f"{peer.engine_id}{peer.place}{peer.ports}{count + 1}{WORDS}{name!r}"
        try:
            logger.warning("%s %s", quote(name), ", ".join(map(quote, names)))
        except Exception as error:
            raise ValueError(f"{error}, {one_line(error)}") from error
        made = "a" + name
        first, _ = peer.ports
        return f"{made}{first}{', '.join(names)}{self._host}{self.count}{unknown()}{name:s}"
"""

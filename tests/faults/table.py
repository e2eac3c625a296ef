# SPDX-License-Identifier: Apache-2.0
"""The tables of faults in README.md, which tests hold against what engines do."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).with_name("README.md")
ANYTHING = "…"
"""In the line of a log: something that differs from case to case."""


@dataclass(frozen=True)
class Row:
    """A fault, as the table tells it.

    Attributes:
        client: what the client sees.
        log: the line in an engine's log.
        blocks: what becomes of the prefill engine's blocks.
        tests: where it is tested, as `file::function`.
    """

    client: str
    log: str
    blocks: str
    tests: list[str]

    def tells(self, client: str, line: str, blocks: str) -> bool:
        """Whether the table has what a test saw: of the client, in the log, of blocks."""
        return (client, blocks) == (self.client, self.blocks) and self.matches(line)

    def matches(self, line: str) -> bool:
        """Whether an engine says what the table says."""
        parts = map(re.escape, self.log.split(ANYTHING))
        return re.fullmatch("[^\n]+".join(parts), line) is not None


def read_rows() -> dict[str, Row]:
    """Return the rows of all tables of faults, by their first column."""
    rows: dict[str, Row] = {}
    is_of_faults = False
    for text in PAGE.read_text().splitlines():
        cells = text.strip("| ").split(" | ") if text.startswith("| ") else [""]
        if cells[0] == "fault" or not cells[0]:
            is_of_faults = cells[0] == "fault"
        elif is_of_faults and set(cells[0]) != {"-"}:
            fault, client, log, blocks, tests = cells
            assert fault not in rows, fault
            (line,) = re.findall(r"`([^`]+)`", log)
            rows[fault] = Row(client, line, blocks, re.findall(r"`([\w/.]+::\w+)`", tests))
    return rows

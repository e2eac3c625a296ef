# SPDX-License-Identifier: Apache-2.0
"""Tables of what was measured, from docs/results/.

``python -m tools.pdstack`` has put it there: ``sweep`` with ``--across .venv-0.33.0/bin --results
docs/results/releases.json``, and ``handover`` as docs/performance.md says. What no table is made of
has come there alike: ``roll`` with ``--next .venv-0.33.0/bin --address same --output
docs/results/roll-same.json``, and ``--address other``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tools.pdstack.releases import Row, read

from .blocks import ROOT, Tables, table

_RESULTS = ROOT / "docs/results"
_NOT_RUN = "-"


def release_lines(rows: Sequence[Row]) -> list[str]:
    """A row for each family, and a column for each pair of releases."""
    pairs = sorted({(row.prefill[0], row.decode[0]) for row in rows}, key=_in_order, reverse=True)
    cells = {row.key: _came_to(row) for row in rows}
    head = ["family", "prefill to decode", *(f"{one} to {other}" for one, other in pairs)]
    lines = {
        row.family: [
            row.family,
            f"{_layout(row.prefill[1])} to {_layout(row.decode[1])}",
            *(cells.get((row.family, *pair), _NOT_RUN) for pair in pairs),
        ]
        for row in rows
    }
    return table(head, lines.values(), numbers=2)


def handover_lines(measured: Mapping[str, Any]) -> list[str]:
    """A row for each way of one client's requests."""
    head = ["", "handover", "of serial", "TTFT", "of serial"]
    lines = [
        [
            row["way"],
            _ms(row["handover_s"]),
            f"{row['of_serial']:.2f}",
            _ms(row["ttft_s"]),
            f"{row['ttft_of_serial']:.2f}",
        ]
        for row in measured["rows"]
    ]
    return table(head, lines, numbers=1)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _handover() -> Any:
    """What the measurement of the handover has written."""
    return json.loads((_RESULTS / "handover.json").read_text(encoding="utf-8"))


def _releases() -> list[str]:
    return release_lines(read(_RESULTS / "releases.json"))


TABLES: Tables = {
    "releases": _releases,
    "handover": lambda: handover_lines(_handover()),
}


def _in_order(pair: tuple[str, str]) -> list[list[int]]:
    """By numbers, the newer end first."""
    return [[int(part) for part in release.split(".")] for release in pair]


def _came_to(row: Row) -> str:
    if row.fault:
        return f"no: {row.fault}"
    equal = f"{row.equal} of {row.requests}" + (f", {row.tied} tied" if row.tied else "")
    return equal if row.exact else f"{equal}, {row.agreement:.0%} of tokens"


def _layout(text: str) -> str:
    """tp2pp1 as in the text of pages."""
    return text.upper().replace("PP", " PP")

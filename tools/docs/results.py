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
from dataclasses import dataclass
from typing import Any

from tools.pdstack.releases import Row, read

from .blocks import ROOT, Tables, table

_RESULTS = ROOT / "docs/results"
_NOT_RUN = "-"
_YES_NO = ("no", "yes")
_EARLY, _SEEDED = "early", "early, seeded"
_SPEED, _BLOCKS = "requests_of_serial", "blocks_of_last"


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
    """A row for each number of clients and each way."""
    head = ["clients", "", "requests", "prefill", "handover", "of serial", "TTFT", "of serial"]
    lines = [
        [
            str(row["clients"]),
            row["way"],
            str(row["requests"]),
            _ms(row["prefill_s"]),
            _ms(row["handover_s"]),
            f"{row['of_serial']:.2f}",
            _ms(row["ttft_s"]),
            f"{row['ttft_of_serial']:.2f}",
        ]
        for row in measured["rows"]
    ]
    return table(head, lines, numbers=2)


@dataclass(frozen=True)
class Target:
    """What a row of a measurement ought to be.

    Attributes:
        what: it is.
        wanted: what it may be at most; of requests a second, at least.
        results: where the row stands, by the name of its file.
        clients: of the row.
        way: of the row; it is the first of its kind, so one of ours.
        share: the row's figure.
    """

    what: str
    wanted: float
    results: str
    clients: int
    way: str
    share: str

    @property
    def is_floor(self) -> bool:
        """Whether more is better."""
        return self.share == _SPEED


TARGETS = tuple(
    Target(*each)
    for each in (
        ("handover, early / serial, one client", 0.6, "handover", 1, _EARLY, "of_serial"),
        ("handover, early / serial, four clients", 0.7, "handover", 4, _EARLY, "of_serial"),
        ("handover, seeded / serial, one client", 0.4, "handover", 1, _SEEDED, "of_serial"),
        ("handover, early / serial, slow network", 0.3, "handover-link", 1, _EARLY, "of_serial"),
        ("time to first token, under load", 0.95, "handover-load", 4, _EARLY, "ttft_of_serial"),
        ("requests a second, under load", 0.97, "handover-load", 4, _EARLY, _SPEED),
        ("prefill, under load", 1.05, "handover-load", 4, _EARLY, "prefill_of_serial"),
        ("handover, ours / push, one client", 0.9, "handover-push", 1, _EARLY, "of_last"),
        ("blocks x s, ours / push, five at once", 0.5, "handover-push", 5, _EARLY, _BLOCKS),
    )
)


def target_lines(measured: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A row for each target.

    Args:
        measured: what was, by the names of the files.
    """
    lines = []
    for target in TARGETS:
        alike = (
            row
            for row in measured[target.results]["rows"]
            if (row["clients"], row["way"]) == (target.clients, target.way)
        )
        bound = "at least" if target.is_floor else "at most"
        line = [target.what, f"{bound} {target.wanted}"]
        if (row := next(alike, None)) is None:
            lines.append([*line, "not measured", _NOT_RUN])
            continue
        share = row[target.share]
        is_met = share >= target.wanted if target.is_floor else share <= target.wanted
        lines.append([*line, f"{share:.2f}", _YES_NO[is_met]])
    return table(["what", "wanted", "measured", "met"], lines, numbers=4)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _handover(name: str) -> Any:
    """What one measurement of the handover has written; no rows where it was not made."""
    if not (_RESULTS / f"{name}.json").exists():
        return {"rows": []}
    return json.loads((_RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _releases() -> list[str]:
    return release_lines(read(_RESULTS / "releases.json"))


TABLES: Tables = {
    "releases": _releases,
    "handover": lambda: handover_lines(_handover("handover")),
    "handover targets": lambda: target_lines(
        {each.results: _handover(each.results) for each in TARGETS}
    ),
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

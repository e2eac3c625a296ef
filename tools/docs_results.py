# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/ that are written from stored results: `python -m tools.docs_results` writes them.

A table stands between `<!-- results: NAME -->` and `<!-- /results -->`. What they are written from
lies in docs/results/, where ``python -m tools.pdstack`` has put what it measured: ``sweep`` with
``--across .venv-0.33.0/bin --results docs/results/releases.json``, and ``roll`` with
``--next .venv-0.33.0/bin --address same --output docs/results/roll-same.json``, and ``handover``
with ``--output docs/results/handover.json``, and as docs/performance.md says to ``handover-link``,
``handover-load`` and ``handover-push``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.pdstack.releases import Row, read
from tools.pdstack.roll import Address

ROOT = Path(__file__).parents[1]
PAGES = ("docs/bases.md", "docs/performance.md")

_RESULTS = ROOT / "docs/results"
_BLOCK = re.compile(r"^<!-- results: (.+?) -->\n.*?^<!-- /results -->$", re.MULTILINE | re.DOTALL)
_NOT_RUN = "-"
_YES_NO = ("no", "yes")
_EARLY, _SEEDED = "early", "early, seeded"
_SPEED, _BLOCKS = "requests_of_serial", "blocks_of_last"


def rewrite(page: str) -> str:
    """The same page with its tables as the stored results say.

    Raises:
        KeyError: a table has a name that is not known.
    """

    def table(block: re.Match[str]) -> str:
        lines = "\n".join(_TABLES[block[1]]())
        return f"<!-- results: {block[1]} -->\n\n{lines}\n\n<!-- /results -->"

    return _BLOCK.sub(table, page)


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
    return _table(head, lines.values(), numbers=2)


def roll_lines(rolls: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A row for each phase of each roll.

    Args:
        rolls: what each has written, by where the engines were that followed.
    """
    head = ["next at", "", "requests", "failed", "other answers", "TTFT p50", "TTFT p99"]
    lines = [
        [
            f"the {address} address" if address == Address.SAME else "another address",
            phase["phase"],
            *(f"{phase[count]:,}" for count in ("requests", "failed", "differing")),
            *(f"{phase[time]:.2f} s" for time in ("ttft_p50_s", "ttft_p99_s")),
        ]
        for address, roll in rolls.items()
        for phase in roll["phases"]
    ]
    return _table(head, lines, numbers=2)


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
    return _table(head, lines, numbers=2)


def load_lines(measured: Mapping[str, Any]) -> list[str]:
    """A row for each number of clients and each way, with requests a second."""
    head = ["clients", "", "requests", "prefill", "of serial", "TTFT", "of serial"]
    lines = [
        [
            str(row["clients"]),
            row["way"],
            str(row["requests"]),
            _ms(row["prefill_s"]),
            f"{row['prefill_of_serial']:.2f}",
            _ms(row["ttft_s"]),
            f"{row['ttft_of_serial']:.2f}",
            f"{row['requests_s']:.2f}",
            f"{row['requests_of_serial']:.2f}",
        ]
        for row in measured["rows"]
    ]
    return _table([*head, "requests/s", "of serial"], lines, numbers=2)


def connector_lines(measured: Mapping[str, Any]) -> list[str]:
    """A row for each number of clients, each connector and each way."""
    head = ["clients", "connector", "", "requests", "prefill", "handover", "of push", "TTFT"]
    lines = [
        [
            str(row["clients"]),
            row["connector"],
            row["way"],
            str(row["requests"]),
            _ms(row["prefill_s"]),
            _ms(row["handover_s"]),
            f"{row['of_last']:.2f}",
            _ms(row["ttft_s"]),
            f"{row['block_s']:.1f}",
            f"{row['blocks_of_last']:.2f}",
        ]
        for row in measured["rows"]
    ]
    return _table([*head, "blocks x s", "of push"], lines, numbers=3)


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
    return _table(["what", "wanted", "measured", "met"], lines, numbers=4)


def timeline_lines(measured: Mapping[str, Any]) -> list[str]:
    """A drawing of where the time of one client's requests goes, in milliseconds."""
    lines = ["```mermaid", "gantt", "    dateFormat x", "    axisFormat %Q"]
    for row in measured["rows"]:
        if row["clients"] == 1:
            ends = [round(1e3 * value) for value in (row["prefill_s"], row["ttft_s"])]
            lines += [
                f"    section {row['way']}",
                f"    prefill :0, {ends[0]}",
                f"    handover :{ends[0]}, {ends[1]}",
            ]
    return [*lines, "```"]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _handover(name: str = "handover") -> Any:
    """What one measurement of the handover has written; no rows where it was not made."""
    if not (_RESULTS / f"{name}.json").exists():
        return {"rows": []}
    return json.loads((_RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _releases() -> list[str]:
    return release_lines(read(_RESULTS / "releases.json"))


def _rolls() -> list[str]:
    paths = {str(address): _RESULTS / f"roll-{address}.json" for address in Address}
    return roll_lines(
        {
            address: json.loads(path.read_text(encoding="utf-8"))
            for address, path in paths.items()
            if path.exists()
        }
    )


_TABLES: Mapping[str, Callable[[], list[str]]] = {
    "releases": _releases,
    "rolls": _rolls,
    "handover": lambda: handover_lines(_handover()),
    "handover timeline": lambda: timeline_lines(_handover()),
    "handover over a link": lambda: handover_lines(_handover("handover-link")),
    "handover under load": lambda: load_lines(_handover("handover-load")),
    "handover beside push": lambda: connector_lines(_handover("handover-push")),
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


def _table(head: Sequence[str], lines: Iterable[Sequence[str]], *, numbers: int) -> list[str]:
    """A table, of which all columns from a number on are aligned to the right."""
    rules = ["---" if number < numbers else "---:" for number in range(len(head))]
    return [f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in (head, rules, *lines)]


def main() -> None:
    """Write all tables anew."""
    for name in PAGES:
        path = ROOT / name
        path.write_text(rewrite(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()

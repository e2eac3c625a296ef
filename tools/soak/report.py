# SPDX-License-Identifier: Apache-2.0
"""What came of a soak: a table for people, a value for programs."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from .checker import Violation
from .history import History, Request

NO_FAULT = "none"


@dataclass
class Outcome:
    """What became of requests, and what did not hold, under one kind of fault.

    Attributes:
        times: how often the fault struck.
        answered: requests that were answered in full.
        refused: with another status than 200, or answers that broke off with an error.
        lost: connections that ended without a word.
        left: the client went away.
        gave_up: the client's patience ended.
        violations: what must not be.
    """

    times: int = 0
    answered: int = 0
    refused: int = 0
    lost: int = 0
    left: int = 0
    gave_up: int = 0
    violations: int = 0

    def count(self, request: Request) -> None:
        """Count what became of a request."""
        if request.gave_up:
            self.gave_up += 1
        elif request.left:
            self.left += 1
        elif request.answered:
            self.answered += 1
        elif request.status is None:
            self.lost += 1
        else:
            self.refused += 1


def outcomes(history: History, violations: Iterable[Violation]) -> dict[str, Outcome]:
    """Return what came of each kind of fault, by its name; of rounds without any, too."""
    kinds = {fault.round: fault.kind.value for fault in history.faults}
    found: defaultdict[str, Outcome] = defaultdict(Outcome)
    for fault in history.faults:
        found[fault.kind.value].times += 1
    for request in history.requests:
        found[kinds.get(request.round, NO_FAULT)].count(request)
    for violation in violations:
        found[kinds.get(violation.round, NO_FAULT)].violations += 1
    return dict(found)


def table(found: Mapping[str, Outcome]) -> Table:
    """Return the table of faults, how often they struck, and what came of requests."""
    drawn = Table(box=box.SIMPLE_HEAD)
    drawn.add_column("fault")
    for column in fields(Outcome):
        drawn.add_column(column.name.replace("_", " "), justify="right")
    for name, outcome in found.items():
        style = "bold red" if outcome.violations else None
        drawn.add_row(name, *(str(value) for value in asdict(outcome).values()), style=style)
    return drawn


def work_table(history: History) -> Table:
    """Return the table of what engines went through, all that had the same seat together."""
    drawn = Table(box=box.SIMPLE_HEAD)
    drawn.add_column("engine")
    for column in ("preemptions", "prompts waited for", "KiB prefetched"):
        drawn.add_column(column, justify="right")
    for engine, work in sorted(history.work().items()):
        kib = work.prefetched_bytes / 1024
        drawn.add_row(engine, f"{work.preemptions:.0f}", f"{work.early:.0f}", f"{kib:.0f}")
    return drawn


def repeat_command(seed: int, duration_s: float, arguments: Sequence[str]) -> str:
    """Return the command that repeats a soak.

    Args:
        arguments: of the command line but for these.
    """
    command = f"make soak SEED={seed} SOAK_S={duration_s:g}"
    return f"{command} SOAK_ARGS='{' '.join(arguments)}'" if arguments else command


def write_json(
    path: Path,
    *,
    settings: Mapping[str, Any],
    command: str,
    began_at: float,
    history: History,
    violations: Sequence[Violation],
) -> None:
    """Write all that was seen, and what of it must not be.

    Args:
        settings: of the soak, in terms of JSON.
        command: repeats it.
        began_at: the wall clock when the history began, in seconds since 1970.
    """
    found = {
        "command": command,
        "settings": settings,
        "began_at": began_at,
        "outcomes": {
            name: asdict(outcome) for name, outcome in outcomes(history, violations).items()
        },
        "violations": [asdict(each) for each in violations],
        "history": history.as_json(),
    }
    path.write_text(json.dumps(found, indent=1), encoding="utf-8")

# SPDX-License-Identifier: Apache-2.0
"""The README of the soak tells its engines, its invariants and its bounds."""

from __future__ import annotations

import re
from pathlib import Path

from tools.soak.checker import Bounds, Invariant
from tools.soak.early import MACHINE_MARGIN_S, MISSED_WITHIN_S, TOLD_WITHIN_S
from tools.soak.fleet import POOL_BLOCKS, FleetSettings
from tools.soak.runner import LULL_SLACK_S, SoakSettings
from tools.soak.schedule import FAILED_READ_LIMIT_S, HELD_READ_LIMIT_S, LONGEST_HOLD_S, SEATS

PAGE = (Path(__file__).parents[2] / "tools/soak/README.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """The rows of the table whose first column has a heading."""
    _, _, after = PAGE.partition(f"| {heading} |")
    table = after.split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table]


def test_every_invariant_is_told():
    """In the words of a violation."""
    assert [row[0] for row in rows("invariant")] == [str(each) for each in Invariant]


def test_engines_are_told():
    """Their names, their layouts and their pools."""
    told = [(row[0].strip("`"), row[1], row[2]) for row in rows("engine")]
    assert told == [
        (
            seat.name,
            f"TP{seat.placement.layout.tp_size} PP{seat.placement.layout.pp_size}"
            + (
                f", of {' and '.join(map(str, seat.placement.stage_layers))} layers"
                if seat.placement.stage_layers
                else ""
            ),
            f"{POOL_BLOCKS[seat.role]} blocks",
        )
        for seat in SEATS
    ]


def test_limits_are_told():
    """Its numbers are those that are judged by."""
    bounds, settings, fleet = Bounds(), SoakSettings(seed=0), FleetSettings()
    for words in (
        f"no more than {bounds.rss_bytes >> 20} MiB, {bounds.descriptors} descriptors and "
        f"{bounds.threads} threads",
        f"| {settings.deadline_s:g} s, and as long again",
        f"has {FAILED_READ_LIMIT_S:g} s whatever is stopped",
        f"{HELD_READ_LIMIT_S:g} s where it is computed then",
        f"stopped for {LONGEST_HOLD_S:g} s at most",
        f"{TOLD_WITHIN_S:g} s after P has died that knew of the request",
        f"{MISSED_WITHIN_S:g} s after P is silent",
        f"To that come {MACHINE_MARGIN_S:g} s",
        f"limit of reads and {LULL_SLACK_S:g} s,",
        f"Leases last {fleet.lease_s:g} s, reads {fleet.read_timeout_s:g} s.",
        f"`UCX_TLS={fleet.ucx_tls}`",
    ):
        assert words in re.sub(r"\s+", " ", PAGE), words

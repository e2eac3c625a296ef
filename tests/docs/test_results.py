# SPDX-License-Identifier: Apache-2.0
"""Tables of what was measured: pairs of releases, and targets that are met or not."""

from __future__ import annotations

from tools.docs.results import (
    TARGETS,
    release_lines,
    target_lines,
)
from tools.pdstack.releases import Row

SHARES = {target.share for target in TARGETS}


def row(prefill: str, decode: str, **fields) -> Row:
    """A row of one family."""
    told = {
        "family": "TP down",
        "model": "m",
        "prefill": (prefill, "tp2pp1"),
        "decode": (decode, "tp1pp2"),
        "exact": True,
        "requests": 64,
        "equal": 64,
        "tied": 0,
        "agreement": 1.0,
        "bytes_moved": 1,
        "fault": "",
    }
    return Row(**{**told, **fields})


def test_releases_have_a_column_for_each_pair():
    """The newest first; what was not run has none, and what did not pass says why."""
    assert release_lines(
        [
            row("0.22.1", "0.32.0"),
            row("0.32.0", "0.33.0"),
            row("0.33.0", "0.32.0", fault="3 answers differ"),
            row(*("0.32.0", "0.33.0"), family="bfloat16", exact=False, equal=60, agreement=0.981),
            row("0.22.1", "0.32.0", family="MLA TP down", equal=63, tied=1),
        ]
    ) == [
        "| family | prefill to decode | 0.33.0 to 0.32.0 | 0.32.0 to 0.33.0 | 0.22.1 to 0.32.0 |",
        "| --- | --- | ---: | ---: | ---: |",
        "| TP down | TP2 PP1 to TP1 PP2 | no: 3 answers differ | 64 of 64 | 64 of 64 |",
        "| bfloat16 | TP2 PP1 to TP1 PP2 | - | 60 of 64, 98% of tokens | - |",
        "| MLA TP down | TP2 PP1 to TP1 PP2 | - | - | 63 of 64, 1 tied |",
    ]


def test_targets_are_met_from_the_right_side():
    """Most are bounds from above; throughput may not fall. Ours come first."""
    rows = [
        {"clients": clients, "way": way, **dict.fromkeys(SHARES, share)}
        for share in (0.65, 9.0)
        for clients in (1, 4, 5)
        for way in ("serial", "early", "early, seeded")
    ]
    names = {target.results for target in TARGETS}
    lines = target_lines({name: {"rows": rows} for name in names})[2:]
    assert len(lines) == len(TARGETS)
    assert lines[0] == "| handover, early / serial, one client | at most 0.6 | 0.65 | no |"
    assert lines[1].endswith("| at most 0.7 | 0.65 | yes |")
    (speed,) = [line for line in lines if "at least" in line]
    assert speed.endswith("| at least 0.97 | 0.65 | no |")
    unmeasured = target_lines({name: {"rows": []} for name in names})[2:]
    assert all(line.endswith("| not measured | - |") for line in unmeasured)

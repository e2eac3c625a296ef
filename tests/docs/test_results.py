# SPDX-License-Identifier: Apache-2.0
"""Tables of what was measured: pairs of releases."""

from __future__ import annotations

from tools.docs.results import release_lines
from tools.pdstack.releases import Row


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

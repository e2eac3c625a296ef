# SPDX-License-Identifier: Apache-2.0
"""Tables that are written from stored results say what is stored.

Where it has changed, `python -m tools.docs_results` writes them anew.
"""

from __future__ import annotations

import pytest

from tools.docs_results import (
    PAGES,
    ROOT,
    handover_lines,
    release_lines,
    rewrite,
    roll_lines,
    timeline_lines,
)
from tools.pdstack.releases import Row


@pytest.mark.parametrize("name", PAGES)
def test_tables_are_those_of_the_results(name):
    """A page has each row of them, and has one at all."""
    page = (ROOT / name).read_text(encoding="utf-8")
    assert "<!-- results: " in page
    assert rewrite(page) == page


def test_a_table_of_no_known_name_is_refused():
    """Nothing stays between its markers that nobody has written."""
    with pytest.raises(KeyError):
        rewrite("<!-- results: other -->\nx\n<!-- /results -->")


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


def test_rolls_have_a_row_for_each_phase():
    """With what failed before what took long."""
    phase = {"requests": 1234, "failed": 1, "differing": 2, "ttft_p50_s": 0.123, "ttft_p99_s": 4.0}
    rolls = {address: {"phases": [{**phase, "phase": "before"}]} for address in ("same", "other")}
    assert roll_lines(rolls)[2:] == [
        "| the same address | before | 1,234 | 1 | 2 | 0.12 s | 4.00 s |",
        "| another address | before | 1,234 | 1 | 2 | 0.12 s | 4.00 s |",
    ]


def measured() -> dict:
    """What a measurement of the handover has written, of one client and of four."""
    one = {
        "way": "serial",
        "clients": 1,
        "requests": 24,
        "prefill_s": 0.2,
        "handover_s": 0.05,
        "ttft_s": 0.25,
        "of_serial": 1.0,
        "ttft_of_serial": 1.0,
    }
    return {"rows": [one, {**one, "way": "early", "of_serial": 0.5}, {**one, "clients": 4}]}


def test_handovers_have_a_row_for_each_way():
    """Times in milliseconds, and shares of what serial requests take."""
    assert handover_lines(measured())[2:] == [
        "| 1 | serial | 24 | 200.0 ms | 50.0 ms | 1.00 | 250.0 ms | 1.00 |",
        "| 1 | early | 24 | 200.0 ms | 50.0 ms | 0.50 | 250.0 ms | 1.00 |",
        "| 4 | serial | 24 | 200.0 ms | 50.0 ms | 1.00 | 250.0 ms | 1.00 |",
    ]


def test_timeline_is_that_of_one_client():
    """A bar until the prompt's end, and one from there to the first token."""
    lines = timeline_lines(measured())
    assert (lines[0], lines[-1]) == ("```mermaid", "```")
    assert lines[4:-1] == [
        line
        for way in ("serial", "early")
        for line in (f"    section {way}", "    prefill :0, 200", "    handover :200, 250")
    ]

# SPDX-License-Identifier: Apache-2.0
"""Tables that are written from stored results say what is stored.

Where it has changed, `python -m tools.docs_results` writes them anew.
"""

from __future__ import annotations

import pytest

from tools.docs_results import (
    PAGES,
    ROOT,
    TARGETS,
    connector_lines,
    handover_lines,
    load_lines,
    release_lines,
    rewrite,
    roll_lines,
    target_lines,
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


def loaded(**fields) -> dict:
    """A row with all that one has."""
    return {
        **measured()["rows"][0],
        "connector": "ours",
        "requests_s": 1.234,
        "block_s": 12.34,
        "prefill_of_serial": 1.1,
        "requests_of_serial": 0.9,
        "of_last": 0.7,
        "blocks_of_last": 0.4,
        **fields,
    }


def test_rows_under_load_have_requests_a_second():
    """Beside the times, with shares of what serial requests come to."""
    assert load_lines({"rows": [loaded(clients=4)]})[2:] == [
        "| 4 | serial | 24 | 200.0 ms | 1.10 | 250.0 ms | 1.00 | 1.23 | 0.90 |"
    ]


def test_connectors_are_compared_with_push():
    """Which comes last."""
    rows = [loaded(), loaded(connector="push", of_last=1.0, blocks_of_last=1.0)]
    head, _, *lines = connector_lines({"rows": rows})
    assert head.endswith("| handover | of push | TTFT | blocks x s | of push |")
    assert lines == [
        "| 1 | ours | serial | 24 | 200.0 ms | 50.0 ms | 0.70 | 250.0 ms | 12.3 | 0.40 |",
        "| 1 | push | serial | 24 | 200.0 ms | 50.0 ms | 1.00 | 250.0 ms | 12.3 | 1.00 |",
    ]


def test_targets_are_met_from_the_right_side():
    """Most are bounds from above; throughput may not fall. The row is ours, and not push's."""
    rows = [
        loaded(clients=clients, way=way, connector=connector, **dict.fromkeys(_SHARES, share))
        for connector, share in (("ours", 0.65), ("push", 9.0))
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


_SHARES = {target.share for target in TARGETS}

# SPDX-License-Identifier: Apache-2.0
"""The table of faults is complete, and names tests that hold engines against it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.table import Row, read_rows

ROOT = Path(__file__).parents[2]
CLIENT = {"500", "nothing", "its answer", "connection lost", "the engine does not start"}
BLOCKS = {"lease", "lost", "none", "given back"}


def test_every_row_is_used_by_the_tests_that_it_names():
    """Whoever renames a fault or a test finds the other one."""
    rows = read_rows()
    assert len(rows) > 15
    for fault, row in rows.items():
        assert row.client in CLIENT and row.blocks in BLOCKS, fault
        assert row.log and row.tests, fault
        for named in row.tests:
            file, name = named.split("::")
            text = (ROOT / file).read_text()
            assert f"def {name}(" in text, f"{fault}: {named}"
            assert f'"{fault}"' in text, fault


def test_every_test_of_a_fault_is_in_the_table():
    """What is acted out is documented."""
    named = {each for row in read_rows().values() for each in row.tests}
    for path in (ROOT / "tests/faults").glob("test_*.py"):
        file = path.relative_to(ROOT).as_posix()
        tests = [
            line[4:].partition("(")[0]
            for line in path.read_text().splitlines()
            if line.startswith("def test_")
        ]
        # What is told below a table, as it is no fault.
        beside = (
            "blocks_of_all_these_requests_come_back",
            "engines_with_the_same_key_read_from_each_other",
            "lossy_link_costs_time_only",
            "prompt_that_has_grown_is_completed",
            "requests_that_are_refused_give_their_blocks_back",
            "slow_link_costs_time_only",
        )
        assert {f"{file}::{name}" for name in tests} - named <= {
            f"{file}::test_{name}" for name in beside
        }


@pytest.mark.parametrize(
    ("line", "matches"),
    [
        ("engine a at b failed: do c", True),
        ("engine a at b failed: do c, and d", False),
        ("engine a failed: do c", False),
        ("engine a at failed: do c", False),
        ("engine a\n at b failed: do c", False),
    ],
)
def test_gaps_stand_for_something_within_a_line(line, matches):
    """Everything else has to be as it is written."""
    assert Row("500", "engine … at … failed: do c", "lease", []).matches(line) is matches


@pytest.mark.parametrize(
    ("client", "blocks", "tells"),
    [("500", "lease", True), ("nothing", "lease", False), ("500", "lost", False)],
)
def test_row_tells_what_clients_and_blocks_come_to_as_well(client, blocks, tells):
    """The right line in the log is not enough."""
    assert Row("500", "a … b", "lease", []).tells(client, "a c b", blocks) is tells

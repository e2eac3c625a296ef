# SPDX-License-Identifier: Apache-2.0
"""docs/bases.md says what differs between bases as `base.toml` and the code have it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from reshard_build.bases import load_bases
from reshard_build.project import Project

from tests.bases import RELEASE
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.compat import (
    SLEEP_IS_UPSTREAMS,
    STATE_IS_UPSTREAMS,
)

PROJECT = Project(Path(__file__).parents[2])
PAGE = (PROJECT.root / "docs/bases.md").read_text(encoding="utf-8")


def cells(head: str) -> list[list[str]]:
    """The rows of the table whose first row begins with a head, without that."""
    found = re.search(rf"^ *\| {head} \|.*\n *\|.*\n((?: *\|.*\n)+)", PAGE, re.MULTILINE)
    assert found
    return [
        [cell.strip(" *`") for cell in line.strip(" |").split(" | ")]
        for line in found[1].splitlines()
    ]


def test_operators_that_differ_are_told_with_their_reasons():
    """Of every target of two wheels, and of no other."""
    known = {
        operator: reason
        for base in load_bases(PROJECT)
        for target in base.targets.values()
        for pin in target.wheels.values()
        if pin.compiled is not None
        for operator, reason in pin.compiled.differing.items()
    }
    assert known
    assert {operator: reason for operator, reason in cells("operator")} == known


@pytest.mark.parametrize(
    ("feature", "is_upstreams"),
    [
        ("--enable-sleep-mode", SLEEP_IS_UPSTREAMS),
        ("recurrent state (Mamba, linear attention)", STATE_IS_UPSTREAMS),
    ],
)
def test_what_the_installed_release_leaves_to_upstream(feature, is_upstreams):
    """What depends on the release is told as the code has it."""
    heads = re.search(r"^\| feature \| (.+) \|$", PAGE, re.MULTILINE)
    assert heads
    column = 1 + heads[1].split(" | ").index(RELEASE)
    (row,) = (row for row in cells("feature") if row[0].strip("`") == feature)
    assert (row[column] == "left to upstream's connector") is is_upstreams

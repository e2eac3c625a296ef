# SPDX-License-Identifier: Apache-2.0
"""Tables of options, metrics and patches say what is in the source."""

from __future__ import annotations

import re

import msgspec
import pytest
from reshard_build.series import load_series

from tests.docs.metrics import families
from tools.docs_kv_plan import ROOT
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.reading.readings import SPANS
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.settings import Settings
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.stats import (
    HandshakeFailure,
    ReadFailure,
    Strategy,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.traces import PREFIX


def rows(page, first, second=""):
    """The rows of all tables of a page whose first two columns have the given headings."""
    inside = False
    for line in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines():
        row = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            inside = False
        elif inside:
            yield row
        else:
            inside = row[0] == first and row[1].startswith(second)
            if inside:
                continue
    return


def named(cell):
    """What a cell names in code."""
    return re.findall(r"`([^`]+)`", cell)


def test_every_option_has_its_default():
    """The table of options is the struct that is read."""
    told = {
        named(row[0])[0]: named(row[1])[0] for row in rows("layouts.md", "option") if named(row[0])
    }
    assert told == {
        field.encode_name: msgspec.json.encode(field.default).decode()
        for field in msgspec.structs.fields(Settings)
    }


def test_every_metric_is_told():
    """The tables of metrics have all of them, with their kinds."""
    told = {named(row[0])[0]: row[1] for row in rows("metrics.md", "metric") if named(row[0])}
    assert told == {name: family.type for name, family in families().items()}


def test_labels_are_told():
    """What a metric is broken down by stands beside it."""
    told = {
        named(row[0])[0]: set(named(row[2]))
        for row in rows("metrics.md", "metric")
        if named(row[0]) and len(row) == 4
    }
    assert told
    for name, labels in told.items():
        own = {label for sample in families()[name].samples for label in sample.labels}
        assert labels == own & {"reason", "strategy"}, name


@pytest.mark.parametrize(
    ("heading", "second", "values"),
    [
        ("`reason`", "who acts", HandshakeFailure),
        ("`reason`", "meaning", ReadFailure),
        ("`strategy`", "meaning", Strategy),
    ],
)
def test_every_value_of_a_label_is_told(heading, second, values):
    """Reasons and strategies are explained, each once."""
    told = [name for row in rows("metrics.md", heading, second) for name in named(row[0])]
    assert sorted(told) == sorted(value.value for value in values)


def test_every_span_is_told():
    """Those that are states of a request, and the two that are none."""
    told = {
        name.removeprefix(PREFIX) for row in rows("metrics.md", "span") for name in named(row[0])
    }
    assert told == {*SPANS.values(), "offer", "handshake"}


def patch_rows():
    """The rows of the table of patches: file name, condition, and cells by base."""
    bases = sorted(path.parent.name for path in (ROOT / "bases").glob("*/series"))
    for row in rows("rebasing.md", "patch"):
        name, _, condition, *cells = row
        if named(name):
            yield named(name)[0], condition, dict(zip(bases, cells, strict=True))


@pytest.mark.parametrize(
    "base", sorted(path.parent.name for path in (ROOT / "bases").glob("*/series"))
)
def test_every_patch_is_told_in_order(base):
    """The table's patches of a base are its series, with the condition that each header states."""
    told = [(name, condition) for name, condition, cells in patch_rows() if cells[base] == "patch"]
    headers = {
        patch.name: re.search(r"^Drop-when: (.*(?:\n .*)*)", patch.description, re.MULTILINE)
        for patch in load_series(ROOT / "bases" / base)
    }
    assert told == [
        (name, " ".join(header[1].split())) for name, header in headers.items() if header
    ]
    assert len(told) == len(headers)


def test_every_told_patch_exists():
    """Each row says of each base how it has the behaviour, and is a patch of one at least."""
    for name, _, cells in patch_rows():
        ways = {"patch", "upstream", "hook", "not needed", "without"}
        assert set(cells.values()) <= ways, name
        assert "patch" in cells.values(), name

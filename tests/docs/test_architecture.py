# SPDX-License-Identifier: Apache-2.0
"""The page that shows the machine, held to the code."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.settings import Settings

ROOT = Path(__file__).parents[2]
PACKAGE = "vllm.distributed.kv_transfer.kv_connector.v1.reshard"
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
DEADLINES, LIMITS, INTERVALS = "Deadlines", "Limits within these", "Intervals"


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading of any level, without its head."""
    section = re.split(rf"\n##+ {heading}\n", PAGE)[1]
    section = re.split(r"\n##+ ", section)[0]
    table = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def value_of(name: str) -> float:
    """What a constant, or an option's default, is."""
    if "." not in name:
        by_option = dict(
            zip(Settings.__struct_encode_fields__, Settings.__struct_fields__, strict=True)
        )
        return getattr(Settings(), by_option[name])
    module, constant = name.rsplit(".", 1)
    return getattr(importlib.import_module(f"{PACKAGE}.{module}"), constant)


ALL = [*rows(DEADLINES), *rows(LIMITS), *rows(INTERVALS)]


def test_there_are_five_deadlines_at_most():
    """A user can keep so many in mind."""
    assert 0 < len(rows(DEADLINES)) <= 5


def test_limits_are_apart_from_intervals():
    """What ends a handshake, a request or an offer is in one table, and nothing else is."""
    ended = re.compile(r"\b(handshake|request|offer)\b")
    assert [row[0] for row in rows(LIMITS) if not ended.search(row[-1])] == []
    assert [row[0] for row in rows(INTERVALS) if ended.search(row[-1])] == []
    assert rows(LIMITS) and rows(INTERVALS)


@pytest.mark.parametrize("row", ALL, ids=lambda row: row[0])
def test_deadline_is_what_the_code_says(row):
    """Each is set by a constant or an option, whose default the table tells."""
    _, default, setting, *_ = row
    number, _, unit = default.partition(" ")
    assert unit == ("looks" if setting.endswith("_LOOKS`") else "s")
    assert value_of(setting.strip("`")) == float(number)


def test_every_deadline_is_told_of():
    """A constant that limits how long something may take has a row."""
    package = ROOT / PACKAGE.replace(".", "/")
    limits = {
        ".".join((*path.relative_to(package).with_suffix("").parts, name))
        for path in package.rglob("*.py")
        for name in re.findall(
            r"^(\w*(?:LIMIT|TIMEOUT|WITHIN|AFTER|GRACE|AGE|WAIT)_S)\b.*=", path.read_text(), re.M
        )
    }
    told = {row[2].strip("`") for row in ALL}
    assert len(limits) > 8
    assert limits - told == set()


def test_every_file_that_is_named_exists():
    """All paths are below the package."""
    named = set(re.findall(r"`((?:engine|transport|protocol|memory|plan)/\w+\.py)`", PAGE))
    assert len(named) > 15
    package = ROOT / PACKAGE.replace(".", "/")
    assert [path for path in sorted(named) if not (package / path).is_file()] == []


def test_every_thread_that_the_connector_names_is_told_of():
    """A thread that the page does not know has an owner that nobody finds."""
    package = ROOT / PACKAGE.replace(".", "/")
    named = {
        name
        for path in package.rglob("*.py")
        for name in re.findall(r'name(?:_prefix)?="(reshard-[\w-]+)"', path.read_text())
    }
    told = {name for name in named if f"`{name}`" in PAGE}
    assert len(named) > 4
    assert named - told == set()

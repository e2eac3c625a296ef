# SPDX-License-Identifier: Apache-2.0
"""What `python -m tools.docs` writes on pages is what code and stored results say."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tools.docs.blocks import ROOT, MarkerError
from tools.docs.deadlines import PACKAGE, deadlines
from tools.docs.metrics import told_spans
from tools.docs.pages import WRITTEN, outdated, rewrite, written
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.reading.incoming import SPANS


@cache
def pages() -> dict[Path, str]:
    """All pages and drawings as they ought to be."""
    return written()


def test_nothing_changes_when_all_is_written_again():
    """Whoever changes an option, a metric, a patch or a result runs `python -m tools.docs`."""
    assert outdated(pages()) == [], "run .venv/bin/python -m tools.docs"


def test_all_that_can_be_written_is_on_a_page():
    """No table is one that nobody reads, and no drawing one that nobody can make again."""
    drawings = {path for path in pages() if path.suffix == ".svg"}
    text = "\n".join(text for path, text in pages().items() if path not in drawings)
    assert set(re.findall(r"^<!-- written: (.+) -->$", text, re.MULTILINE)) == WRITTEN.keys()
    assert drawings == set((ROOT / "docs/images").glob("*.svg"))
    assert all(f"](images/{drawing.name})" in text for drawing in drawings)


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        ("<!-- written: other -->\n<!-- /written -->", "other is not one table of written"),
        ("<!-- results: other -->\nx\n<!-- /results -->", "other is not one table of results"),
        ("<!-- written: options -->\n| option |", "options --> is neither"),
        ("| option |\n<!-- /written -->", "/written --> is neither"),
        ("<!--written: options-->\n<!-- /written -->", "<!--written: options--> is neither"),
        (
            "<!-- written: options -->\n<!-- written: spans -->\n<!-- /written -->",
            "options is not one table",
        ),
    ],
)
def test_what_cannot_be_written_is_refused(page, reason, tmp_path):
    """No table stays on a page that nobody knows, and none that does not begin or end."""
    with pytest.raises(MarkerError, match=reason):
        rewrite(page, tmp_path)


def test_every_deadline_is_told_of():
    """A constant that limits how long something may take says what happens then."""
    limits = {
        ".".join((*path.relative_to(PACKAGE).with_suffix("").parts, name))
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(
            r"^(\w*(?:LIMIT|TIMEOUT|WITHIN|AFTER|GRACE|AGE|WAIT)_S)\b.*=", path.read_text(), re.M
        )
    }
    assert len(limits) > 8
    assert limits - {each.setting for each in deadlines()} == set()


def test_there_are_five_deadlines_at_most():
    """A user can keep so many in mind."""
    assert 0 < sum(each.kind == "deadline" for each in deadlines()) <= 5


def test_every_span_is_told_of():
    """Those that are states of a request, and those that have a name of their own."""
    own = {
        name
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(r'\.span\("(\w+)"', path.read_text())
    }
    assert told_spans().keys() == {*SPANS.values(), *own}

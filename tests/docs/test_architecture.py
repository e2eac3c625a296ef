# SPDX-License-Identifier: Apache-2.0
"""The page that shows the machine, held to the code."""

from __future__ import annotations

import re

from tools.docs.blocks import ROOT
from tools.docs.deadlines import PACKAGE

PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")


def test_every_file_that_is_named_exists():
    """All paths are below the package."""
    named = set(re.findall(r"`((?:engine|transport|protocol|memory|plan)/\w+\.py)`", PAGE))
    assert len(named) > 15
    assert [path for path in sorted(named) if not (PACKAGE / path).is_file()] == []


def test_every_thread_that_the_connector_names_is_told_of():
    """A thread that the page does not know has an owner that nobody finds."""
    named = {
        name
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(r'name(?:_prefix)?="(reshard-[\w-]+)"', path.read_text())
    }
    told = {name for name in named if f"`{name}`" in PAGE}
    assert len(named) > 4
    assert named - told == set()

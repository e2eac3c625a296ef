# SPDX-License-Identifier: Apache-2.0
"""The list of decisions, held to their pages."""

from __future__ import annotations

import re
from pathlib import Path

DECISIONS = Path(__file__).parents[2] / "docs/decisions"


def test_list_has_each_page_with_its_title():
    """In the order of their numbers: what a page decides is not called otherwise in the list."""
    listed = re.findall(
        r"^(\d+)\. \[(.+)\]\((.+?)\)", (DECISIONS / "README.md").read_text("utf-8"), re.MULTILINE
    )
    pages = sorted(DECISIONS.glob("[0-9]*.md"))
    assert listed == [
        (
            str(int(page.name[:4])),
            page.read_text("utf-8").partition("\n")[0].removeprefix("# "),
            page.name,
        )
        for page in pages
    ]

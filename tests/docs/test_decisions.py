# SPDX-License-Identifier: Apache-2.0
"""The list of decisions, held to their pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DECISIONS = Path(__file__).parents[2] / "docs/decisions"
PAGES = {int(path.name[:4]): path for path in sorted(DECISIONS.glob("[0-9]*.md"))}
STANDING, _, SUPERSEDED = (
    (DECISIONS / "README.md").read_text(encoding="utf-8").partition("\n## Superseded\n")
)


def listed(section: str) -> list[tuple[int, str, str]]:
    """Number, title and file of each page in a section of the list."""
    found = re.findall(r"^- \[(\d+): (.+)\]\((.+?)\)$", section, re.MULTILINE)
    return [(int(number), title, file) for number, title, file in found]


def is_superseded(number: int) -> bool:
    """Whether a page says that another one has replaced it."""
    return "\n*Superseded by [" in PAGES[number].read_text(encoding="utf-8")


def test_list_has_each_page_with_its_title():
    """What a page decides is not called otherwise in the list."""
    assert sorted(listed(STANDING) + listed(SUPERSEDED)) == [
        (number, path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# "), path.name)
        for number, path in PAGES.items()
    ]


def test_list_is_in_order_with_superseded_pages_last():
    """A reader meets what stands first, in the order of its numbers."""
    assert [each[0] for each in listed(STANDING)] == [n for n in PAGES if not is_superseded(n)]
    assert [each[0] for each in listed(SUPERSEDED)] == [n for n in PAGES if is_superseded(n)]


@pytest.mark.parametrize("number", [n for n in PAGES if not is_superseded(n)])
def test_page_tells_choice_and_cost(number):
    """Each says what was chosen, what that costs, and what was not chosen."""
    page = PAGES[number].read_text(encoding="utf-8")
    for part in ("**Chosen.**", "**Costs.**", "**Not chosen:**\n\n- "):
        assert part in page

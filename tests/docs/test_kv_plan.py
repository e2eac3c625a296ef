# SPDX-License-Identifier: Apache-2.0
"""What pages show of `kv-plan` is what it prints and draws.

Where it has changed, `python -m tools.docs_kv_plan` writes pages and drawings anew.
"""

from __future__ import annotations

import pytest

from tools.docs_kv_plan import ROOT, drawings, pages, rewrite


@pytest.mark.parametrize("path", list(pages()), ids=lambda path: path.stem)
def test_output_and_drawings_are_those_of_the_commands(path, tmp_path, monkeypatch):
    """A page has every line that is printed, and its drawings every character that is drawn."""
    (tmp_path / "docs/images").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    page = path.read_text(encoding="utf-8")
    assert rewrite(page) == page
    for drawing in drawings(page):
        assert (ROOT / drawing).read_text() == drawing.read_text(), drawing
        assert f"](images/{drawing.name})" in page


def test_every_drawing_has_its_command():
    """No drawing is one that nobody can make again."""
    made = [drawing for path in pages() for drawing in drawings(path.read_text(encoding="utf-8"))]
    assert made
    assert {ROOT / drawing for drawing in made} == set((ROOT / "docs/images").glob("*.svg"))

# SPDX-License-Identifier: Apache-2.0
"""The pairs that were run are rows of the sweep, with figures that can be."""

from __future__ import annotations

from collections import Counter

from tests.docs.pairs import all_pairs, pairs_of_pages
from tools.docs.blocks import ROOT
from tools.pdstack.families import FAMILIES


def test_pairs_are_families_of_the_sweep():
    """Whoever renames a family, or gives it other layouts, finds the row that it has."""
    families = {
        family.name: (str(family.prefill), str(family.decode), family.model) for family in FAMILIES
    }
    for row in all_pairs():
        assert families[row["family"]] == (row["prefill"], row["decode"], row["model"])


def test_page_counts_them():
    """The numbers on the page are those of the file, of the release that the page names."""
    page = (ROOT / "docs/layouts.md").read_text(encoding="utf-8")
    run, as_on_gpus = pairs_of_pages()
    assert f"The answers of {len(run)} pairs of engines of vLLM 0.32.0" in page
    assert f"In {len(as_on_gpus)} of them (`situation` is `caches as on GPUs`)" in page


def test_no_pair_stands_twice():
    """A family that is run anew takes the place of its row."""
    assert set(Counter((row["family"], row["vllm"]) for row in all_pairs()).values()) == {1}


def test_figures_can_be():
    """No more answers are equal than there were, and each pair has moved something."""
    for row in all_pairs():
        assert 0 < int(row["equal"]) <= int(row["of"]), row
        assert float(row["kv_moved_mib"]) > 0, row
        assert float(row["gap"] or 0) >= 0, row

# SPDX-License-Identifier: Apache-2.0
"""The site is built by the rules of `mkdocs.yml`, with links into the repository."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

ROOT = Path(__file__).parents[2]


@pytest.fixture
def built(tmp_path):
    """Builds a site of one page in a repository with a few files; returns where it lies."""
    # With names of Python functions in it, which neither of yaml's safe halves knows.
    settings = yaml.unsafe_load((ROOT / "mkdocs.yml").read_text())
    settings["hooks"] = [str(ROOT / hook) for hook in settings["hooks"]]
    settings["nav"] = ["index.md", "other.md", "../CHANGES.md"]
    root = tmp_path / "fork"
    for name, text in {
        "docs/index.md": "",
        "docs/other.md": "# Other\n\n## Part\n",
        "mkdocs.yml": yaml.dump(settings),
        "CHANGES.md": "# Changes\n\n[back](docs/index.md) and [more](notes/more.md)\n",
        "notes/more.md": "# More\n\n[a](../docs/other.md#part) and [b]\n\n[b]: ../docs/other.md\n",
        "../outside.md": "# Outside\n",
        "source/module.py": "VALUE = 1\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)

    def run(page: str) -> Path:
        (root / "docs/index.md").write_text(f"# One page\n\n{page}\n")
        config = load_config(str(root / "mkdocs.yml"), strict=True)
        build(config)
        return Path(config.site_dir)

    return run


def test_targets_outside_of_docs_become_part_of_the_site(built):
    """Markdown comes as a page, also where a copy links to it; files and directories as text."""
    site = built("[a](../CHANGES.md), [b](../source/module.py), [c](../source) and [d](#one-page)")
    page = (site / "index.html").read_text()
    assert 'href="repository/CHANGES/"' in page
    assert 'href="repository/source/module.py.txt"' in page
    assert 'href="../notes/more/"' in (site / "repository/CHANGES/index.html").read_text()
    assert "More" in (site / "repository/notes/more/index.html").read_text()
    assert (site / "repository/source/module.py.txt").read_text() == "VALUE = 1\n"
    assert (site / "repository/source.txt").read_text() == "source/\n\nmodule.py\n"


def test_each_page_is_there_once(built):
    """What a copied page links to in docs/ is the site's own page, and only pages are searched."""
    site = built("[a](../CHANGES.md), [b](../source/module.py) and [c](../source)")
    more = (site / "repository/notes/more/index.html").read_text()
    assert 'href="../../../other/#part"' in more and 'href="../../../other/"' in more
    assert 'href="../../"' in (site / "repository/CHANGES/index.html").read_text()
    index = json.loads((site / "search/search_index.json").read_text())
    found = {each["location"].partition("#")[0] for each in index["docs"]}
    assert found == {"", "other/", "repository/CHANGES/", "repository/notes/more/"}


def test_pages_that_lead_out_of_docs_and_back_fail_the_build(built):
    """A link to a page beside it goes there straight, so that nothing in docs/ is copied."""
    with pytest.raises(Abort):
        built("[a](../docs/other.md)")


def test_no_page_of_docs_is_copied(tmp_path):
    """The real pages, and those that they lead to, are each there once."""
    settings = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path))
    build(settings)
    assert (tmp_path / "repository/README/index.html").exists()
    assert not (tmp_path / "repository/docs").exists()


def test_broken_links_fail_the_build(built, caplog):
    """Pages, anchors, images and files of the repository that are not there are all named."""
    targets = [
        "missing-page.md",
        "index.md#missing-on-page",
        "#missing-here",
        "../missing-module.py",
        "../CHANGES.md#missing-there",
        "../../outside.md",
        "images/missing.svg",
    ]
    with pytest.raises(Abort):
        built("\n".join([*(f"[a]({each})" for each in targets), "[b][c]\n\n[c]: referred.md"]))
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    for target in (*targets, "referred.md"):
        assert any(f"'{target}'" in warning for warning in warnings), target


def test_pages_that_nobody_finds_fail_the_build(built, tmp_path):
    """A page that the navigation does not name is not forgotten."""
    (tmp_path / "fork/docs/forgotten.md").write_text("# Forgotten\n")
    with pytest.raises(Abort):
        built("")


def test_nothing_is_fetched_from_elsewhere(built):
    """A page brings its fonts, styles and scripts along."""
    site = built("text")
    for page in site.rglob("*.html"):
        assert not any(f'{name}="http' in page.read_text() for name in ("src", "href"))

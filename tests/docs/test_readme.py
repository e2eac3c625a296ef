# SPDX-License-Identifier: Apache-2.0
"""README and CONTRIBUTING name targets, paths, releases and numbers that are so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pairs import pairs_of_pages
from tests.docs.snippets import code_in
from tests.lanes import PARTS
from tests.v1.kv_connector.unit.reshard.simulation.running import NUM_SCHEDULES_OF_MAKE_TEST
from tools.pdstack.families import FAMILIES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = {
    *re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE),
    *(f"nightly-{name}" for name, part in PARTS.items() if part.is_selection),
}


def shown(page: str) -> set[str]:
    """The targets of `make` that a page shows in code."""
    commands = re.findall(
        r"^ *make (?:-C \S+ )?([a-z][a-z -]*?) *(?:$|#|[A-Z_]+=)",
        "\n".join(code_in(page)),
        re.MULTILINE,
    )
    return {target for words in commands for target in words.split()}


def rows(page: str, heading: str) -> list[list[str]]:
    """The rows of all tables of a page whose first column has a heading."""
    tables = re.findall(rf"^\| {heading} \|.*\n\|.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for table in tables
        for line in table.splitlines()
    ]


def test_targets_exist():
    """No page tells to run a target that the Makefile lacks."""
    pages = [each for name in (".", "docs", "examples", "tests", "tools") for each in all_of(name)]
    assert len(pages) > 50
    unknown = {page: shown(page.read_text(encoding="utf-8")) - TARGETS for page in pages}
    assert {page: targets for page, targets in unknown.items() if targets} == {}


def all_of(folder: str) -> list[Path]:
    """The pages of a folder; of the root's, those that stand in it."""
    return sorted((ROOT / folder).glob("*.md" if folder == "." else "**/*.md"))


def test_pages_are_short():
    """What is measured lies in docs/results/, and what happens inside beside the code."""
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in all_of("docs"))
    assert words <= 40_000


def test_the_two_commands_stand_on_the_first_screen():
    """Each sets up what it needs: one shows the product at work, one decides a change."""
    (first, *_) = (each for each in code_in(README) if "make" in each)
    assert [line.split("#")[0].strip() for line in first.splitlines()] == ["make demo", "make test"]


def test_targets_for_contributors_are_told():
    """All but those that explain themselves."""
    told = shown(CONTRIBUTING) | set(re.findall(r"`make ([a-z-]+)", CONTRIBUTING))
    unsaid = TARGETS - told - {"clean", "format"}
    assert [target for target in unsaid if not target.startswith("nightly-")] == []


def test_paths_exist():
    """The table of what stands where follows the tree."""
    paths = [row[0].strip("`") for row in rows(CONTRIBUTING, "path")]
    assert len(paths) > 5
    for path in paths:
        assert list(ROOT.glob(path.replace("<release>", "*"))), path


def test_sweep_is_counted():
    """The number of pairs is that of the families."""
    assert f"make sweep           # {len(FAMILIES)} pairs" in CONTRIBUTING


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "CHANGELOG.md"])
def test_schedules_are_counted(page):
    """The numbers that pages tell are those of the Makefile and of the tests."""
    text = " ".join((ROOT / page).read_text(encoding="utf-8").replace("#", "").split())
    (simulate,) = re.findall(r"^SCHEDULES \?= (\d+)$", MAKEFILE, re.MULTILINE)
    assert set(re.findall(r"([\d,]+) schedules", text)) == {f"{int(simulate):,}"}
    told = set(re.findall(r"`make test` runs ([\d,]+\d)", text))
    assert told == {f"{NUM_SCHEDULES_OF_MAKE_TEST:,}"}


def test_pairs_that_were_run_are_counted():
    """The number is that of the rows that the link leads to."""
    run, as_on_gpus = pairs_of_pages()
    assert f"[{len(run)} pairs of engines](docs/layouts.md#pairs-that-were-run)" in README
    assert f"In {len(as_on_gpus)} of them caches are filled" in README
    shared = [row for row in as_on_gpus if "DCP" in row["family"]]
    assert f"{len(shared)} with decode context parallelism" in " ".join(README.split())


def test_releases_are_the_bases():
    """Each release has a row, and each target's default is said to be it."""
    told = {row[0] for row in rows(README, "vLLM")}
    lines = (ROOT / "bases/default").read_text(encoding="utf-8").splitlines()
    device = {"cpu": "CPU", "cuda": "CUDA"}
    default = {release: device[target] for target, release in map(str.split, lines)}
    assert told == {
        f"**{base}**, the default for {default[base]}" if base in default else base
        for base in (path.parent.name for path in (ROOT / "bases").glob("*/base.toml"))
    }


def test_status_is_on_the_first_screen():
    """What no GPU has run is said before anything else is promised."""
    assert "never run on a GPU" in README.split("\n\n")[2]

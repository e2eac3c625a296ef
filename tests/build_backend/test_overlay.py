# SPDX-License-Identifier: Apache-2.0
"""What the overlay holds, and that it hides nothing."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reshard_build.errors import OverlayError
from reshard_build.overlay import clashes, overlay_files, require_no_clash, topmost_links

UPSTREAM = ["vllm/__init__.py", "vllm/engine/__init__.py", "vllm/engine/core.py"]


def test_caches_and_hidden_files_are_left_out(source_tree: Any) -> None:
    """Only sources count."""
    source_tree.write("vllm/engine/mine.py", "")
    source_tree.write("vllm/engine/data.json", "{}")
    source_tree.write("vllm/engine/__pycache__/mine.cpython-311.pyc", "")
    source_tree.write("vllm/engine/.hidden.swp", "")
    source_tree.write("vllm/.mypy_cache/a.json", "")
    found = overlay_files(source_tree.project.overlay_dir)
    assert list(found) == ["vllm/engine/data.json", "vllm/engine/mine.py"]
    assert found["vllm/engine/mine.py"] == source_tree.root / "vllm/engine/mine.py"


def test_no_directory_is_an_empty_overlay(source_tree: Any) -> None:
    """A tree without overlay has no files in it."""
    assert overlay_files(source_tree.project.overlay_dir) == {}


@pytest.mark.parametrize(
    "path", ["vllm/engine/core.py", "vllm/engine", "vllm/engine/core.py/below.py"]
)
def test_clash_is_named(path: str) -> None:
    """A file where upstream has a file or a directory, or below a file, is refused by its name."""
    with pytest.raises(OverlayError, match=f"overlay file {path} stands where upstream has one"):
        require_no_clash([path, "vllm/engine/fine.py"], UPSTREAM, "upstream")


def test_new_paths_do_not_clash() -> None:
    """Files beside upstream's and in directories of their own are fine."""
    assert clashes(["vllm/engine/mine.py", "vllm/own/a.py"], UPSTREAM) == []


def test_own_directory_is_one_link() -> None:
    """The topmost directory that upstream lacks is linked; a file beside upstream's by itself."""
    root = Path("/source")
    names = ["vllm/engine/mine.py", "vllm/own/a.py", "vllm/own/deep/b.py"]
    links = topmost_links({name: root / name for name in names}, UPSTREAM)
    assert links == {
        "vllm/engine/mine.py": root / "vllm/engine/mine.py",
        "vllm/own": root / "vllm/own",
    }


PART = st.sampled_from(["a", "b", "c"])
PATHS = st.sets(
    st.lists(PART, min_size=1, max_size=4).map(lambda p: "vllm/" + "/".join(p)), max_size=8
)


@given(upstream=PATHS, overlay=PATHS)
@settings(derandomize=True)
def test_links_reach_every_overlay_file_once(upstream: set[str], overlay: set[str]) -> None:
    """Without a clash, each overlay file lies behind exactly one link, upstream's behind none."""
    upstream = {"vllm/__init__.py", *(f"{p}.py" for p in upstream)}
    files = {f"{path}.py": Path("/source") / f"{path}.py" for path in overlay}
    if clashes(files, upstream):
        return
    links = topmost_links(files, upstream)

    def behind(path: str) -> list[str]:
        return [name for name in links if PurePosixPath(path).is_relative_to(name)]

    for path, source in files.items():
        (link,) = behind(path)
        assert links[link] / PurePosixPath(path).relative_to(link) == source
    assert not any(behind(path) for path in upstream)


def test_directory_of_two_places_is_linked_file_by_file() -> None:
    """Where a base has modules of its own in a directory of the shared overlay, neither hides."""
    shared, own = Path("/source"), Path("/source/bases/0.22.1")
    files = {
        "vllm/own/a.py": shared / "vllm/own/a.py",
        "vllm/own/deep/b.py": shared / "vllm/own/deep/b.py",
        "vllm/own/mine.py": own / "vllm/own/mine.py",
    }
    assert topmost_links(files, UPSTREAM) == {
        "vllm/own/a.py": shared / "vllm/own/a.py",
        "vllm/own/deep": shared / "vllm/own/deep",
        "vllm/own/mine.py": own / "vllm/own/mine.py",
    }

# SPDX-License-Identifier: Apache-2.0
"""Blocks in use are written down when they change, and added up over time."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tools.pdstack import held_blocks
from tools.pdstack.engine import EngineSpec
from tools.pdstack.held_blocks import HeldBlocks, read, watched

PATH = Path("/run/held-blocks")


def test_blocks_count_for_as_long_as_they_are_held():
    """What was held before counts from the beginning, and what is held on until the end."""
    held = HeldBlocks([(1.0, 2), (3.0, 5), (4.0, 1), (9.0, 0)])
    assert held.between(0.0, 10.0) == 2 * 2 + 5 * 1 + 1 * 5
    assert held.between(2.0, 3.5) == 2 * 1 + 5 * 0.5
    assert held.between(3.0, 4.0) == 5
    assert held.between(5.0, 6.0) == 1
    assert held.between(9.5, 10.0) == held.between(0.0, 0.5) == 0


def test_engine_that_used_no_block_has_written_nothing(tmp_path):
    """There is no file then."""
    assert read(tmp_path / "none").between(0.0, 1.0) == 0


def test_watched_engine_finds_the_plugin():
    """Beside what else it has."""
    spec = watched(EngineSpec("e", env={"A": "b"}, module_dirs=(Path("/a"),)), PATH)
    assert spec.env == {"A": "b", "HELD_BLOCKS": str(PATH)}
    first, place = spec.module_dirs
    assert first == Path("/a")
    (entry,) = place.glob("*.dist-info/entry_points.txt")
    assert "held_blocks:register" in entry.read_text()
    assert (place / "held_blocks.py").is_file()


@pytest.fixture
def pool(monkeypatch, tmp_path):
    """A pool of an engine that has the plugin, and the file that it writes."""
    block_pool = importlib.import_module("vllm.v1.core.block_pool")
    module = importlib.import_module("tools.pdstack.modules.held_blocks.held_blocks")
    # What the plugin takes the place of, comes back.
    for name in module._CHANGES:
        monkeypatch.setattr(block_pool.BlockPool, name, getattr(block_pool.BlockPool, name))
    monkeypatch.setenv(held_blocks._FILE, str(tmp_path / "held"))
    module.register()
    module.register()
    return block_pool.BlockPool(8, True, 16), tmp_path / "held"


def test_each_change_is_a_line(pool):
    """Also where a block that was free is had once more; what changes nothing writes nothing."""
    made, path = pool
    first = made.get_new_blocks(3)
    made.touch(first)
    made.free_blocks(first)
    made.free_blocks(first)
    made.touch(first[:1])
    assert [held for _, held in read(path).changes] == [3, 0, 1]
    times = [at_s for at_s, _ in read(path).changes]
    assert times == sorted(times)

# SPDX-License-Identifier: Apache-2.0
"""Fakes and helpers for tests of the launcher."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.tools.pdstack.helpers import living_in
from tools.pdstack.engine import ServedModel


@pytest.fixture
def survivors(tmp_path: Path) -> Callable[[], list[psutil.Process]]:
    """Return a function that lists what still runs somewhere below the test's directory."""
    return lambda: living_in(tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> ServedModel:
    """A model directory that has the sizes of one, and nothing else."""
    directory = tmp_path / "model"
    directory.mkdir()
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    (directory / "config.json").write_text(json.dumps(sizes))
    return ServedModel(directory, "model")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A directory for logs."""
    directory = tmp_path / "run"
    directory.mkdir()
    return directory

# SPDX-License-Identifier: Apache-2.0
"""What all tests with real engines share: the model, and a place where nothing may be left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.tools.pdstack.helpers import living_in
from tools.pdstack.engine import ServedModel
from tools.pdstack.model import cache_dir, prepare_default_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """SmolLM2-135M-Instruct, prepared in the user's cache unless it is there already."""
    return prepare_default_model(cache_dir(), tmp_path_factory.mktemp("model"))


@pytest.fixture
def survivors(tmp_path: Path) -> Callable[[], list[psutil.Process]]:
    """Return a function that lists what still runs somewhere below the test's directory."""
    return lambda: living_in(tmp_path)

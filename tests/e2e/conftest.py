# SPDX-License-Identifier: Apache-2.0
"""What all tests with real engines share: the model, and a place where nothing may be left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.layouts import Case, Engines
from tests.e2e.pairs import Pair
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


@pytest.fixture(scope="module")
def pair(engines: Engines, case: Case) -> Iterator[Pair]:
    """The two engines of a module's case, behind a router."""
    with engines.pair(case) as pair:
        yield pair

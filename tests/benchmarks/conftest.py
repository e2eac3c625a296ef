# SPDX-License-Identifier: Apache-2.0
"""What tests with processes share."""

from __future__ import annotations

import pytest

from benchmarks import children


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where children are forked from: one, which has imported vLLM."""
    children.prepare("benchmarks.host", tmp_path_factory.mktemp("server"))

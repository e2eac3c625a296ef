# SPDX-License-Identifier: Apache-2.0
"""What holds after every fault."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.stage import Stage


@pytest.fixture(autouse=True)
def the_others_are_served(stage: Stage) -> Iterator[None]:
    """Whatever a test does, both engines serve after it, and decode engines lose no block."""
    yield
    stage.stack.check()
    stage.assert_serving()
    stage.assert_blocks_are_free(stage.decode, stage.recomputing)

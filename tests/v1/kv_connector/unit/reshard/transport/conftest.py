# SPDX-License-Identifier: Apache-2.0
"""What tests of transports share."""

from __future__ import annotations

import pytest

from tests.v1.kv_connector.unit.reshard.transport.backends import BACKENDS, available


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend of NIXL's, skipped where it does not load."""
    return available(request.param)

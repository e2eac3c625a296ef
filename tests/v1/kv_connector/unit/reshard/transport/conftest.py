# SPDX-License-Identifier: Apache-2.0
"""What tests of transports share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.v1.kv_connector.unit.reshard.transport.backends import BACKENDS, available
from tests.v1.kv_connector.unit.reshard.transport.channels import Loops, ScriptedResolver
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport import (
    resolver as resolver_module,
)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend of NIXL's, skipped where it does not load."""
    return available(request.param)


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedResolver]:
    """Instead of this machine's."""
    resolver = ScriptedResolver()
    monkeypatch.setattr(resolver_module, "addresses_of", resolver.addresses_of)
    yield resolver
    resolver.answers.set()


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> Loops:
    """The event loops that are made from now on."""
    loops = Loops()
    monkeypatch.setattr(asyncio, "new_event_loop", loops.new_event_loop)
    return loops

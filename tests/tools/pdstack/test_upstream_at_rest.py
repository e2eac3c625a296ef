# SPDX-License-Identifier: Apache-2.0
"""Upstream's connectors are made where NIXL's threads rest, and no core is taken."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from tools.pdstack.engine import UPSTREAM_AT_REST, UPSTREAM_PUSH_AT_REST
from tools.pdstack.modules import upstream_at_rest
from vllm.distributed.kv_transfer.kv_connector.v1 import nixl


@pytest.mark.parametrize(
    "transfer", [UPSTREAM_AT_REST, UPSTREAM_PUSH_AT_REST], ids=lambda each: each.connector
)
def test_connector_is_upstreams_made_at_rest(monkeypatch, transfer):
    """The class that engines are told of, by its name, is upstream's of that name."""
    happened: list[str] = []

    @contextmanager
    def at_rest():
        happened.append("at rest")
        yield
        happened.append("as ever")

    upstreams = getattr(nixl, transfer.connector)
    monkeypatch.setattr(upstream_at_rest, "at_rest", at_rest)
    monkeypatch.setattr(upstreams, "__init__", lambda self, *_: happened.append("made"))
    made = getattr(upstream_at_rest, transfer.connector)("config")
    assert isinstance(made, upstreams)
    assert happened == ["at rest", "made", "as ever"]

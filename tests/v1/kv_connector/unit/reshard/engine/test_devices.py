# SPDX-License-Identifier: Apache-2.0
"""The device of a worker's caches: who chooses it, and what is waited for on it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.v1.kv_connector.unit.reshard.engine.workers import receive
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.devices import CacheDevice
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.metadata import (
    ReshardConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    RemoteEngineAddress,
)

ADDRESS = RemoteEngineAddress("prefill", "p.example", 5600)
READING = ReshardConnectorMetadata(receive={"d-a": receive(ADDRESS, [3], [5])})


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (None, []),
        (torch.device("cpu"), []),
        (torch.device("cuda", 1), [torch.device("cuda", 1)]),
    ],
    ids=str,
)
def test_thread_works_with_the_device_of_the_caches(monkeypatch, place, expected):
    """On CPU, and before the caches are registered, there is none to choose."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    device = CacheDevice(on_cpu=False)
    device.place = place
    device.choose()
    assert chosen == expected


def test_steps_that_read_wait_for_what_was_launched_before(monkeypatch):
    """Those that read nothing need not, nor any where all is computed at once."""
    recorded = []
    event = SimpleNamespace(record=lambda: recorded.append("now"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    device = CacheDevice(on_cpu=False)
    assert device.computed_before(ReshardConnectorMetadata()) is None and recorded == []
    assert device.computed_before(READING) is event and recorded == ["now"]
    assert CacheDevice(on_cpu=True).computed_before(READING) is None

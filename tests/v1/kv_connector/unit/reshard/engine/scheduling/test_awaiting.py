# SPDX-License-Identifier: Apache-2.0
"""Whose leases workers renew, and until when."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.metadata import (
    ReshardConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.scheduling.awaiting import (
    AwaitedRequests,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    RemoteEngineAddress,
    RemoteRequest,
)

REMOTE = RemoteRequest(RemoteEngineAddress("prefill", "127.0.0.1", 1), "p-a")


def next_step(requests: AwaitedRequests) -> tuple[dict, set]:
    """Which requests the next step begins and ends."""
    metadata = ReshardConnectorMetadata()
    requests.write_to(metadata)
    return metadata.awaited, metadata.ended


def test_workers_hear_once_of_the_begin_and_the_end():
    """However often the request ends; others are nobody's concern."""
    requests = AwaitedRequests()
    requests.begin("a", REMOTE)
    assert requests.has_untold
    assert next_step(requests) == ({"a": REMOTE}, set())
    assert not requests.has_untold
    for _ in range(2):
        requests.end("a")
        requests.end("another")
    assert next_step(requests) == ({}, {"a"})
    assert next_step(requests) == ({}, set())

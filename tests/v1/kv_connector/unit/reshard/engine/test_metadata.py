# SPDX-License-Identifier: Apache-2.0
"""What scheduler and workers of an engine send each other."""

from __future__ import annotations

import pickle

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.metadata import (
    ReshardHandshakeMetadata,
    WorkerReport,
)


def test_handshake_passes_between_processes():
    """Workers hand it to the scheduler's process by pickle, as what vLLM expects."""
    handshake = ReshardHandshakeMetadata({"dtype": "half"}, b"what the worker says")
    assert isinstance(handshake, KVConnectorHandshakeMetadata)
    assert pickle.loads(pickle.dumps(handshake)) == handshake


def test_news_pass_between_processes_and_add_up():
    """Workers hand them over by pickle, and two workers' are one's that owns what it holds."""
    one = WorkerReport({"a"}, {"v": "full"})
    told = pickle.loads(pickle.dumps(one))
    both = told.aggregate(WorkerReport({"b"}, {"w": ""}))
    assert both == WorkerReport({"a", "b"}, {"v": "full", "w": ""})
    assert told == one and one and not WorkerReport()

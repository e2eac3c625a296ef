# SPDX-License-Identifier: Apache-2.0
"""What scheduler and workers of an engine send each other."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlHandshakePayload

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.metadata import (
    ReshardHandshakeMetadata,
    WorkerReport,
)


def test_handshake_passes_between_processes():
    """Workers hand it to the scheduler's process by pickle, as what upstream's hand over."""
    handshake = ReshardHandshakeMetadata({"dtype": "half"}, b"what the worker says")
    assert isinstance(handshake, NixlHandshakePayload)
    assert pickle.loads(pickle.dumps(handshake)) == handshake
    assert handshake != ReshardHandshakeMetadata({"dtype": "half"}, b"another")


KVBM = "kvbm==1.6.1"
ASKS_DYNAMOS = """
from types import SimpleNamespace
from kvbm.vllm_integration.connector.pd_connector import PdConnector
from vllm.distributed.kv_transfer.kv_connector.v1 import nixl
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.connector import NixlConnector
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine import metadata

said = metadata.ReshardHandshakeMetadata({}, b"what the worker says")
ours = SimpleNamespace(get_handshake_metadata=lambda: said)
assert PdConnector.get_handshake_metadata(SimpleNamespace(_connectors=[None, ours])) is said
assert issubclass(NixlConnector, nixl.NixlConnector)
"""


@pytest.mark.nightly
def test_dynamos_connector_lets_a_handshake_pass(tmp_path):
    """The released one, of its own wheel, which takes upstream's connector and payload alone."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    done = subprocess.run([*pip, tmp_path, KVBM], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{KVBM} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    asked = [sys.executable, "-c", ASKS_DYNAMOS]
    done = subprocess.run(asked, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr


def test_news_pass_between_processes_and_add_up():
    """Workers hand them over by pickle, and two workers' are one's that owns what it holds."""
    one = WorkerReport({"a"}, {"v": "full"})
    told = pickle.loads(pickle.dumps(one))
    both = told.aggregate(WorkerReport({"b"}, {"w": ""}))
    assert both == WorkerReport({"a", "b"}, {"v": "full", "w": ""})
    assert told == one and one and not WorkerReport()

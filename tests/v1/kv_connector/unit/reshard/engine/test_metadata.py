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
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.stats import ReshardStats

NO_BLOCKS = frozenset()


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
    one = WorkerReport(failed={"a": NO_BLOCKS}, shortages={"v": "full"})
    told = pickle.loads(pickle.dumps(one))
    both = told.aggregate(WorkerReport(failed={"b": NO_BLOCKS}, shortages={"w": ""}))
    assert (both.failed.keys(), both.shortages) == ({"a", "b"}, {"v": "full", "w": ""})
    assert told == one and one and not WorkerReport()


def test_reports_add_up():
    """What nobody has collected yet, and what has ended since."""
    first, second = ReshardStats(), ReshardStats()
    first.record_notification()
    second.record_notification()
    report = WorkerReport(sent={"a"}, failed={"b": frozenset({1})}, stats=first)
    report.add(WorkerReport(received={"b"}, stats=second))
    report.add(WorkerReport())
    assert (report.sent, report.received, report.failed) == ({"a"}, {"b"}, {"b": frozenset({1})})
    assert sum(report.stats.data["notifications_sent"]) == 2
    assert report and not WorkerReport()


def test_what_is_taken_out_of_a_report_is_taken_once():
    """Each by whom vLLM asks for it."""
    stats = ReshardStats()
    report = WorkerReport({"a"}, {"b"}, {"c": frozenset({1})}, {"v": "full"}, stats)
    assert report.take_finished() == ({"a"}, {"b"})
    assert report.take_failed() == {"c": frozenset({1})}
    assert report.take_shortages() == {"v": "full"} and report.take_stats() is stats
    assert report == WorkerReport()

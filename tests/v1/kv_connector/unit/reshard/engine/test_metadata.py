# SPDX-License-Identifier: Apache-2.0
"""What scheduler and workers of an engine send each other."""

from __future__ import annotations

import pickle

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.metadata import (
    ReshardHandshakeMetadata,
    WorkerReport,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.stats import ReshardStats

NO_BLOCKS = frozenset()


def test_handshake_passes_between_processes():
    """Workers hand it to the scheduler's process by pickle, as what vLLM expects."""
    handshake = ReshardHandshakeMetadata({"dtype": "half"}, b"what the worker says")
    assert isinstance(handshake, KVConnectorHandshakeMetadata)
    assert pickle.loads(pickle.dumps(handshake)) == handshake


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

# SPDX-License-Identifier: Apache-2.0
"""Turns of a worker's exchange; whole workers are in `test_worker`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.v1.kv_connector.unit.reshard.engine.test_worker import (
    Progress,
    assert_received,
    engines,
    fill,
    receive,
    wait_until,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.exchange import Report
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.stats import ReshardStats
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.worker import ReshardWorker

__all__ = ["engines"]


def test_reports_add_up():
    """What nobody has collected yet, and what has ended since."""
    first, second = ReshardStats(), ReshardStats()
    first.record_notification()
    second.record_notification()
    report = Report(sent={"a"}, failed={"b": frozenset({1})}, stats=first)
    report.add(Report(received={"b"}, stats=second))
    report.add(Report())
    assert (report.sent, report.received, report.failed) == ({"a"}, {"b"}, {"b": frozenset({1})})
    assert sum(report.stats.data["notifications_sent"]) == 2
    assert report and not Report()


@pytest.mark.parametrize("engines", ["direct", "staged"], indirect=True)
def test_nothing_is_read_into_what_a_step_in_flight_writes(engines, monkeypatch):
    """Reads of a step wait until the device has computed what came before it."""
    event = SimpleNamespace(over=False)
    event.query = lambda: event.over
    monkeypatch.setattr(ReshardWorker, "_computed_before", lambda *_: event)
    p, d = engines("prefill", tp=2), engines("decode")
    (worker,) = d.workers.values()
    address = p.serve()
    whole = fill(p, [5, 2, 9])
    p.offer("p-a")
    progress = Progress(p, d)
    d.start(receive={"d-a": receive(address, [3, 4, 1], [5, 2, 9])})
    wait_until(lambda: worker._exchange._steps, progress.step)
    for _ in range(20):
        progress.step()
    assert len(worker._transfers) == len(worker._exchange.reads) == 0
    assert not worker._exchange.peers.num_opening
    event.over = True
    progress.until(d, received="d-a")
    assert_received(d, [3, 4, 1], whole)

# SPDX-License-Identifier: Apache-2.0
"""What workers and their scheduler report to each other about reads that fail."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.compat import (
    FAILED_READS_ARE_NAMED,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.failed_reads import LoadReports
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.metadata import WorkerReport
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.scheduling.remote_reads import (
    RemoteReads,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.subscriber import Subscriber

pytestmark = pytest.mark.skipif(
    not FAILED_READS_ARE_NAMED, reason="the scheduler of this base is told of blocks, at once"
)

NO_BLOCKS = frozenset()


class Manager:
    """Hands blocks over, and takes them back."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.given_back: list[str] = []
        self.block_pool = SimpleNamespace(free_blocks=self.given_back.extend)

    def pop_blocks_for_free(self, request) -> list[str]:
        """One block, named as the request."""
        self.taken.append(request.request_id)
        return [request.request_id]


@st.composite
def schedules(draw: st.DrawFn) -> dict:
    """When the workers of an engine fail and are drained, for some requests, in steps."""
    num_workers, num_requests = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    step = st.integers(0, 6)
    reads = {}
    for request in range(num_requests):
        for worker in range(num_workers):
            drained = draw(step)
            reads[f"r{request}", worker] = draw(st.none() | st.integers(0, drained)), drained
    ended = {f"r{request}" for request in range(num_requests) if draw(st.booleans())}
    return dict(num_workers=num_workers, reads=reads, ended=ended, depth=draw(st.integers(1, 3)))


@settings(max_examples=300, deadline=None)
@given(schedule=schedules(), has_manager=st.booleans())
def test_every_order_of_reports_ends_every_request_once(schedule, has_manager):
    """Whatever comes first, and however many steps are under way.

    A request that failed anywhere is reported as failed, soon after that; nothing is given back
    while a worker may still write; and in the end no book is kept.
    """
    num_workers, reads, ended = schedule["num_workers"], schedule["reads"], schedule["ended"]
    requests = {name for name, _ in reads}
    workers = [LoadReports() for _ in range(num_workers)]
    aggregator = KVOutputAggregator(num_workers)
    in_doubt = [0]
    book, manager = RemoteReads(Subscriber(print), None, in_doubt.append), Manager()
    book.manager = manager if has_manager else None
    asked = [
        SimpleNamespace(request_id=name, is_finished=lambda name=name: name in ended)
        for name in requests
    ]
    for request in asked:
        book.begin(request, ([1, 2],))
        if request.is_finished():
            book.finish(request)
    under_way: list[tuple[set[str], set[str]]] = []
    failed_at: dict[str, int] = {}
    passed: Counter[str] = Counter()
    for step in range(20):
        # The scheduler is ahead of the workers, by as many steps as it may be.
        under_way.append((requests if step == 0 else set(), book.take_outbox().failed))
        if len(under_way) < schedule["depth"]:
            continue
        begun, told = under_way.pop(0)
        now = step - schedule["depth"] + 1
        outputs = []
        for number, worker in enumerate(workers):
            worker.note_started(begun, told)
            mine = {name: each for (name, owner), each in reads.items() if owner == number}
            news = {name: NO_BLOCKS for name, (fails, _) in mine.items() if fails == now}
            drained = {name for name, (_, drained) in mine.items() if drained == now}
            received, failed = worker.advance(news, drained)
            output = KVConnectorOutput(
                finished_recving=received,
                failed_recving=failed,
                kv_connector_worker_meta=WorkerReport(failed=news) if news else None,
            )
            outputs.append(ModelRunnerOutput([], {}, kv_connector_output=output))
        heard = aggregator.aggregate(outputs).kv_connector_output
        for name in heard.failed_recving:
            assert failed_at.setdefault(name, now) == now
        if heard.kv_connector_worker_meta is not None:
            book.fail(heard.kv_connector_worker_meta.failed)
        passed.update(book.receive(heard.finished_recving or set()))
        may_be_written = {name for (name, _), (_, drained) in reads.items() if drained > now}
        assert may_be_written.isdisjoint(manager.given_back)
        assert may_be_written.isdisjoint(passed.keys() - set(manager.taken))
    fails = {
        name: [f for (n, _), (f, _) in reads.items() if n == name and f is not None]
        for name in requests
    }
    assert failed_at.keys() == {name for name in requests if fails[name]}
    for name, now in failed_at.items():
        assert now <= min(fails[name]) + schedule["depth"]
    assert passed == Counter(requests)
    assert sorted(manager.taken) == sorted(manager.given_back)
    assert set(manager.taken) == (failed_at.keys() - ended if has_manager else set())
    for request in asked:
        book.finish(request)
    assert len(book) == book.num_taken_blocks == in_doubt[-1] == 0
    assert any(in_doubt) == bool(failed_at)
    assert not any(map(len, workers))

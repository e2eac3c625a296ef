# SPDX-License-Identifier: Apache-2.0
"""What vLLM's own schedulers do with a request that could not be read, and with its blocks.

A read that has failed may still write. Its request ends for its client, or is computed, without
waiting for that; its blocks are nobody's until all workers are quiet.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request, RequestStatus

from tests.bases import RELEASE
from tests.v1.kv_connector.unit.reshard.containers import sizes
from tests.v1.kv_connector.unit.reshard.serving import (
    BLOCK_TOKENS,
    PROMPT_TOKENS,
    Serving,
    Whole,
    from_decode,
    from_prefill,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.compat import (
    FAILED_READS_ARE_NAMED,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.metadata import (
    ReshardConnectorMetadata,
    WorkerReport,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.stats import ReshardStats

ROUNDS = 2 if FAILED_READS_ARE_NAMED else 1
"""So many steps after a worker's read has failed, the scheduler knows."""

RECOMPUTES_IN_OTHER_BLOCKS = RELEASE != "0.22.1"
"""Whether a request that is to be computed anew is given other blocks.

The scheduler of 0.22.1 shows its cache manager to no connector: there such a request waits until
nothing can write into its blocks any more.
"""

in_other_blocks = pytest.mark.skipif(
    not RECOMPUTES_IN_OTHER_BLOCKS, reason="the scheduler of this base does not hand blocks over"
)


class Played:
    """A worker whose reads a test decides on."""

    handshake = None

    def __init__(self) -> None:
        self.reading: dict[str, frozenset[int]] = {}
        self.report = WorkerReport()

    def submit(self, metadata: ReshardConnectorMetadata) -> None:
        """Read what there is to read."""
        for request_id, receive in metadata.receive.items():
            if any(receive.local_block_ids):
                self.reading[request_id] = frozenset().union(*receive.local_block_ids)

    def collect(self) -> WorkerReport:
        """What has failed or is quiet; nothing was sent, and it can serve whom it will."""
        return self.report

    def fail(self, request_id: str) -> None:
        """A read has failed."""
        self.report.failed[request_id] = self.reading[request_id]

    def end(self, request_id: str) -> None:
        """Nothing is written any more."""
        del self.reading[request_id]
        self.report.received.add(request_id)

    def close(self) -> None:
        """There is nothing to give back."""


class Doubtful(Whole):
    """A decode engine whose workers' reads a test decides on."""

    def __init__(self, serving: Serving, num_workers: int) -> None:
        self.workers = [Played() for _ in range(num_workers)]
        super().__init__(serving, SimpleNamespace(workers=dict(enumerate(self.workers))))

    def steps(self, number: int) -> dict[str, int]:
        """Some steps; returns the tokens scheduled in all of them."""
        scheduled: dict[str, int] = defaultdict(int)
        for _ in range(number):
            for request_id, num_tokens in self.step().items():
                scheduled[request_id] += num_tokens
            self.check()
        return dict(scheduled)

    def check(self) -> None:
        """No block that a read may write into is free, cached or anybody else's."""
        pool = self.serving.scheduler.kv_cache_manager.block_pool
        readers = {name: ids for worker in self.workers for name, ids in worker.reading.items()}
        for name, block_ids in readers.items():
            for block_id in block_ids:
                block = pool.blocks[block_id]
                assert block.ref_cnt == 1, f"block {block_id}, which {name} is read into"
                assert block.block_hash is None
            for request in self.serving.scheduler.requests.values():
                if request.request_id != name:
                    assert block_ids.isdisjoint(self.blocks(request))

    def blocks(self, request: Request) -> list[int]:
        """The blocks that a request has."""
        groups = self.serving.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        return [block_id for group in groups for block_id in group]

    def begin_read(self, request_id: str = "d-a", **options) -> Request:
        """Add a request, and let all workers begin to read it."""
        params = from_prefill(remote_request_id=f"p-{request_id}")
        request = self.serving.add(request_id, params, **options)
        self.steps(1)
        assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        assert all(request_id in worker.reading for worker in self.workers)
        return request

    def end_all(self, request_id: str = "d-a") -> None:
        """Nothing is written any more for a request; give the scheduler the time to hear of it."""
        for worker in self.workers:
            if request_id in worker.reading:
                worker.end(request_id)
        self.steps(3)


@pytest.fixture
def decoding(serving) -> Iterator:
    """Makes decode engines of some workers."""

    def make(policy: str = "fail", *, workers: int = 2, **options) -> Doubtful:
        return Doubtful(serving(policy, **options), workers)

    return make


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_request_fails_at_once_and_its_blocks_are_kept(decoding, workers):
    """Its client does not wait for a read that may never end; nobody gets its blocks before."""
    d = decoding("fail", workers=workers)
    d.begin_read()
    d.workers[0].fail("d-a")
    d.steps(ROUNDS)
    assert d.serving.finished == {"d-a": FinishReason.ERROR}
    d.steps(5)
    for worker in d.workers:
        assert d.serving.num_used_blocks() == 3
        assert d.serving.scheduler.has_requests()
        worker.end("d-a")
        d.steps(3)
    assert d.serving.is_through()


@pytest.mark.skipif(not FAILED_READS_ARE_NAMED, reason="the scheduler hears of no failed read")
def test_blocks_in_doubt_are_counted_for_the_whole_engine(decoding, monkeypatch):
    """The scheduler tells the number as it changes: when one worker fails, and all are through."""
    d = decoding("fail", workers=2)
    scheduler = d.serving.scheduler.connector.connector_scheduler
    take_stats, reported = scheduler.take_stats, []

    def taken() -> ReshardStats | None:
        """As vLLM takes them in each step."""
        if (stats := take_stats()) is not None:
            reported.extend(stats.data["blocks_in_doubt"])
        return stats

    monkeypatch.setattr(scheduler, "take_stats", taken)
    d.begin_read()
    d.workers[0].fail("d-a")
    d.steps(ROUNDS)
    d.workers[1].fail("d-a")
    d.steps(ROUNDS)
    d.workers[0].end("d-a")
    d.steps(3)
    assert reported == [3]
    d.end_all()
    assert reported == [3, 0]
    assert d.serving.is_through()


def test_worker_that_was_through_before_another_failed(decoding):
    """What it has reported before counts; the blocks wait for the last one."""
    d = decoding("fail", workers=3)
    d.begin_read()
    for number in (1, 2):
        d.workers[number].end("d-a")
        d.steps(2)
    assert not d.serving.finished
    d.workers[0].fail("d-a")
    d.steps(ROUNDS)
    assert d.serving.finished == {"d-a": FinishReason.ERROR}
    d.steps(3)
    assert d.serving.num_used_blocks() == 3
    d.end_all()
    assert d.serving.is_through()


def test_workers_that_fail_one_after_another(decoding):
    """Whoever fails later has nothing new to say."""
    d = decoding("fail", workers=3)
    d.begin_read()
    for worker in d.workers:
        worker.fail("d-a")
        d.steps(1)
    d.steps(ROUNDS)
    assert d.serving.finished == {"d-a": FinishReason.ERROR}
    for worker in d.workers:
        assert d.serving.num_used_blocks() == 3
        worker.end("d-a")
        d.steps(3)
    assert d.serving.is_through()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_read_that_was_never_posted_fails_and_is_quiet_at_once(decoding, policy):
    """As where a handshake failed: nothing is kept, and nothing is left."""
    d = decoding(policy)
    d.begin_read()
    for worker in d.workers:
        worker.fail("d-a")
        worker.end("d-a")
    d.steps(5)
    expected = FinishReason.ERROR if policy == "fail" else FinishReason.LENGTH
    assert d.serving.finished == {"d-a": expected}
    assert d.serving.is_through()


def test_failed_request_costs_no_other(decoding):
    """Others are read and computed while its blocks are in doubt."""
    d = decoding("fail")
    d.begin_read()
    d.begin_read("d-b", first_token=100)
    d.workers[1].fail("d-a")
    d.steps(ROUNDS)
    d.serving.add("d-c", first_token=50)
    d.end_all("d-b")
    assert d.serving.finished == {
        "d-a": FinishReason.ERROR,
        "d-b": FinishReason.LENGTH,
        "d-c": FinishReason.LENGTH,
    }
    d.end_all()
    assert d.serving.is_through()


@in_other_blocks
@pytest.mark.parametrize("cached", [0, 2])
@pytest.mark.parametrize("workers", [1, 2])
def test_request_is_computed_at_once_in_other_blocks(decoding, cached, workers):
    """Late bytes do not land in what was computed; what was cached is used by both."""
    d = decoding("recompute", workers=workers)
    if cached:
        d.serving.add("before", num_tokens=cached * BLOCK_TOKENS)
        d.steps(1)
    request = d.begin_read(max_tokens=4)
    in_doubt = set(d.workers[0].reading["d-a"])
    assert len(in_doubt) == 3 - cached
    d.workers[0].fail("d-a")
    d.steps(ROUNDS)
    assert d.steps(1) == {"d-a": PROMPT_TOKENS - cached * BLOCK_TOKENS}
    assert in_doubt.isdisjoint(d.blocks(request))
    d.steps(5)
    assert d.serving.finished["d-a"] == FinishReason.LENGTH
    assert d.serving.num_used_blocks() == 3
    assert d.serving.scheduler.has_requests(), "an engine at rest would not hear of the end"
    d.end_all()
    assert d.serving.is_through()
    assert not d.serving.scheduler.has_requests()


@in_other_blocks
def test_reads_end_while_the_request_is_computed(decoding):
    """The blocks go back; the request, which has its name, goes on."""
    d = decoding("recompute")
    d.begin_read(max_tokens=20)
    d.workers[0].fail("d-a")
    d.steps(ROUNDS + 1)
    assert d.serving.num_used_blocks() == 6
    d.end_all()
    assert d.serving.num_used_blocks() == 3
    assert not d.serving.finished
    d.steps(20)
    assert d.serving.finished == {"d-a": FinishReason.LENGTH}
    assert d.serving.is_through()


def test_request_waits_where_nobody_hands_its_blocks_over(decoding):
    """It is computed when nothing writes into them any more, and not before."""
    d = decoding("recompute")
    d.serving.scheduler.connector.connector_scheduler._reads.manager = None
    d.begin_read()
    d.workers[0].fail("d-a")
    d.workers[1].end("d-a")
    assert d.steps(5) == {}
    d.workers[0].end("d-a")
    assert d.steps(3) == {"d-a": PROMPT_TOKENS}
    assert d.serving.is_through()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("after", range(6))
def test_request_is_aborted_at_any_moment(decoding, policy, after):
    """Before its read fails, between the reports, and while its blocks are in doubt."""
    d = decoding(policy)
    d.begin_read(max_tokens=8)
    for step in range(8):
        if step == after:
            d.serving.abort("d-a")
            d.check()
        if step == 1:
            d.workers[0].fail("d-a")
        d.steps(1)
    assert d.serving.num_used_blocks() == 3
    for worker in d.workers:
        assert not d.serving.is_through()
        worker.end("d-a")
        d.steps(3)
    assert d.serving.is_through()


@in_other_blocks
def test_request_is_preempted_while_its_old_blocks_are_in_doubt(decoding):
    """It begins anew once more, and they are still nobody's."""
    d = decoding("recompute")
    request = d.begin_read(max_tokens=4)
    d.workers[0].fail("d-a")
    d.steps(ROUNDS + 1)
    d.serving.scheduler.running.remove(request)
    d.serving.scheduler._preempt_request(request, time.monotonic())
    d.check()
    d.steps(8)
    assert request.num_preemptions == 1
    assert d.serving.finished == {"d-a": FinishReason.LENGTH}
    assert d.serving.num_used_blocks() == 3
    d.end_all()
    assert d.serving.is_through()


@in_other_blocks
@pytest.mark.parametrize("moment", ["running", "over"])
def test_name_of_a_request_in_doubt_is_not_read_for_again(decoding, moment):
    """A client that uses a name twice is computed; reports on the first read are not his."""
    d = decoding("recompute")
    d.begin_read()
    d.workers[0].fail("d-a")
    d.steps(ROUNDS + 3)
    assert d.serving.finished.pop("d-a") == FinishReason.LENGTH
    d.serving.add("d-a", from_prefill(remote_request_id="p-b"), first_token=100, max_tokens=6)
    assert d.steps(1) == {"d-a": PROMPT_TOKENS}
    if moment == "running":
        d.end_all()
    d.steps(8)
    d.end_all()
    assert d.serving.finished == {"d-a": FinishReason.LENGTH}
    assert d.serving.is_through()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("end", ["read", "abort"])
def test_windows_give_no_block_up_that_is_read_into(decoding, policy, end):
    """A request of a model with windows keeps the blocks of all groups."""
    d = decoding(policy, window_tokens=BLOCK_TOKENS)
    params = from_prefill(remote_block_ids=[[5, 2, 9], [7, 8]])
    d.serving.add("d-a", params, max_tokens=2)
    d.steps(1)
    in_doubt = d.workers[0].reading["d-a"]
    assert len(in_doubt) > 3
    if end == "abort":
        d.serving.abort("d-a")
    d.workers[0].fail("d-a")
    d.steps(8)
    assert d.serving.num_used_blocks() >= len(in_doubt)
    d.end_all()
    d.steps(4)
    assert d.serving.is_through()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_read_of_the_last_turn_fails_on_a_prefill_engine(decoding, policy):
    """What it computes in place of it is offered to the next engine."""
    p = decoding(policy, bidirectional_kv_xfer=True, kv_recompute_threshold=8)
    p.serving.add("p-a", from_decode(remote_num_tokens=33))
    p.steps(1)
    p.workers[1].fail("p-a")
    p.steps(ROUNDS)
    if policy == "fail":
        assert p.serving.finished == {"p-a": FinishReason.ERROR}
        p.end_all("p-a")
        assert p.serving.is_through()
        return
    p.end_all("p-a")
    params = p.serving.handed_over["p-a"]
    (offered,) = params["remote_block_ids"]
    assert params["remote_num_tokens"] == PROMPT_TOKENS
    assert p.serving.num_used_blocks() == len(offered) == 3


@pytest.mark.parametrize("policy", ["fail", pytest.param("recompute", marks=in_other_blocks)])
def test_renewals_end_when_a_read_has_failed(decoding, policy):
    """Nobody here wants the blocks any more, however long ours are in doubt."""
    d = decoding(policy)
    d.begin_read(max_tokens=20)
    d.workers[0].fail("d-a")
    ended = set()
    # Workers are told with the step after that.
    for _ in range(ROUNDS + 1):
        d.steps(1)
        ended |= d.serving.told.ended
    assert ended == {"d-a"}


def test_request_that_no_worker_hears_of_leaves_nothing(decoding):
    """It is aborted before a step: the producer is told, and nothing but its name is kept."""
    d = decoding()
    side = d.serving.scheduler.connector.connector_scheduler
    d.steps(1)
    before = [sizes(each) for each in (side, *d.connectors)]
    d.serving.add("d-a", from_prefill())
    d.serving.abort("d-a")
    d.steps(2)
    assert d.serving.is_through()
    assert not d.serving.scheduler.has_requests()
    side.take_stats()
    after = [sizes(each) for each in (side, *d.connectors)]
    # vLLM may tell of it once more.
    before[0]["ReshardScheduler._reads._ended"] += 1
    assert after == before


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_with_asynchronous_scheduling(decoding, policy):
    """Steps that were begun before the scheduler hears of a failure change nothing."""
    d = decoding(policy, asynchronous=True)
    request = d.begin_read(max_tokens=3)
    in_doubt = d.workers[0].reading["d-a"]
    d.workers[0].fail("d-a")
    begun = d.serving.begin()
    for _ in range(8):
        following = d.serving.begin()
        d.end(begun)
        begun = following
        d.check()
        assert (
            policy == "fail"
            or not request.num_output_tokens
            or (in_doubt.isdisjoint(d.blocks(request)))
        )
    d.end(begun)
    expected = FinishReason.ERROR
    if policy == "recompute":
        expected = FinishReason.LENGTH if RECOMPUTES_IN_OTHER_BLOCKS else None
    assert d.serving.finished.get("d-a") == expected
    d.end_all()
    d.steps(4)
    assert d.serving.is_through()

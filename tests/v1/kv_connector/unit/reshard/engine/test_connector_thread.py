# SPDX-License-Identifier: Apache-2.0
"""The connector's thread: what goes in, what comes out, and when it rests."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.v1.kv_connector.unit.reshard.engine.workers import wait_until
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine import connector_thread
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.connector_thread import (
    SWITCH_S,
    ConnectorThread,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.metadata import (
    ReshardConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.stalls import STALL_S, StallWatch
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.stats import ReshardStats
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.transfer_engine import (
    SchedulerStep,
    WorkerReport,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import ConnectorThreadError

DEADLINE_S = 60.0


class TransferEngine:
    """Ends what it is asked for in its next poll, and notes who runs it."""

    def __init__(self) -> None:
        self.begun = self.num_polls = self.num_taken_up = 0
        self.turned_s: list[float] = []
        self.threads: set[int] = set()
        self.producer: list[str] = []
        self.is_moving = self.is_packing = self.has_backlog = self.has_moved = False
        self.due_s: float | None = None
        self.fault: Exception | None = None
        self.may_poll, self.may_tell = threading.Event(), threading.Event()
        self.may_poll.set()
        self.may_tell.set()
        self.stats: ReshardStats | None = None
        self.stood_still_s: list[float] = []
        self.closed_by: int | None = None

    def poll(self, steps: list[SchedulerStep], now_s: float) -> WorkerReport:
        """Poll."""
        self.begun += 1
        assert self.may_poll.wait(DEADLINE_S)
        self.num_polls += 1
        taken = list(steps)
        steps.clear()
        self.num_taken_up += len(taken)
        self.turned_s.append(now_s)
        self.threads.add(threading.get_ident())
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        ended = {request for step in taken if step.metadata for request in step.metadata.admitted}
        return WorkerReport(received=ended, stats=self.stats)

    def tell_producers(self, now_s: float) -> None:
        """Tell them, once the test allows it."""
        assert self.may_tell.wait(DEADLINE_S)

    def drain(self, now_s: float) -> bool:
        """Nothing is under way."""
        return False

    def extend_deadlines(self, for_s: float) -> None:
        """Note for how long."""
        self.stood_still_s.append(for_s)

    def next_due_s(self, now_s: float) -> float | None:
        """What the test says."""
        return self.due_s

    def close(self, now_s: float) -> None:
        """Note who does."""
        self.closed_by = threading.get_ident()


class News(threading.Event):
    """Notes how long is waited for it, and calls somebody first."""

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.before = before
        self.waited_s: list[float | None] = []
        self.came: list[bool] = []

    def wait(self, timeout: float | None = None) -> bool:
        """Wait."""
        self.waited_s.append(timeout)
        self.before()
        self.came.append(super().wait(timeout))
        return self.came[-1]


@pytest.fixture
def transfer_engine() -> TransferEngine:
    """An transfer engine in which nothing is under way."""
    return TransferEngine()


@pytest.fixture
def news(monkeypatch) -> News:
    """What threads that are made from now on wait for."""
    news = News()
    monkeypatch.setattr(connector_thread, "Event", lambda: news)
    return news


@pytest.fixture
def thread(transfer_engine, news) -> Iterator[ConnectorThread]:
    """A thread that runs it, and sleeps after its first poll."""
    thread = ConnectorThread(transfer_engine)
    thread.start()
    wait_until(lambda: news.waited_s)
    yield thread
    thread.close()


def ask(thread: ConnectorThread, *requests: str) -> None:
    """Hand a step over."""
    thread.hand_over(SchedulerStep(ReshardConnectorMetadata(admitted=set(requests))))


def collect(thread: ConnectorThread, count: int) -> set[str]:
    """Collect until so many requests have ended."""
    found: set[str] = set()
    deadline = time.monotonic() + DEADLINE_S
    while len(found) < count:
        assert time.monotonic() < deadline, found
        found |= thread.collect().received
    return found


def test_what_was_asked_for_is_collected_once(thread):
    """By whoever asks next, however many steps were handed over before."""
    for number in range(10):
        ask(thread, f"r{number}")
    assert collect(thread, 10) == {f"r{number}" for number in range(10)}
    assert not thread.collect()


def test_everything_happens_in_one_other_thread(thread, transfer_engine):
    """NIXL's agents belong to one thread, until it has ended."""
    ask(thread, "r")
    collect(thread, 1)
    assert (
        len(transfer_engine.threads) == 1 and threading.get_ident() not in transfer_engine.threads
    )
    thread.close()
    assert transfer_engine.closed_by == threading.get_ident()
    num_polls = transfer_engine.num_polls
    ask(thread, "too late")
    assert transfer_engine.num_polls == num_polls


def test_quiet_transfer_engine_is_left_alone(transfer_engine):
    """An engine that transfers nothing has others listened to now and then, not at every step."""
    now_s = [0.0]
    thread = ConnectorThread(transfer_engine, lambda: now_s[0])
    thread.start()
    try:
        for at_s, num_asked in ((0.0, 1), (0.1, 1), (0.25, 2), (0.4, 2), (0.5, 3)):
            now_s[0] = at_s
            for _ in range(100):
                thread.collect()
            wait_until(lambda so_far=num_asked: transfer_engine.num_taken_up >= so_far)
            assert transfer_engine.num_taken_up == num_asked
    finally:
        thread.close()


@pytest.mark.parametrize("more", ["is_moving", "has_backlog"])
def test_transfer_engine_with_more_to_do_is_turned_by_itself(thread, transfer_engine, more):
    """Whatever the length of the engine's steps: nobody has to call for the next poll."""
    setattr(transfer_engine, more, True)
    thread.wake()
    wait_until(lambda: transfer_engine.num_polls >= 50)


def test_thread_looks_often_again_once_something_has_arrived(transfer_engine, news):
    """What follows, as the lookup of a lease, is over sooner than most reads."""
    thread = ConnectorThread(transfer_engine)
    transfer_engine.is_moving = True
    thread.start()
    try:
        wait_until(lambda: len(news.waited_s) > 20)
        assert news.waited_s[0] < news.waited_s[-1]
        transfer_engine.has_moved = True
        wait_until(lambda: news.waited_s[-1] == news.waited_s[0])
    finally:
        thread.close()


def test_thread_sleeps_until_something_is_due(thread, transfer_engine):
    """It looks at nothing in between, and is not late by a look."""
    due_s = transfer_engine.due_s = time.monotonic() + 0.2
    thread.wake()
    wait_until(lambda: bool(transfer_engine.turned_s) and transfer_engine.turned_s[-1] >= due_s)
    before = [turned_s for turned_s in transfer_engine.turned_s if turned_s < due_s]
    assert len(before) <= 3


def test_interpreter_is_let_go_of_sooner_than_by_default(thread):
    """Whoever computes in this process keeps the engine's thread waiting for so long at most."""
    assert sys.getswitchinterval() <= SWITCH_S


def test_turn_that_fails_is_not_the_last(thread, transfer_engine, caplog_vllm):
    """The log has the traceback; the next one comes by itself, and the next request is served."""
    transfer_engine.fault = ValueError("nobody thought of this")
    num_polls = transfer_engine.num_polls
    thread.wake()
    wait_until(lambda: transfer_engine.num_polls >= num_polls + 2)
    assert "nobody thought of this" in caplog_vllm.text
    ask(thread, "r")
    assert collect(thread, 1) == {"r"}


def ended(thread: ConnectorThread) -> ConnectorThreadError:
    """What the engine's next steps raise, at the latest after a few seconds."""
    found: list[ConnectorThreadError] = []
    deadline_s = time.monotonic() + 5.0

    def raises() -> bool:
        assert time.monotonic() < deadline_s
        try:
            thread.collect()
        except ConnectorThreadError as error:
            found.append(error)
        return bool(found)

    wait_until(raises)
    return found[0]


def test_thread_that_fails_before_its_first_turn_ends_the_engine(transfer_engine, caplog_vllm):
    """As where the cores that it should run on cannot be had: nothing waits for it in silence."""

    def prepare() -> None:
        raise OSError(22, "Invalid argument")

    thread = ConnectorThread(transfer_engine, prepare=prepare)
    thread.start()
    ask(thread, "r")
    error = ended(thread)
    assert "OSError(22, 'Invalid argument')" in str(error) and "restart this engine" in str(error)
    assert "cannot go on" in caplog_vllm.text and not transfer_engine.num_polls
    thread.close()
    assert transfer_engine.closed_by is not None


@pytest.mark.parametrize("where", ["poll", "tell_producers", "next_due_s"])
def test_thread_whose_turns_all_fail_ends_the_engine(transfer_engine, where, caplog_vllm):
    """Wherever in a poll it is: what the next poll cannot do either, none can."""

    def fail(*_: object) -> None:
        raise ValueError("nobody thought of this")

    setattr(transfer_engine, where, fail)
    thread = ConnectorThread(transfer_engine)
    thread.start()
    error = ended(thread)
    assert "ValueError('nobody thought of this')" in str(error)
    assert isinstance(error.__cause__, ValueError)
    thread.close()


def test_what_a_failed_turn_did_not_take_up_is_there_for_the_next(thread, transfer_engine):
    """A step that was handed over is never lost."""
    poll, faults = transfer_engine.poll, [ValueError("before anything was taken")]

    def fail_once(steps: list[SchedulerStep], now_s: float) -> WorkerReport:
        if steps and faults:
            raise faults.pop()
        return poll(steps, now_s)

    transfer_engine.poll = fail_once
    ask(thread, "r")
    assert collect(thread, 1) == {"r"} and not faults


def test_thread_that_never_began_is_closed(transfer_engine):
    """An engine may fail before its caches are registered."""
    ConnectorThread(transfer_engine).close()
    assert transfer_engine.closed_by is not None


class Clock:
    """Goes on when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now_s


def test_engine_hears_before_producers_do(thread, transfer_engine):
    """What has ended is collected while notifications are still being sent."""
    transfer_engine.may_tell.clear()
    ask(thread, "r")
    assert collect(thread, 1) == {"r"}
    transfer_engine.may_tell.set()


def test_poll_that_does_not_come_back_is_told_once(transfer_engine, caplog_vllm):
    """The engine's thread says how long it has taken, and where it is."""
    clock = Clock()
    thread = ConnectorThread(transfer_engine, clock)
    transfer_engine.may_poll.clear()
    thread.start()
    try:
        wait_until(lambda: transfer_engine.begun)
        clock.now_s += STALL_S - 0.1
        thread.collect()
        assert not caplog_vllm.text
        clock.now_s += 0.2
        thread.collect()
        thread.collect()
        (line,) = (each.getMessage() for each in caplog_vllm.records)
        assert line.startswith(
            "The connector's thread has not come round for 2.1 s: it is in wait ("
        )
        assert "poll (" in line
    finally:
        transfer_engine.may_poll.set()
        thread.close()


def test_turn_that_begins_late_is_told_of(transfer_engine, monkeypatch, caplog_vllm):
    """For how long nobody could be heard, whether a call or the machine has held the thread."""
    monkeypatch.setattr(connector_thread, "STALL_S", 0.2)
    thread = ConnectorThread(transfer_engine)
    transfer_engine.may_poll.clear()
    thread.start()
    try:
        wait_until(lambda: transfer_engine.begun)
        late_at_s = time.monotonic() + 0.3
        wait_until(lambda: time.monotonic() > late_at_s)
        transfer_engine.may_poll.set()
        thread.wake()
        wait_until(lambda: transfer_engine.stood_still_s)
        assert transfer_engine.stood_still_s[0] >= 0.3
        assert "comes round 0." in caplog_vllm.text
    finally:
        transfer_engine.may_poll.set()
        thread.close()


def test_thread_that_holds_something_comes_round_by_itself(thread, transfer_engine, news):
    """Else nobody would know for how long it stood still; one that holds nothing just sleeps."""
    assert news.waited_s[-1] is None
    transfer_engine.producer.append("r")
    thread.wake()
    wait_until(lambda: news.waited_s[-1] is not None)
    assert news.waited_s[-1] <= STALL_S
    assert not transfer_engine.stood_still_s


def test_step_that_does_not_end_is_told_once(transfer_engine, caplog_vllm):
    """The connector's thread says so, however idle it is; a step that has ended is no news."""
    clock = Clock()
    thread = ConnectorThread(transfer_engine, clock)
    thread.start()
    try:
        thread.begin_step()
        thread.collect()
        clock.now_s += 10 * STALL_S
        polls = transfer_engine.num_polls
        thread.wake()
        wait_until(lambda: transfer_engine.num_polls > polls)
        thread.begin_step()
        clock.now_s += STALL_S + 0.1
        thread.wake()
        wait_until(lambda: "The engine's step has not come round for 2.1 s" in caplog_vllm.text)
        polls = transfer_engine.num_polls
        thread.wake()
        wait_until(lambda: transfer_engine.num_polls > polls + 1, thread.wake)
        assert len(caplog_vllm.records) == 1
        assert "test_step_that_does_not_end_is_told_once (" in caplog_vllm.text
    finally:
        thread.close()


def test_call_of_another_thread_that_does_not_come_back_is_told_once(transfer_engine, caplog_vllm):
    """As of the dialer's, should NIXL block: by this thread, though it sleeps otherwise."""
    clock, call = Clock(), StallWatch("dialer's thread", 10.0)
    thread = ConnectorThread(transfer_engine, clock, watched=[call])
    call.begin(clock())
    thread.start()
    try:
        clock.now_s += 9.9
        polls = transfer_engine.num_polls
        thread.wake()
        wait_until(lambda: transfer_engine.num_polls > polls + 1, thread.wake)
        assert not caplog_vllm.text
        clock.now_s += 0.2
        line = "The dialer's thread has not come round for 10.1 s: it is in "
        wait_until(lambda: line in caplog_vllm.text, thread.wake)
        polls = transfer_engine.num_polls
        wait_until(lambda: transfer_engine.num_polls > polls + 1, thread.wake)
        assert len(caplog_vllm.records) == 1
    finally:
        thread.close()

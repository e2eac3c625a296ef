# SPDX-License-Identifier: Apache-2.0
"""What a rank sees of itself."""

from __future__ import annotations

import threading
import time

from benchmarks.specs import PauseSummary
from benchmarks.watching import Pauses, ThreadTimes

WORK_S = 0.05


def work() -> None:
    """Take some CPU time."""
    until_s = time.thread_time() + WORK_S
    while time.thread_time() < until_s:
        pass


def test_only_threads_that_were_not_there_before_count() -> None:
    """What the calling thread takes is left out, and what a new one takes is not."""
    others = before = ThreadTimes.now()
    work()
    assert ThreadTimes.now().since(before, but=others) == 0

    may_end = threading.Event()
    has_worked = threading.Event()

    def run() -> None:
        work()
        has_worked.set()
        may_end.wait()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert has_worked.wait(60)
        assert ThreadTimes.now().since(before, but=others) >= WORK_S / 2
    finally:
        may_end.set()
        thread.join()


def test_longest_pause_of_each_step_counts() -> None:
    """Work that is acted out makes shorter ones than calls; few long steps are not most."""
    pauses = Pauses()
    for duration_s in [1.0] * 199 + [3600.0]:
        pauses.begin_step()
        pauses.add(duration_s)
        pauses.compute(1e-6)
        pauses.add(duration_s / 2)
    assert pauses.summary() == PauseSummary(3600.0, 1.0)

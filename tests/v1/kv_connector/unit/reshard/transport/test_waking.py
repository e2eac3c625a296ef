# SPDX-License-Identifier: Apache-2.0
"""A thread that polls is woken."""

from __future__ import annotations

import zmq

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.waking import Waker


def test_any_number_of_wakes_is_one():
    """None of them blocks, and after a poller was calmed it waits again."""
    waker = Waker()
    poller = zmq.Poller()
    poller.register(waker, zmq.POLLIN)
    assert poller.poll(0) == []
    for _ in range(1_000):
        waker.wake()
    assert poller.poll(0)
    waker.calm()
    assert poller.poll(0) == []
    waker.wake()
    assert poller.poll(0)
    waker.close()


def test_wake_that_comes_too_late_is_no_matter():
    """Threads that look something up may end long after who has asked."""
    waker = Waker()
    waker.close()
    waker.wake()

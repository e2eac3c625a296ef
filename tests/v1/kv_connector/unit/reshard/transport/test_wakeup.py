# SPDX-License-Identifier: Apache-2.0
"""A thread that waits is woken."""

from __future__ import annotations

import threading

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.wakeup import Wakeup


def test_any_number_of_rings_is_one():
    """They are kept for who waits next, and gone once he has or was calmed."""
    bell = Wakeup()
    assert not bell.wait(0)
    for _ in range(2):
        for _ in range(1_000):
            bell.set()
        assert bell.wait(0) and not bell.wait(0)
    bell.set()
    bell.clear()
    assert not bell.wait(0)


def test_who_waits_for_a_bell_is_woken():
    """By any thread, however long he would have waited."""
    there, back = Wakeup(), Wakeup()

    def answer() -> None:
        for _ in range(100):
            assert there.wait(60.0)
            back.set()

    answering = threading.Thread(target=answer)
    answering.start()
    for _ in range(100):
        there.set()
        assert back.wait(60.0)
    answering.join()

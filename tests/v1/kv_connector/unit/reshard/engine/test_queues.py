# SPDX-License-Identifier: Apache-2.0
"""What waits for a poll stays until it is done."""

from __future__ import annotations

from collections import deque

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.queues import taken_once_done


def test_what_is_done_is_taken_out():
    """In its order, and what is added meanwhile after it."""
    queue = deque([1, 2])
    done = []
    for item in taken_once_done(queue):
        done.append(item)
        if item == 1:
            queue.append(3)
    assert done == [1, 2, 3] and not queue


def test_what_an_exception_comes_up_with_stays():
    """The next poll begins with it."""
    queue = deque([1, 2, 3])
    with pytest.raises(ValueError, match="2"):
        for item in taken_once_done(queue):
            if item == 2:
                raise ValueError(item)
    assert list(queue) == [2, 3]


def test_what_a_loop_ends_at_stays():
    """It was not done."""
    queue = deque([1, 2, 3])
    for item in taken_once_done(queue):
        if item == 2:
            break
    assert list(queue) == [2, 3]

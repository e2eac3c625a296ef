# SPDX-License-Identifier: Apache-2.0
"""How a poll works through its queues, so that an exception loses nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TypeVar

_Item = TypeVar("_Item")


def taken_once_done(queue: deque[_Item]) -> Iterator[_Item]:
    """Yield a queue's items, removing each once the next one is requested.

    An item at which an exception is raised, or the loop ends, stays first in the queue. Items added
    meanwhile come last.
    """
    while queue:
        yield queue[0]
        queue.popleft()

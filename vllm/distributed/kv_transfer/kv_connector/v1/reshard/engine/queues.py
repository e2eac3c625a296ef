# SPDX-License-Identifier: Apache-2.0
"""How a poll works through what waits for it, so that an exception loses nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TypeVar

_Item = TypeVar("_Item")


def taken_once_done(queue: deque[_Item]) -> Iterator[_Item]:
    """The items of a queue, each of which is taken out once the next one is asked for.

    One that an exception comes up with, or that a loop ends at, stays the first. What is added
    meanwhile comes last.
    """
    while queue:
        yield queue[0]
        queue.popleft()

# SPDX-License-Identifier: Apache-2.0
"""Time limits for work within a poll.

The connector's thread shares the interpreter with the engine's thread, which may wait for as long
as a poll takes. So work that may pile up is done in pieces, and the budget is checked after each
piece: at least one piece is always done, so all work makes progress.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class Budget:
    """A time limit that starts now.

    Args:
        limit_s: The limit, in seconds.
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._spent_at_s = clock() + limit_s

    @property
    def is_spent(self) -> bool:
        """True if the time is used up; the remaining work is left to the next poll."""
        return self._clock() >= self._spent_at_s


UNLIMITED = Budget(math.inf)
"""A budget that is never spent."""

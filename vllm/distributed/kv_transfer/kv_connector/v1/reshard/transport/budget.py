# SPDX-License-Identifier: Apache-2.0
"""How much of a poll some work may take.

The connector's thread shares the interpreter with the engine's, which waits for as long as a poll
takes at worst. So whatever may pile up is worked off in pieces, and the budget is asked after each
of them: one is always done, so that everything gets on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class Budget:
    """Some time, from now on.

    Args:
        limit_s: How much.
        clock: Seconds that only grow.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._spent_at_s = clock() + limit_s

    @property
    def is_spent(self) -> bool:
        """Whether the rest is for the next poll."""
        return self._clock() >= self._spent_at_s


UNLIMITED = Budget(math.inf)
"""Without a limit."""

# SPDX-License-Identifier: Apache-2.0
"""How one thread detects that another one has stalled, and where."""

from __future__ import annotations

import sys
import threading
import traceback

from vllm.logger import init_logger

from ..errors import one_line

logger = init_logger(__name__)

#: interval stall: the log says where a thread or a step is that has not come round.
STALL_S = 2.0
"""A thread whose round takes longer is logged. A step of a large prompt may take as long; then the
log line says so."""


class StallWatch:
    """One round of a thread, such as a poll or a step, and whether it takes too long.

    `begin` and `end` belong to that thread, `tell_if_stalled` and `stalls_at_s` to the watching
    thread, which sees each value as a whole.

    Args:
        what: Name of the thread or round, for the log.
        limit_s: How long a round may take.
    """

    def __init__(self, what: str, limit_s: float = STALL_S) -> None:
        self._what = what
        self._limit_s = limit_s
        self._began_s: float | None = None
        self._thread_id = 0
        self._told_s: float | None = None

    def begin(self, now_s: float) -> None:
        """Begin a round."""
        self._thread_id = threading.get_ident()
        self._began_s = now_s

    def end(self) -> None:
        """End the round, if one is under way."""
        self._began_s = None

    @property
    def stalls_at_s(self) -> float | None:
        """When the current round takes too long; None without one, or once it is logged."""
        began_s = self._began_s
        return None if began_s is None or began_s == self._told_s else began_s + self._limit_s

    def tell_if_stalled(self, now_s: float) -> None:
        """Log, once for each round, that it takes too long and where its thread is."""
        stalls_at_s, began_s = self.stalls_at_s, self._began_s
        if stalls_at_s is None or began_s is None or now_s < stalls_at_s:
            return
        self._told_s = began_s
        frame = sys._current_frames().get(self._thread_id)
        where = [] if frame is None else traceback.extract_stack(frame)[-4:]
        logger.warning(
            "The %s has not come round for %.1f s: it is in %s.",
            one_line(self._what),
            now_s - began_s,
            " < ".join(
                f"{one_line(each.name)} ({one_line(each.filename)}:{each.lineno})"
                for each in reversed(where)
            )
            or "no Python code",
        )

# SPDX-License-Identifier: Apache-2.0
"""How threads wake one that waits."""

from __future__ import annotations

from queue import Empty, SimpleQueue


class Wakeup:
    """What one thread waits for and others ring.

    Setting it waits for nothing. `threading.Event` has a lock for that, and a thread that has lost
    its core while it held it keeps all others waiting: 18 ms were seen.

    `set` may be called by any thread; everything else belongs to the one that waits.
    """

    def __init__(self) -> None:
        self._rung: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        """Wake the thread that waits, or the next wait at once."""
        if self._rung.empty():
            self._rung.put(None)

    def clear(self) -> None:
        """Discard pending wake-ups."""
        # No other thread takes from it.
        while not self._rung.empty():
            self._rung.get_nowait()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is set; returns whether it was, in time.

        Args:
            timeout_s: For so long at most; None for ever.
        """
        try:
            self._rung.get(timeout=timeout_s)
        except Empty:
            return False
        return True

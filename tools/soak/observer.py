# SPDX-License-Identifier: Apache-2.0
"""Reads something again and again, in a thread of its own, for a plot over time."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Observer:
    """Reads from when it is entered until it is left.

    Args:
        read: reads, and notes it down.
        interval_s: how long it rests in between.
    """

    def __init__(self, read: Callable[[], object], interval_s: float = 2.0) -> None:
        self._read = read
        self._interval_s = interval_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="observer", daemon=True)

    def __enter__(self) -> Observer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._interval_s):
            self._read()

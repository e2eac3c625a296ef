# SPDX-License-Identifier: Apache-2.0
"""How threads wake one that waits: for a bell, or in a ZeroMQ poller."""

from __future__ import annotations

import contextlib
import socket
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


class Waker:
    """A descriptor to poll for, which any thread makes readable.

    `wake` may be called by any thread and at any time, also after `close`; everything else belongs
    to the thread that polls.
    """

    def __init__(self) -> None:
        self._readable, self._writable = socket.socketpair()
        self._readable.setblocking(False)
        self._writable.setblocking(False)

    def fileno(self) -> int:
        """What to poll for being readable."""
        return self._readable.fileno()

    def wake(self) -> None:
        """Make the poller return, now or when it is next called."""
        # Where the pipe is full, or closed, there is no thread to wake.
        with contextlib.suppress(OSError):
            self._writable.send(b"\0")

    def clear(self) -> None:
        """Discard pending wake-ups."""
        with contextlib.suppress(BlockingIOError):
            while self._readable.recv(4096):
                pass

    def close(self) -> None:
        """Give the descriptors back."""
        self._readable.close()
        self._writable.close()

# SPDX-License-Identifier: Apache-2.0
"""How other threads wake one that waits in a ZeroMQ poller."""

from __future__ import annotations

import contextlib
import socket


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
        # Where the pipe is full, or nobody polls any more, there is nobody to wake.
        with contextlib.suppress(OSError):
            self._writable.send(b"\0")

    def calm(self) -> None:
        """Wait for the next wake from now on."""
        with contextlib.suppress(BlockingIOError):
            while self._readable.recv(4096):
                pass

    def close(self) -> None:
        """Give the descriptors back."""
        self._readable.close()
        self._writable.close()

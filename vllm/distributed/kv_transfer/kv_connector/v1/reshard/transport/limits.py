# SPDX-License-Identifier: Apache-2.0
"""This process's limit of open files, looked at before another engine costs any.

Where descriptors run out in a library's background, nobody hears of it: UCX closes its listening
socket for good when `accept` finds none (1.23), and the worker is deaf to new readers while all
looks well. So what other hosts can have this process open is bounded by shares of its limit, and
no further engine is met while most of them are open.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
from vllm.logger import init_logger

from ..errors import ConnectorThreadError

logger = init_logger(__name__)

_OPEN = Path("/proc/self/fd")

FULL = 0.8
"""Share of the limit above which no further engine is met."""

_FREE_AGAIN = 0.75
"""Share below which further engines are met again."""

_MOST_FILES = 1 << 16
"""A soft limit is raised to the hard one, but not beyond this: some programs close as many."""

#: interval open files: they are counted again.
LOOK_INTERVAL_S = 1.0


def raise_file_limit() -> None:
    """Raise the soft limit of open files as far as this process may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _MOST_FILES)), hard))


def file_limit() -> int:
    """Return how many files this process may open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def within_limit(most: int, share: float, files_each: int) -> int:
    """Return a bound on what holds files, lowered to its share of this process's limit.

    Args:
        most: The bound where the limit is high.
        share: The share of the limit.
        files_each: Files that each of them holds.
    """
    return max(1, min(most, int(share * file_limit() / files_each)))


def count_files() -> int:
    """Count this process's open files; returns the limit where none is left to look with."""
    try:
        return sum(1 for _ in _OPEN.iterdir())
    except OSError:
        return file_limit()


def shortage(share: float = FULL) -> str:
    """Return why no further engine is met; empty while no more than a share of files is open."""
    count, limit = count_files(), file_limit()
    return f"{count} of {limit} files are open" if count > share * limit else ""


def listeners() -> set[tuple[int, int]]:
    """Return file descriptor and port of this process's TCP listeners, those of libraries too."""
    return {
        (each.fd, each.laddr.port)
        for each in psutil.Process().net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    }


class FileWatch:
    """Looks now and then whether this process's files run out. Belongs to one thread.

    Args:
        record: Called with the share of the limit that is used.

    Attributes:
        shortage: Why no further engine is met; empty while any is.
    """

    def __init__(self, record: Callable[[float], object]) -> None:
        self.shortage = ""
        self._needed: list[tuple[int, int, int | None]] = []
        self._record = record
        self._due_s = 0.0

    def need(self, needed: Iterable[tuple[int, int]]) -> None:
        """Have `look` fail once one of some `listeners` has been closed."""
        self._needed = [(descriptor, port, _inode(descriptor)) for descriptor, port in needed]

    def look(self, now_s: float) -> bool:
        """Count, if that is due; return whether a shortage has begun or ended.

        Raises:
            ConnectorThreadError: One of the needed sockets has been closed.
        """
        if now_s < self._due_s:
            return False
        self._due_s = now_s + LOOK_INTERVAL_S
        for descriptor, port, inode in self._needed:
            if _inode(descriptor) != inode:
                raise ConnectorThreadError(
                    f"UCX has closed its port {port:d}, as it does where file descriptors run out "
                    f"(the limit is {file_limit()}), and no further engine could read from this "
                    "one: raise the limit (ulimit -n), and restart this engine"
                )
        self._record(round(count_files() / file_limit(), 2))
        before, self.shortage = self.shortage, shortage(_FREE_AGAIN if self.shortage else FULL)
        if self.shortage and not before:
            logger.warning(
                "%s, so that no further engine is met: raise this process's limit (ulimit -n), "
                "and see what holds them (ls -l /proc/%d/fd).",
                self.shortage,
                os.getpid(),
            )
        return bool(self.shortage) != bool(before)


def _inode(descriptor: int) -> int | None:
    """Return what tells a file from another one under its descriptor; None if it is closed."""
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return None

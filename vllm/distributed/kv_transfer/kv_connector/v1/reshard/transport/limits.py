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
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True, slots=True)
class OpenFiles:
    """Open files of this process.

    Attributes:
        count: How many there are.
        limit: How many there may be.
    """

    count: int
    limit: int

    @property
    def ratio(self) -> float:
        """Share of the limit."""
        return self.count / self.limit

    def __str__(self) -> str:
        return f"{self.count} of {self.limit} files are open"


def file_limit() -> int:
    """Return how many files this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft > 0 else _MOST_FILES


def open_files() -> OpenFiles:
    """Count this process's open files."""
    try:
        # Linux before 6.2 does not tell the number as the size.
        count = _OPEN.stat().st_size or sum(1 for _ in _OPEN.iterdir())
    except OSError:
        # None is left to look with.
        count = file_limit()
    return OpenFiles(count, file_limit())


def raise_file_limit() -> None:
    """Raise the soft limit of open files as far as this process may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, _MOST_FILES) if hard > 0 else _MOST_FILES
    if 0 < soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def within_limit(most: int, share: float, files_each: int) -> int:
    """Return a bound on what holds files, lowered to its share of this process's limit.

    Args:
        most: The bound where the limit is high.
        share: The share of the limit.
        files_each: Files that each of them holds.
    """
    return max(1, min(most, int(share * file_limit() / files_each)))


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening TCP socket of this process.

    Attributes:
        descriptor: Its file descriptor.
        inode: What tells it from another file under that descriptor.
        port: Where it listens.
    """

    descriptor: int
    inode: int
    port: int

    @property
    def is_closed(self) -> bool:
        """Whether the descriptor is closed, or has become another file's."""
        try:
            return os.fstat(self.descriptor).st_ino != self.inode
        except OSError:
            return True


def listeners() -> set[Listener]:
    """Return the TCP sockets that this process listens on, those of libraries included."""
    found = set()
    for descriptor in [int(each.name) for each in _OPEN.iterdir()]:
        try:
            opened = socket.socket(fileno=descriptor)
        except OSError:
            # It is no socket, or has been closed meanwhile.
            continue
        is_tcp = opened.family in (socket.AF_INET, socket.AF_INET6)
        if is_tcp and opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            inode = os.fstat(descriptor).st_ino
            found.add(Listener(descriptor, inode, opened.getsockname()[1]))
        # It is not ours to close.
        opened.detach()
    return found


class FileWatch:
    """Looks now and then whether this process's files run out. Belongs to one thread.

    Args:
        record: Called with the share of the limit, in hundredths, when it has changed.

    Attributes:
        shortage: Why no further engine is met; empty while any is.
        needed: Sockets without which this process is of no use.
    """

    def __init__(self, record: Callable[[float], object]) -> None:
        self.shortage = ""
        self.needed: frozenset[Listener] = frozenset()
        self._record = record
        self._ratio = 0.0
        self._due_s = 0.0

    def look(self, now_s: float) -> bool:
        """Count, if that is due; return whether a shortage has begun or ended.

        Raises:
            ConnectorThreadError: One of the needed sockets has been closed.
        """
        if now_s < self._due_s:
            return False
        self._due_s = now_s + LOOK_INTERVAL_S
        files = open_files()
        if (lost := next((each for each in self.needed if each.is_closed), None)) is not None:
            raise ConnectorThreadError(
                f"UCX has closed its port {lost.port:d}, as it does where file descriptors run out "
                f"({files}), and no further engine could read from this one: raise the limit "
                "(ulimit -n), and restart this engine"
            )
        if (ratio := round(files.ratio, 2)) != self._ratio:
            self._ratio = ratio
            self._record(ratio)
        is_short = files.ratio > (_FREE_AGAIN if self.shortage else FULL)
        if is_short == bool(self.shortage):
            return False
        self.shortage = str(files) if is_short else ""
        if is_short:
            logger.warning(
                "%s, so that no further engine is met: raise this process's limit (ulimit -n), "
                "and see what holds them (ls -l /proc/%d/fd).",
                files,
                os.getpid(),
            )
        return True

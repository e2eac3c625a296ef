# SPDX-License-Identifier: Apache-2.0
"""Limits of the machine, looked at before something is begun that would meet them.

Where descriptors run out in a library's background, nobody hears of it: UCX closes its listening
socket for good when `accept` finds none (1.23), and the worker is deaf to new readers while all
looks well. So what other hosts can have this process open is bounded by shares of its limit, and
no further engine is met while most of them are open. Where threads, ports or descriptors run out
while an agent is made, NIXL waits for ever, or has UCX end the process (1.5.1).
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

from vllm.logger import init_logger

from ..errors import ConnectorThreadError, LocalLayoutError, one_line, quote

logger = init_logger(__name__)

_OPEN = "/proc/self/fd"

_LIBC = ctypes.CDLL(None)
_MOST_OF_A_NAME = 128
_INTERNET = (socket.AF_INET, socket.AF_INET6)

FULL = 0.8
"""Share of the limit above which no further engine is met."""

_FREE_AGAIN = 0.75
"""Share below which further engines are met again."""

_MOST_FILES = 1 << 16
"""A soft limit is raised to the hard one, but not beyond this: some programs close as many."""

_FILES_PER_THREAD = 10
_OTHER_THREADS = 3
"""What an agent takes beside a thread and a port for each of its UCX workers, of which it has one
more than `num_threads` (nixl 1.5.1 over TCP)."""

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
        return sum(1 for _ in os.scandir(_OPEN))
    except OSError:
        return file_limit()


def shortage(share: float = FULL, count: int | None = None) -> str:
    """Return why no further engine is met; empty while no more than a share of files is open.

    Args:
        share: The share of the limit.
        count: Open files, if they were counted.
    """
    count, limit = count_files() if count is None else count, file_limit()
    return f"{count} of {limit} files are open" if count > share * limit else ""


def require_room(num_threads: int) -> None:
    """Make sure that there is room for a NIXL agent.

    Args:
        num_threads: Threads of its UCX backend.

    Raises:
        LocalLayoutError: Files, threads or ports are too few.
    """
    num_workers = num_threads + 1
    count, limit, wanted = count_files(), file_limit(), _FILES_PER_THREAD * num_workers
    if count + wanted > limit:
        raise LocalLayoutError(
            f"{count} of {limit} files are open, and NIXL needs {wanted} more: raise the limit "
            "(ulimit -n), or lower num_threads"
        )
    ended = threading.Event()
    trials: list[threading.Thread] = []
    try:
        for _ in range(num_workers + _OTHER_THREADS):
            trial = threading.Thread(target=ended.wait, daemon=True)
            trial.start()
            trials.append(trial)
    except RuntimeError:
        raise LocalLayoutError(
            f"{len(trials)} more threads can be started, and NIXL needs "
            f"{num_workers + _OTHER_THREADS}: raise the limits of threads (ulimit -u, and pids.max "
            "of the container), or lower num_threads"
        ) from None
    finally:
        ended.set()
        for trial in trials:
            trial.join()
    span = os.environ.get("UCX_TCP_PORT_RANGE", "")
    ends = re.fullmatch(r"(\d{1,5})-(\d{1,5})", span)
    if ends is None or "tcp" not in os.environ.get("UCX_TLS", "tcp"):
        return
    free = _count_free(range(int(ends[1]), int(ends[2]) + 1), num_workers)
    if free < num_workers:
        raise LocalLayoutError(
            f"UCX_TCP_PORT_RANGE {quote(span)} has {free} free ports, and NIXL needs "
            f"{num_workers}: widen it (each agent of each engine on this machine takes as many), "
            "or lower num_threads"
        )


def _count_free(ports: Iterable[int], most: int) -> int:
    """Count ports that nobody listens at, up to a number."""
    free = 0
    for port in ports:
        with socket.socket() as trial, suppress(OSError, OverflowError):
            # Connections that have ended are in nobody's way.
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(("", port))
            free += 1
        if free == most:
            break
    return free


def listeners() -> set[tuple[int, int]]:
    """Return file descriptor and port of this process's TCP listeners, those of libraries too."""
    # The tables of /proc/net would tell all of the machine's connections.
    ports = [(int(each.name), _port_listened_at(int(each.name))) for each in os.scandir(_OPEN)]
    return {(descriptor, port) for descriptor, port in ports if port is not None}


def _port_listened_at(descriptor: int) -> int | None:
    """Return the port that an open file listens at; None if it does not, or is closed."""
    # An object of Python's would set the socket to its own mode of blocking.
    listens, size = ctypes.c_int(), ctypes.c_uint(ctypes.sizeof(ctypes.c_int))
    named = socket.SOL_SOCKET, socket.SO_ACCEPTCONN
    if _LIBC.getsockopt(descriptor, *named, ctypes.byref(listens), ctypes.byref(size)):
        return None
    name = ctypes.create_string_buffer(_MOST_OF_A_NAME)
    size.value = len(name)
    if not listens.value or _LIBC.getsockname(descriptor, name, ctypes.byref(size)):
        return None
    family = int.from_bytes(name.raw[:2], sys.byteorder)
    return int.from_bytes(name.raw[2:4], "big") if family in _INTERNET else None


def listeners_told(metadata: bytes, others: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """Return the listeners of a NIXL agent.

    Another thread may have opened one meanwhile, and may close it: only those count whose ports the
    agent's metadata tells, in network byte order.

    Args:
        metadata: The agent's metadata.
        others: The listeners before it was made.
    """
    return {each for each in listeners() - others if each[1].to_bytes(2, "big") in metadata}


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
        count, before = count_files(), self.shortage
        self._record(round(count / file_limit(), 2))
        self.shortage = shortage(_FREE_AGAIN if before else FULL, count)
        if self.shortage and not before:
            logger.warning(
                "%s, so that no further engine is met: raise this process's limit (ulimit -n), "
                "and see what holds them (ls -l /proc/%d/fd).",
                one_line(self.shortage),
                os.getpid(),
            )
        return bool(self.shortage) != bool(before)


def _inode(descriptor: int) -> int | None:
    """Return what tells a file from another one under its descriptor; None if it is closed."""
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return None

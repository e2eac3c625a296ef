# SPDX-License-Identifier: Apache-2.0
"""Thread placement for engines on CPU, where the model computes on cores that other threads share.

There, helper threads stay off the model's cores, and NIXL's progress thread rests between polls.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch

PROGRESS_REST_US = 10_000
"""How long NIXL's progress thread rests between polls, as no core can be spared for a spinning
thread. It wakes when data arrives, so reads are no slower: measured over TCP, 4 KiB to 16 MiB."""


def parents_cores() -> set[int] | None:
    """Return the parent's cores, which were not narrowed for the model; None if unknown."""
    try:
        return os.sched_getaffinity(os.getppid())
    except (AttributeError, OSError):
        # This system has no such call, or the parent has ended.
        return None


def compute_alone(cores: Collection[int] | None) -> None:
    """Make this thread compute single-threaded, on the given cores.

    `torch.set_num_threads` is unsuitable: it also sets a default for other threads, and a worker on
    CPU replaces it by a function that does nothing.
    """
    # torch sets its own number on a thread's first call: have that happen before ours is set.
    torch.get_num_threads()
    openmp = ctypes.CDLL(None)
    if hasattr(openmp, "omp_set_num_threads"):
        openmp.omp_set_num_threads(1)
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


@contextmanager
def running_on(cores: Collection[int] | None) -> Iterator[None]:
    """Bind this thread to the given cores within the context, and the threads that it starts there.

    That includes threads of libraries, which offer no other way to set their cores.
    """
    if not cores or not hasattr(os, "sched_setaffinity"):
        yield
        return
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)

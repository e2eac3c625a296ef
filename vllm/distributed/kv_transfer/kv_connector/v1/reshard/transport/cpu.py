# SPDX-License-Identifier: Apache-2.0
"""What is for engines on CPU only, where the model computes on the cores that all threads share.

There, threads that help the model's stay off its cores, and those of NIXL's rest.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch

PROGRESS_REST_US = 10_000
"""How long NIXL's progress thread rests: no core is to spare for one that spins. It wakes when
something comes in, so that a read is no slower: measured over TCP, 4 KiB to 16 MiB."""


def parents_cores() -> set[int] | None:
    """The cores of the process that has started this one, which are not bound since."""
    try:
        return os.sched_getaffinity(os.getppid())
    except (AttributeError, OSError):
        # There is no such thing on this system, or no such process any more.
        return None


def compute_alone(cores: Collection[int] | None) -> None:
    """Let this thread compute by itself, on some of the cores.

    `torch.set_num_threads` would not do: it sets a default for threads of others as well, and a
    worker on CPU replaces it by one that does nothing.
    """
    # What torch sets when a thread first asks comes before what is set here.
    torch.get_num_threads()
    openmp = ctypes.CDLL(None)
    if hasattr(openmp, "omp_set_num_threads"):
        openmp.omp_set_num_threads(1)
    run_on(cores)


def run_on(cores: Collection[int] | None) -> None:
    """Let the calling thread run on some cores; on any where none are named."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


@contextmanager
def running_on(cores: Collection[int] | None) -> Iterator[None]:
    """Let this thread, and threads that it starts within, run on some cores.

    Threads of libraries are among them, whose cores cannot be set elsewhere.
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

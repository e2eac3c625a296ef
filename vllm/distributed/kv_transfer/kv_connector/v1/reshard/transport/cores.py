# SPDX-License-Identifier: Apache-2.0
"""Which cores threads run on: on CPU, those that help the model's stay off its cores."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager


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

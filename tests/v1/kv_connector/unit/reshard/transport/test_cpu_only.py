# SPDX-License-Identifier: Apache-2.0
"""Threads run where they are told, and no other thread moves."""

from __future__ import annotations

import os
import threading

import pytest

from tests.v1.kv_connector.unit.reshard.programs import run_program
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.cpu import (
    compute_alone,
    running_on,
)

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="needs Linux's affinity"
)


THREADS = """
import threading
import torch
from reshard.transport.cpu import compute_alone

torch.set_num_threads(2)
torch.ones(1 << 20).sum()
torch.set_num_threads = lambda count: None  # As a worker on CPU has it.

def run():
    compute_alone(None)
    print(torch.get_num_threads())

other = threading.Thread(target=run)
other.start()
other.join()
print(torch.get_num_threads())
"""


def cores_of_thread(cores: set[int] | None) -> set[int]:
    """Where a thread may run that computes alone on these cores."""
    seen: list[set[int]] = []

    def run() -> None:
        compute_alone(cores)
        seen.append(os.sched_getaffinity(0))

    other = threading.Thread(target=run)
    other.start()
    other.join()
    (where,) = seen
    return where


def test_thread_computes_with_one_core_and_leaves_others_theirs():
    """Also in a worker on CPU, where torch's own setting does nothing."""
    run = run_program(THREADS)
    assert run.stdout.split()[-2:] == ["1", "2"]


def test_thread_runs_where_it_is_told():
    """And the calling thread keeps its own cores."""
    own = os.sched_getaffinity(0)
    assert cores_of_thread({min(own)}) == {min(own)}
    assert os.sched_getaffinity(0) == own


def test_threads_that_are_started_within_run_there():
    """Afterwards the calling thread is where it was, whatever has happened."""
    own, seen = os.sched_getaffinity(0), []
    with pytest.raises(ValueError, match="no more"), running_on({min(own)}):
        other = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        other.start()
        other.join()
        raise ValueError("no more")
    assert seen == [{min(own)}]
    assert os.sched_getaffinity(0) == own


@pytest.mark.parametrize("cores", [None, set()])
def test_nothing_changes_where_no_cores_are_named(cores):
    """As on systems that have no such thing."""
    own = os.sched_getaffinity(0)
    assert cores_of_thread(cores) == own
    with running_on(cores):
        assert os.sched_getaffinity(0) == own

# SPDX-License-Identifier: Apache-2.0
"""The thread that copies; what it copies is judged in `test_staging`."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures.thread import BrokenThreadPool
from queue import SimpleQueue

import numpy as np
import pytest
import torch

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.staging import Scatter
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.scatter import (
    DeviceScatterer,
    HostScatterer,
)

THREADS = """
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport import scatter

torch.set_num_threads(2)
torch.ones(1 << 20).sum()
torch.set_num_threads = lambda count: None  # As a worker on CPU has it.
tensor = torch.zeros(64, dtype=torch.uint8)
scatterer = scatter.HostScatterer(tensor, [tensor])
print(scatterer._thread.submit(torch.get_num_threads).result(), torch.get_num_threads())
"""


def pieces(dst: torch.Tensor, targets: list[int]) -> Scatter:
    """A copy of pieces of 8 bytes from the arena's beginning to these places."""
    return Scatter(
        8 * np.arange(len(targets)),
        dst.data_ptr() + np.array(targets),
        num_heads=1,
        num_slots=1,
        slot_bytes=8,
        src_strides_bytes=(0, 0),
        dst_strides_bytes=(0, 0),
    )


def test_copying_thread_computes_with_one_core_and_leaves_others_theirs():
    """Also in a worker on CPU, where torch's own setting does nothing."""
    run = subprocess.run(
        [sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=120, check=True
    )
    assert run.stdout.split()[-2:] == ["1", "2"]


@pytest.mark.parametrize("scatterer", [HostScatterer, DeviceScatterer])
def test_caches_may_lie_anywhere(scatterer):
    """Chunks of one copy go to several allocations, in any order of theirs."""
    arena = torch.arange(64, dtype=torch.uint8)
    caches = [torch.zeros(4096, dtype=torch.uint8) for _ in range(3)]
    copies = scatterer(arena, caches)
    base = caches[0]
    targets = [(cache.data_ptr() - base.data_ptr()) + 16 * n for n, cache in enumerate(caches)]
    assert copies.submit(pieces(base, targets)).fault() is None
    copies.close()
    for number, cache in enumerate(caches):
        expected = torch.zeros_like(cache)
        expected[16 * number : 16 * number + 8] = arena[8 * number : 8 * number + 8]
        assert torch.equal(cache, expected)


def test_copy_that_fails_says_so():
    """An address that is nobody's ends this copy with a reason, and the next one is made."""
    arena, cache = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    copies = HostScatterer(arena, [cache])
    broken, whole = copies.submit(pieces(cache, [1 << 40])), copies.submit(pieces(cache, [8]))
    assert "could not be put in their places" in broken.fault() and broken.done()
    assert whole.fault() is None
    copies.close()
    assert cache[8:16].tolist() == list(range(8))


def test_end_of_each_copy_is_announced():
    """Whoever waits for it need not look, and finds it done."""
    arena, cache = (torch.zeros(64, dtype=torch.uint8) for _ in range(2))
    announced: SimpleQueue[None] = SimpleQueue()
    copies = HostScatterer(arena, [cache], announce=lambda: announced.put(None))
    try:
        for _ in range(3):
            copy = copies.submit(pieces(cache, [8]))
            announced.get(timeout=60)
            assert copy.done()
    finally:
        copies.close()


def test_thread_that_cannot_be_had_is_missed_at_once(monkeypatch):
    """Not by a copy, which would be made when there are threads again, into others' blocks."""

    def no_more(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    tensor = torch.zeros(64, dtype=torch.uint8)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            HostScatterer(tensor, [tensor])
    copies = HostScatterer(tensor, [tensor])
    monkeypatch.setattr(threading.Thread, "start", no_more)
    assert copies.submit(pieces(tensor, [8])).fault() is None
    copies.close()


def test_cores_that_cannot_be_had_are_missed_at_once(monkeypatch):
    """Not by every read from then on."""

    def no_such_cores(*_: object) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "sched_setaffinity", no_such_cores)
    tensor = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(BrokenThreadPool):
        HostScatterer(tensor, [tensor], {0})

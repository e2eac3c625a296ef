# SPDX-License-Identifier: Apache-2.0
"""Offloading to host memory of engines on CPU: vLLM's own copies blocks of GPUs only.

While the file exists that LOADS_FILE names, no load is reported if it says `hang`, and the next one
raises if it says `raise`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class Copies(OffloadingWorker):  # type: ignore[misc]
    """Copies blocks while it is asked to: it is asked between steps, when nothing else writes.

    Args:
        caches: Of the worker.
        num_chunks: How many blocks of each tensor the host has room for.
    """

    def __init__(self, caches: CanonicalKVCaches, num_chunks: int) -> None:
        self._groups = [[ref.tensor_idx for ref in refs] for refs in caches.group_data_refs]
        self._device = [each.tensor for each in caches.tensors]
        self._host = [
            torch.zeros((num_chunks, each.page_size_bytes), dtype=torch.int8)
            for each in caches.tensors
        ]
        self._done: list[tuple[bool, TransferResult]] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy blocks to the host."""
        return self._copy(job_id, src_spec, dst_spec, is_load=False)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy blocks from the host."""
        if _fault() == "raise":
            raise RuntimeError("the host's memory is gone")
        return self._copy(job_id, dst_spec, src_spec, is_load=True)

    def get_finished(self) -> list[TransferResult]:
        """Return what was copied since the last call."""
        hangs = _fault() == "hang"
        told = [result for is_load, result in self._done if not (hangs and is_load)]
        self._done = [each for each in self._done if hangs and each[0]]
        return told

    def wait(self, job_ids: set[int]) -> None:
        """Return at once: all was copied when it was asked for."""

    def _copy(self, job_id: int, blocks: Any, chunks: Any, *, is_load: bool) -> bool:
        began_s, num_bytes = time.perf_counter(), 0
        ends = np.cumsum(blocks.group_sizes)[:-1]
        for tensors, of_device, of_host in zip(
            self._groups,
            np.split(blocks.block_ids, ends),
            np.split(chunks.block_ids, ends),
            strict=True,
        ):
            for tensor in tensors:
                device, host = self._device[tensor], self._host[tensor]
                if is_load:
                    device[of_device] = host[of_host]
                else:
                    host[of_host] = device[of_device]
                num_bytes += len(of_device) * host.shape[1]
        took_s = time.perf_counter() - began_s
        self._done.append((is_load, TransferResult(job_id, True, num_bytes, took_s)))
        return True


class OffloadsToHost(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's, with a worker that runs without a GPU."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return one that copies."""
        return Copies(kv_caches, self.num_chunks)


def _fault() -> str:
    file = os.environ.get("LOADS_FILE")
    return Path(file).read_text() if file and Path(file).exists() else ""

# SPDX-License-Identifier: Apache-2.0
"""Offloading with room for nothing: vLLM's own copies blocks on GPUs only."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class Idle(OffloadingWorker):
    """Is asked for nothing."""

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Refuse: there is no room."""
        return False

    submit_load = submit_store

    def get_finished(self) -> list[Any]:
        """Return nothing."""
        return []

    def wait(self, job_ids: set[int]) -> None:
        """Wait for nothing."""


class OffloadsNothing(CPUOffloadingSpec):
    """vLLM's, with a worker that runs without a GPU."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """Return one that does nothing."""
        return Idle()

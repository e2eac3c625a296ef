# SPDX-License-Identifier: Apache-2.0
"""How readers of the shared-memory broadcast wait."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import pytest
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

from vllm.distributed.device_communicators import shm_wait


@pytest.mark.parametrize(
    ("on_cpu", "expected"), [(True, ["rest"]), (False, ["yield"])], ids=["cpu", "accelerator"]
)
def test_readers_rest_on_cpu_only(monkeypatch, on_cpu, expected):
    """A reader that has just read looks again soon, without taking the core from others on CPU."""
    waits: list[str] = []
    platform = SimpleNamespace(is_cpu=lambda: on_cpu)
    monkeypatch.setattr(shm_wait, "current_platform", platform)
    monkeypatch.setattr(time, "sleep", lambda _: waits.append("rest"))
    monkeypatch.setattr(os, "sched_yield", lambda: waits.append("yield"))
    reader = SpinCondition.__new__(SpinCondition)
    reader.is_reader, reader.busy_loop_s, reader.last_read = True, 60.0, time.monotonic()
    reader.wait()
    assert waits == expected

# SPDX-License-Identifier: Apache-2.0
"""What reads cost, measured with the real thing."""

from __future__ import annotations

import math
import uuid
from dataclasses import astuple

import torch

from tests.v1.kv_connector.unit.reshard.transport.memory_agent import MemoryAgent
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import TransferError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.strategy import DEFAULT_COSTS
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import NixlAgent
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.measure import (
    SCRATCH_BYTES,
    measure_costs,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.staging_area import (
    make_scatterer,
)


def measured(make_agent, arena_bytes: int = SCRATCH_BYTES):
    """Measure between two agents in this process."""
    agent = make_agent()
    arena = torch.zeros(arena_bytes, dtype=torch.uint8)
    agent.register([(arena.data_ptr(), arena.nbytes, 0)])
    costs = measure_costs(agent, make_agent, arena, lambda to: make_scatterer(arena, [to]))
    agent.close()
    return costs


def test_costs_are_those_of_this_machine():
    """Every cost is a time, and they are not those that are guessed where measuring fails."""
    costs = measured(lambda: NixlAgent(str(uuid.uuid4()), num_threads=1, progress_delay_us=100))
    assert all(math.isfinite(each) and each > 0 for each in astuple(costs))
    assert costs != DEFAULT_COSTS


def test_arena_too_small_to_measure_with():
    """Nothing is written beyond its end."""
    assert measured(lambda: MemoryAgent(str(uuid.uuid4())), 4096) == DEFAULT_COSTS


def test_transport_that_fails_is_guessed(caplog_vllm):
    """The engine starts all the same, and its log says why the costs are no measured ones."""

    class Broken(MemoryAgent):
        def read(self, *_):
            raise TransferError("no read today")

    assert measured(lambda: Broken(str(uuid.uuid4()))) == DEFAULT_COSTS
    assert any("no read today" in text for text in caplog_vllm.messages)


def test_measuring_that_fails_early_closes_the_stand_in():
    """A worker does not keep a second agent, with threads of its own, for as long as it serves."""
    closed = []

    class Watched(MemoryAgent):
        def close(self):
            closed.append(self.name)
            super().close()

    agent, stand_in = (Watched(str(uuid.uuid4())) for _ in range(2))
    arena = torch.zeros(SCRATCH_BYTES, dtype=torch.uint8)

    def no_scatterer(_):
        raise MemoryError("no thread today")

    assert measure_costs(agent, lambda: stand_in, arena, no_scatterer) == DEFAULT_COSTS
    assert closed == [stand_in.name]

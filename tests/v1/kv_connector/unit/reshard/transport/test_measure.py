# SPDX-License-Identifier: Apache-2.0
"""What reads cost, measured with the real thing."""

from __future__ import annotations

import math
import uuid
from dataclasses import astuple

import numpy as np
import torch

from tests.v1.kv_connector.unit.reshard.transport.memory_agent import MemoryAgent
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import TransferError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.strategy import DEFAULT_COSTS
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import NixlAgent
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.measure import (
    LEAST_SCRATCH_BYTES,
    MOST_SCRATCH_BYTES,
    measure_costs,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.staging_area import (
    make_scatterer,
)


def measured(make_agents, arena_bytes: int = LEAST_SCRATCH_BYTES):
    """Measure between two agents in this process."""
    arena = torch.zeros(arena_bytes, dtype=torch.uint8)
    return measure_costs(make_agents, arena, lambda to: make_scatterer(arena, [to]))


def real_agents() -> tuple[NixlAgent, NixlAgent]:
    """One that reads, and one that is read from."""
    reader = NixlAgent(str(uuid.uuid4()), num_threads=0, polled=True)
    return reader, NixlAgent(str(uuid.uuid4()), num_threads=1, progress_delay_us=100)


def two(kind: type[MemoryAgent]) -> tuple[MemoryAgent, MemoryAgent]:
    """Two of a kind."""
    return kind(str(uuid.uuid4())), kind(str(uuid.uuid4()))


def test_costs_are_those_of_this_machine():
    """Every cost is a time, and they are not those that are guessed where measuring fails."""
    costs = measured(real_agents)
    assert all(math.isfinite(each) and each > 0 for each in astuple(costs))
    assert costs != DEFAULT_COSTS


def test_nothing_is_read_twice():
    """What has been read is in a cache of the processor's, where no KV cache is."""
    seen: list[tuple[object, int]] = []

    class Watched(MemoryAgent):
        def read(self, local, local_indices, remote, remote_indices):
            seen.extend((local, index) for index in local_indices.tolist())
            assert np.array_equal(local_indices, remote_indices)
            return super().read(local, local_indices, remote, remote_indices)

    assert measured(lambda: two(Watched), MOST_SCRATCH_BYTES) != DEFAULT_COSTS
    assert seen and len(set(seen)) == len(seen)


def test_arena_too_small_to_measure_with():
    """Nothing is written beyond its end."""
    assert measured(lambda: two(MemoryAgent), 4096) == DEFAULT_COSTS


def test_transport_that_fails_is_guessed(caplog_vllm):
    """The engine starts all the same, and its log says why the costs are no measured ones."""

    class Broken(MemoryAgent):
        def read(self, *_):
            raise TransferError("no read today")

    assert measured(lambda: two(Broken)) == DEFAULT_COSTS
    assert any("no read today" in text for text in caplog_vllm.messages)


def test_measuring_that_fails_closes_both_agents():
    """Whatever is in flight writes no more, and nobody keeps threads for as long as it serves."""
    closed = []

    class Watched(MemoryAgent):
        def read(self, *_):
            raise TransferError("no read today")

        def close(self):
            closed.append(self.name)
            super().close()

    agents = two(Watched)
    assert measured(lambda: agents) == DEFAULT_COSTS
    assert closed == [agent.name for agent in agents]

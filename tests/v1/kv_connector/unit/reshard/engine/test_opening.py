# SPDX-License-Identifier: Apache-2.0
"""What opening a generation makes; that it works, whole workers show."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine import opening
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.opening import Opener
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.mesh import MeshRank
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    RemoteEngineAddress,
)

ADDRESS = RemoteEngineAddress("engine", "127.0.0.1", 1)


class Agent:
    """Registers everything."""

    def __init__(self, divides: bool) -> None:
        self.divides = divides
        self.is_open = True

    def register(self, regions: object) -> None:
        """Do nothing."""

    def close(self) -> None:
        """It has no threads any more."""
        self.is_open = False


@pytest.fixture
def opener(monkeypatch) -> Opener:
    """One whose generations are their agents."""
    monkeypatch.setattr(opening, "MOST_DIVIDING", 2)
    monkeypatch.setattr(opening, "RemoteEngine", lambda *_: None)
    monkeypatch.setattr(opening, "Generation", lambda agent, *_: agent)
    monkeypatch.setattr(opening, "describe_reads", lambda *_: "reads nothing")
    made = Opener(lambda name, *, divides: Agent(divides), 1.0)
    made._local = SimpleNamespace(
        regions=[], area=None, reader=SimpleNamespace(rank=MeshRank(0, 0))
    )
    made._planner = SimpleNamespace(plan=lambda _: SimpleNamespace(plan=None, missing=()))
    return made


def test_first_connections_have_threads(opener):
    """Others have none, until one of those is closed."""
    agents = [opener._prepare(ADDRESS, (), 0.0) for _ in range(3)]
    assert [agent.divides for agent in agents] == [True, True, False]
    agents[0].close()
    more = [opener._prepare(ADDRESS, (), 0.0).divides for _ in range(2)]
    assert more == [True, False]


def test_agent_of_a_failed_opening_does_not_count(opener, monkeypatch):
    """It is closed."""

    def fail(*_: object) -> None:
        raise ValueError("the caches do not fit")

    with monkeypatch.context() as patch:
        patch.setattr(opening, "RemoteEngine", fail)
        for _ in range(3):
            with pytest.raises(ValueError, match="do not fit"):
                opener._prepare(ADDRESS, (), 0.0)
    assert opener._prepare(ADDRESS, (), 0.0).divides

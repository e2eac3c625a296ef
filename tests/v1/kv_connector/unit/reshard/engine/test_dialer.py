# SPDX-License-Identifier: Apache-2.0
"""What opening a connection makes; that it works, whole workers show."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from unittest import mock

import pytest

from tests.v1.kv_connector.unit.reshard.simulation.engines import Later
from tests.v1.kv_connector.unit.reshard.transport.channels import DEADLINE_S, wait_until
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine import dialer as dialer_module
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.dialer import Dialer
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
        self.registered: list[object] = []

    def register(self, regions: object) -> None:
        """Take note."""
        self.registered.append(regions)

    def close(self) -> None:
        """It has no threads any more."""
        self.is_open = False


class Agents:
    """Makes agents, unless told otherwise.

    Attributes:
        made: All of them.
        num_asked: How many were asked for.
        goes_on: Clear while none is to be made.
        fault: Why none can be made; None where it can.
    """

    def __init__(self) -> None:
        self.made: list[Agent] = []
        self.num_asked = 0
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.fault: Exception | None = None

    def __call__(self, name: str, *, divides: bool) -> Agent:
        """Make one."""
        self.num_asked += 1
        assert self.goes_on.wait(DEADLINE_S)
        if self.fault is not None:
            raise self.fault
        self.made.append(Agent(divides))
        return self.made[-1]


@pytest.fixture
def agents(monkeypatch) -> Agents:
    """What connections are, in this module: their agents."""
    monkeypatch.setattr(dialer_module, "MOST_DIVIDING", 2)
    monkeypatch.setattr(dialer_module, "RemoteEngine", lambda *_: None)
    monkeypatch.setattr(dialer_module, "PeerConnection", lambda agent, *_: agent)
    monkeypatch.setattr(dialer_module, "describe_reads", lambda *_: "reads nothing")
    return Agents()


@pytest.fixture
def dialer(agents) -> Dialer:
    """One that makes agents when they are needed."""
    return begun(Dialer(agents, 1.0), stays_ready=False)


@pytest.fixture
def ready(agents) -> Iterator[Dialer]:
    """One that has an agent ready."""
    made = begun(Dialer(agents, 1.0), stays_ready=True)
    yield made
    made.close()


def begun(dialer: Dialer, *, stays_ready: bool) -> Dialer:
    """One that knows what to connect, and is asked by nobody."""
    reader = SimpleNamespace(rank=MeshRank(0, 0))
    local = SimpleNamespace(
        regions=["cache"], area=None, reader=reader, shards=(), spread=0, missing_drafts="refuse"
    )
    dialer.begin(local, answer, stays_ready=stays_ready)
    dialer._planner = SimpleNamespace(plan=lambda _: SimpleNamespace(plan=None, missing=()))
    return dialer


def answer(_: RemoteEngineAddress) -> Future:
    """An engine without workers."""
    asked: Future = Future()
    asked.set_result(())
    return asked


def test_first_connections_have_threads(dialer):
    """Others have none, until one of those is closed."""
    agents = [dialer._prepare(ADDRESS, (), 0.0) for _ in range(3)]
    assert [agent.divides for agent in agents] == [True, True, False]
    agents[0].close()
    more = [dialer._prepare(ADDRESS, (), 0.0).divides for _ in range(2)]
    assert more == [True, False]


def test_agent_of_a_failed_opening_does_not_count(dialer, monkeypatch):
    """It is closed."""

    def fail(*_: object) -> None:
        raise ValueError("the caches do not fit")

    with monkeypatch.context() as patch:
        patch.setattr(dialer_module, "RemoteEngine", fail)
        for _ in range(3):
            with pytest.raises(ValueError, match="do not fit"):
                dialer._prepare(ADDRESS, (), 0.0)
    assert dialer._prepare(ADDRESS, (), 0.0).divides


def test_agent_is_ready_before_an_engine_is_asked_for(ready, agents):
    """With the cache registered; and another one once nothing is being read."""
    (first,) = agents.made
    assert first.registered == [["cache"]]
    assert ready.open(ADDRESS).result(DEADLINE_S) is first
    for _ in range(3):
        ready.quiet()
    wait_until(lambda: ready._ready)
    assert len(agents.made) == 2
    assert ready.open(ADDRESS).result(DEADLINE_S) is agents.made[1]


def test_first_read_has_the_cores(ready, agents, monkeypatch):
    """An agent to be ready is made for nobody who waits, and takes a core for long."""
    monkeypatch.setattr(dialer_module, "MOST_DIVIDING", 3)
    with mock.patch.object(ready, "_thread", Later()) as later:
        openings = [ready.open(ADDRESS) for _ in range(2)]
        while later.jobs:
            later.jobs.popleft()()
        assert [each.result(0) for each in openings] == agents.made
        assert not ready._ready
        ready.quiet()
        while later.jobs:
            later.jobs.popleft()()
    assert list(ready._ready) == agents.made[2:]
    assert len(agents.made) == 3


def test_who_reads_nothing_makes_none(dialer, agents):
    """Neither before nor after it was asked, as for a heartbeat."""
    assert not agents.made
    dialer.open(ADDRESS).result(DEADLINE_S)
    dialer.quiet()
    dialer._thread.shutdown()
    assert len(agents.made) == 1


def test_agent_that_cannot_be_made_is_told_of_when_it_is_needed(ready, agents):
    """By whoever needs it; and the next one may be made again."""
    agents.fault = ValueError("no more endpoints")
    ready.open(ADDRESS).result(DEADLINE_S)
    with pytest.raises(ValueError, match="no more endpoints"):
        ready.open(ADDRESS).result(DEADLINE_S)
    agents.fault = None
    assert ready.open(ADDRESS).result(DEADLINE_S).is_open


def test_ready_agent_is_closed(ready, agents):
    """Nobody has asked for an engine, and nobody will."""
    ready.close()
    assert [each.is_open for each in agents.made] == [False]


def test_agent_that_is_made_while_its_dialer_is_closed_is_closed(ready, agents):
    """What was handed over before is its taker's."""
    agents.goes_on.clear()
    taken = ready.open(ADDRESS).result(DEADLINE_S)
    ready.quiet()
    wait_until(lambda: agents.num_asked == 2)
    ready.close()
    agents.goes_on.set()
    ready._thread.shutdown()
    assert [each.is_open for each in agents.made] == [True, False]
    assert agents.made[0] is taken


def test_ready_agent_has_threads(ready):
    """Where there are as many as there may be, none is made that could not have them later."""
    taken = [ready.open(ADDRESS).result(DEADLINE_S) for _ in range(3)]
    assert [agent.divides for agent in taken] == [True, True, False]
    taken[0].close()
    assert ready.open(ADDRESS).result(DEADLINE_S).divides

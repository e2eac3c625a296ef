# SPDX-License-Identifier: Apache-2.0
"""What takes long of a connection, in a thread of its own; that it works, whole workers show."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.v1.kv_connector.unit.reshard.profiling import calls
from tests.v1.kv_connector.unit.reshard.transport.channels import DEADLINE_S
from tests.v1.kv_connector.unit.reshard.transport.memory_agent import MemoryAgent
from tests.v1.kv_connector.unit.reshard.transport.ranks import NUM_LAYERS
from tests.v1.kv_connector.unit.reshard.transport.remotes import Reader, RemoteEngineStub
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.connecting import dialer as module
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.connecting.dialer import (
    MOST_PLANS,
    Dialer,
    LocalEndpoint,
    Planner,
    layout_digest,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import (
    RemoteLayoutError,
    RemoteUnreachableError,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.reshard import plan_reshard
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import (
    ALL_TOKENS,
    Holding,
    MeshRank,
    ParallelMesh,
    Shard,
    TokenShare,
    UnitInterval,
    shard_model,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.description import (
    WorkerDescription,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    RemoteEngineAddress,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.arena import (
    StagingArea,
    open_area,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.handshake_client import (
    DEFAULT_TIMEOUT_S,
)

ADDRESS = RemoteEngineAddress("engine", "127.0.0.1", 1)
ARENA_BYTES = 1 << 16


class Agents:
    """Makes agents, unless told otherwise.

    Attributes:
        made: All of them.
        asked: Set once one was asked for.
        goes_on: Clear while none is to be made.
        fault: Why what is made cannot register; None where it can.
    """

    def __init__(self) -> None:
        self.made: list[MemoryAgent] = []
        self.asked, self.goes_on = threading.Event(), threading.Event()
        self.goes_on.set()
        self.fault: Exception | None = None

    def __call__(self, name: str) -> MemoryAgent:
        """Make one."""
        self.asked.set()
        assert self.goes_on.wait(DEADLINE_S)
        agent = MemoryAgent(name)
        self.made.append(agent)
        if self.fault is not None:
            fault = self.fault

            def refuse(*_: object) -> None:
                raise fault

            agent.register = refuse
        return agent


class Engines:
    """Answers what it is told to, at once or later.

    Attributes:
        asked: Questions, as they were asked.
        answers: One future for each.
    """

    def __init__(self) -> None:
        self.asked: list[RemoteEngineAddress] = []
        self.answers: list[Future] = []

    def __call__(self, address: RemoteEngineAddress) -> Future:
        """Ask."""
        self.asked.append(address)
        self.answers.append(Future())
        return self.answers[-1]


@pytest.fixture
def reader() -> Reader:
    """The worker that reads."""
    return Reader()


@pytest.fixture
def agents() -> Agents:
    """Makes its agents."""
    return Agents()


@pytest.fixture
def engines() -> Engines:
    """Whom it asks."""
    return Engines()


@pytest.fixture
def area() -> StagingArea | None:
    """Where its reads stop over."""
    return open_area([torch.zeros(1)], ARENA_BYTES)


@pytest.fixture
def dialer(reader, agents, engines, area) -> Iterator[Dialer]:
    """One that knows what it has."""
    made = Dialer(agents)
    made.begin(LocalEndpoint(reader.local, reader.shards, reader.regions, area, 0), engines)
    yield made
    agents.goes_on.set()
    made.close()


def answer(engines: Engines, *descriptions: WorkerDescription) -> None:
    """The engine that was asked last answers."""
    engines.answers[-1].set_result(descriptions)


def test_answer_is_lowered(dialer, engines, reader):
    """Every layer of every worker is read, and each worker is told once."""
    engine = RemoteEngineStub(tp_size=2)
    lowering = dialer.dial(ADDRESS)
    assert engines.asked == [ADDRESS] and not lowering.done()
    answer(engines, *engine.descriptions.values())
    lowered = lowering.result(DEADLINE_S)
    assert lowered.num_ranks == 2 and lowered.rank == reader.local.rank
    assert [each.description.agent_metadata for each in lowered.workers] == [
        agent.metadata() for agent in engine.agents
    ]
    assert all(each.legs and each.num_notifiers == 1 for each in lowered.workers)
    # All go by way of the arena, as none is too large for it.
    assert all(leg.staged is not None for each in lowered.workers for leg in each.legs)
    assert "reads" in lowered.summary


def test_order_of_an_answer_means_nothing(dialer, engines):
    """Workers are known by their rank."""
    engine = RemoteEngineStub(tp_size=2)
    lowering = dialer.dial(ADDRESS)
    answer(engines, *reversed(engine.descriptions.values()))
    ranks = [each.description.shard.rank for each in lowering.result(DEADLINE_S).workers]
    assert ranks == sorted(engine.descriptions)


def test_agents_have_no_part_in_an_answer(dialer, engines, agents):
    """Neither is one made, nor does any have to be."""
    lowering = dialer.dial(ADDRESS)
    answer(engines, *RemoteEngineStub().descriptions.values())
    lowering.result(DEADLINE_S)
    assert not agents.made


def test_engine_that_does_not_answer_is_told(dialer, engines):
    """With what the handshake says."""
    lowering = dialer.dial(ADDRESS)
    engines.answers[-1].set_exception(RemoteUnreachableError("it does not answer"))
    with pytest.raises(RemoteUnreachableError, match="does not answer"):
        lowering.result(DEADLINE_S)


def test_layout_that_does_not_fit_is_told(dialer, engines):
    """And costs nothing: the next engine is asked as before."""
    other = RemoteEngineStub()
    (description,) = other.descriptions.values()
    # The same cache, for another number of heads.
    (shard,) = shard_model(ParallelMesh(1, 1), NUM_LAYERS, 4)
    wrong = WorkerDescription(
        "engine", shard, description.cache, description.lease_table, description.agent_metadata
    )
    lowering = dialer.dial(ADDRESS)
    answer(engines, wrong)
    with pytest.raises(RemoteLayoutError):
        lowering.result(DEADLINE_S)
    lowering = dialer.dial(ADDRESS)
    answer(engines, description)
    assert lowering.result(DEADLINE_S).num_ranks == 1


def test_answer_that_nobody_waits_for_is_not_lowered(dialer, engines):
    """Its peer was forgotten meanwhile; the thread goes on to the next one."""
    forgotten = dialer.dial(ADDRESS)
    forgotten.cancel()
    answer(engines, *RemoteEngineStub().descriptions.values())
    lowering = dialer.dial(ADDRESS)
    answer(engines, *RemoteEngineStub().descriptions.values())
    assert lowering.result(DEADLINE_S).num_ranks == 1
    assert forgotten.cancelled()


def test_call_that_does_not_come_back_is_told(reader, agents, engines, caplog_vllm):
    """NIXL may block while an agent is made; what is made in time is no news."""
    now_s = [100.0]
    dialer = Dialer(agents, lambda: now_s[0])
    dialer.begin(LocalEndpoint(reader.local, reader.shards, reader.regions, None, 0), engines)
    try:
        dialer.make_lane().result(DEADLINE_S)
        assert dialer.call.stalls_at_s is None
        agents.asked.clear()
        agents.goes_on.clear()
        making = dialer.make_lane()
        assert agents.asked.wait(DEADLINE_S)
        assert dialer.call.stalls_at_s == 100.0 + DEFAULT_TIMEOUT_S
        dialer.call.tell_if_stalled(100.1 + DEFAULT_TIMEOUT_S)
        assert "The dialer's thread has not come round for 10.1 s: it is in" in caplog_vllm.text
        assert "_make_lane (" in caplog_vllm.text
    finally:
        agents.goes_on.set()
    making.result(DEADLINE_S)
    dialer.close()


def test_lane_has_all_memory_that_is_read_into(dialer, agents, reader, area):
    """The cache, the arena and the buffer of checks; each lane's agent has a name of its own."""
    lanes = [dialer.make_lane().result(DEADLINE_S) for _ in range(2)]
    assert [lane.agent for lane in lanes] == agents.made
    assert len({lane.agent.name for lane in lanes}) == 2
    address, size_bytes, _ = reader.regions[0]
    arena_address, arena_bytes, _ = area.region
    for lane in lanes:
        buckets = lane.checks.rows
        for start, size in (
            (address, size_bytes),
            (arena_address, arena_bytes),
            (buckets.ctypes.data, buckets.nbytes),
        ):
            rows = np.array([[start, size, 0, size, 1]], dtype=np.uint64)
            lane.agent.release_prepared(lane.agent.prepare(rows))


def test_lane_that_cannot_be_made_is_told_and_leaves_nothing(dialer, agents):
    """Its agent is closed; and the next one may be made again."""
    agents.fault = ValueError("no more endpoints")
    with pytest.raises(ValueError, match="no more endpoints"):
        dialer.make_lane().result(DEADLINE_S)
    assert [each.is_open for each in agents.made] == [False]
    agents.fault = None
    assert dialer.make_lane().result(DEADLINE_S).agent.is_open


def test_nothing_is_made_once_it_is_closed(dialer, agents, engines):
    """What is being made is its taker's; what waits is not begun, and answers fail."""
    agents.goes_on.clear()
    first, second = dialer.make_lane(), dialer.make_lane()
    lowering = dialer.dial(ADDRESS)
    assert agents.asked.wait(DEADLINE_S)
    dialer.close()
    agents.goes_on.set()
    assert first.result(DEADLINE_S).agent.is_open
    with pytest.raises(CancelledError):
        second.result(DEADLINE_S)
    answer(engines, *RemoteEngineStub().descriptions.values())
    with pytest.raises(RuntimeError, match="shutdown"):
        lowering.result(DEADLINE_S)
    assert len(agents.made) == 1


def test_thread_is_prepared_before_it_makes_anything(reader, agents, engines):
    """As by choosing its device: a new thread has the first one of its process."""
    done = []

    def prepare() -> None:
        done.append((threading.current_thread().name.rpartition("_")[0], len(agents.made)))

    dialer = Dialer(agents, prepare=prepare)
    dialer.begin(LocalEndpoint(reader.local, reader.shards, reader.regions, None, 0), engines)
    for _ in range(2):
        dialer.make_lane().result(DEADLINE_S)
    assert done == [("reshard-dialer", 0)] and len(agents.made) == 2
    dialer.close()


def test_thread_that_could_not_be_prepared_is_tried_again(reader, agents, engines):
    """It costs what was to be made then, and nothing that follows."""
    prepare = Mock(side_effect=[OSError("no device yet"), None])
    dialer = Dialer(agents, prepare=prepare)
    dialer.begin(LocalEndpoint(reader.local, reader.shards, reader.regions, None, 0), engines)
    with pytest.raises(OSError, match="no device yet"):
        dialer.make_lane().result(DEADLINE_S)
    for _ in range(2):
        dialer.make_lane().result(DEADLINE_S)
    assert (prepare.call_count, len(agents.made)) == (2, 2)
    dialer.close()


def shards(pp: int = 1, tp: int = 1, *, num_layers: int = 8, num_heads: int = 16):
    """What the workers of an engine hold."""
    return shard_model(ParallelMesh(pp, tp), num_layers, num_heads)


@pytest.fixture
def planned(monkeypatch) -> list[object]:
    """The source of every plan that is made."""
    made: list[object] = []

    def count(src, needed, *, replica_offset):
        made.append(src)
        return plan_reshard(src, needed, replica_offset=replica_offset)

    monkeypatch.setattr(module, "plan_reshard", count)
    return made


def test_replicas_are_planned_for_once(planned):
    """Two hundred engines of PP8 x TP16, each of which has told the same in its own words."""
    planner = Planner(shards(8, 16), 0, "refuse")
    found = {id(planner.plan(shards(8, 16)).plan) for _ in range(200)}
    assert len(planned) == len(found) == 1


def test_workers_may_be_named_in_any_order(planned):
    """Planning asks for none."""
    planner = Planner(shards(2, 2), 0, "refuse")
    assert planner.plan(shards(2, 4)) is planner.plan(shards(2, 4)[::-1])
    assert len(planned) == 1


def test_other_layouts_have_other_plans(planned):
    """Whatever was planned before."""
    planner = Planner(shards(), 1, "refuse")
    layouts = [(1, 1), (2, 1), (1, 2), (2, 4), (1, 1)]
    for pp, tp in layouts:
        source = shards(pp, tp)
        assert planner.plan(source).plan == plan_reshard(source, shards(), replica_offset=1)
    assert len(planned) == len(set(layouts))


def test_only_the_last_plans_are_kept(planned):
    """An engine that invents layouts costs time, and no memory."""
    planner = Planner(shards(), 0, "refuse")
    layouts = [(pp, tp) for tp in (1, 2, 4, 8, 16) for pp in (1, 2)]
    for layout in layouts:
        planner.plan(shards(*layout))
    assert len(planned) == 10
    for layout in layouts[-MOST_PLANS:]:
        planner.plan(shards(*layout))
    assert len(planned) == 10
    for layout in layouts[:-MOST_PLANS]:
        planner.plan(shards(*layout))
    assert len(planned) == 10 + (10 - MOST_PLANS)


def test_layout_that_does_not_fit_is_refused_every_time():
    """What has failed is not kept."""
    planner = Planner(shards(num_layers=9), 0, "refuse")
    for _ in range(2):
        with pytest.raises(RemoteLayoutError, match="layer 8"):
            planner.plan(shards())


@st.composite
def holdings(draw) -> Holding:
    """What a rank may hold of a layer."""
    num_units = draw(st.integers(1, 4))
    start = draw(st.integers(0, num_units - 1))
    stop = draw(st.integers(start + 1, num_units))
    may_repeat = stop == start + 1 and draw(st.booleans())
    tokens = draw(st.sampled_from([ALL_TOKENS, TokenShare(1, 2, 3), TokenShare(0, 12, 3)]))
    return Holding(UnitInterval(start, stop), num_units, may_repeat, tokens)


layers = st.lists(
    st.tuples(st.sampled_from([0, 1, "0", "1", "0 1", "a\n", "a", "a\\n", "'a'"]), holdings()),
    max_size=3,
    unique_by=lambda layer: (type(layer[0]), layer[0]),
)
some_shards = st.lists(
    st.builds(
        lambda pp, tp, held: Shard(MeshRank(pp, tp), dict(held)),
        st.integers(0, 1),
        st.integers(0, 1),
        layers,
    ),
    max_size=3,
    unique_by=lambda shard: shard.rank,
)


def _read_by_planning(source: list[Shard]) -> object:
    by_rank = sorted(source, key=lambda shard: shard.rank)
    return [(shard.rank, list(shard.holdings.items())) for shard in by_rank]


@given(some_shards, some_shards)
def test_digests_are_equal_for_equal_layouts_only(one, other):
    """In everything that planning reads."""
    equal = _read_by_planning(one) == _read_by_planning(other)
    assert (layout_digest(one) == layout_digest(other)) == equal


def test_digest_calls_nothing_for_each_layer():
    """What a replica costs, whose plan is made already."""
    few, many = shards(2, 4, num_layers=2), shards(2, 4, num_layers=200)
    assert calls(lambda: layout_digest(few)) == calls(lambda: layout_digest(many))


@given(some_shards, st.data())
def test_digest_tells_one_change(source, data):
    """Of any holding's attributes."""
    places = [(n, layer) for n, shard in enumerate(source) for layer in shard.holdings]
    if not places:
        return
    position, layer = data.draw(st.sampled_from(places))
    shard = source[position]
    changed = data.draw(holdings())
    other = list(source)
    other[position] = replace(shard, holdings={**shard.holdings, layer: changed})
    equal = changed == shard.holdings[layer]
    assert (layout_digest(other) == layout_digest(source)) == equal

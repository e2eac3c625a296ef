# SPDX-License-Identifier: Apache-2.0
"""Plans are made once for engines of one layout, and never mistaken for those of another."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.v1.kv_connector.unit.reshard.profiling import calls
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.connecting import plans
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.connecting.plans import (
    MOST_PLANS,
    Planner,
    layout_digest,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import RemoteLayoutError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.mesh import MeshRank, ParallelMesh
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.reshard import plan_reshard
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import (
    ALL_TOKENS,
    Holding,
    Shard,
    TokenShare,
    UnitInterval,
    shard_model,
)


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

    monkeypatch.setattr(plans, "plan_reshard", count)
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

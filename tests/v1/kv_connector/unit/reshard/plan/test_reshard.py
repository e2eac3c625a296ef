# SPDX-License-Identifier: Apache-2.0
"""Plans, judged by carrying them out and by counting who is burdened."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.v1.kv_connector.unit.reshard.conftest import as_workers_say
from tools.verify import verify_plan
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import (
    LocalLayoutError,
    RemoteLayoutError,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.reshard import (
    describe_reads,
    layers_text,
    plan_reshard,
    ranges_text,
    ranks_text,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import (
    Holding,
    MeshRank,
    ParallelMesh,
    Shard,
    TokenShare,
    UnitInterval,
    shard_model,
)


def engine(*, pp: int = 1, tp: int = 1, heads: int = 1, layers: int = 4, partition=None):
    """The shards of an engine."""
    return shard_model(ParallelMesh(pp, tp), layers, heads, partition)


def summary(plan):
    """The reads of a plan as plain tuples."""
    return [
        (
            str(read.dst_rank),
            str(read.src_rank),
            list(read.layers),
            (read.units.start, read.units.stop),
            read.src_unit_offset,
            read.dst_unit_offset,
        )
        for read in plan.reads
    ]


def notifiers(plan):
    """Who releases whom, as plain strings."""
    return {
        str(release.src_rank): [str(rank) for rank in release.notifiers]
        for release in plan.releases
    }


def heads_in(shard):
    """What a rank's cache holds, by layer."""
    return {
        layer: [f"layer {layer} head {head}" for head in range(held.units.start, held.units.stop)]
        for layer, held in shard.holdings.items()
    }


@given(
    data=st.data(),
    replica_offset=st.integers(0, 40),
    told=st.sampled_from(["all", "src", "dst", ""]),
)
def test_carrying_a_plan_out_rebuilds_every_destination(engine_pairs, data, replica_offset, told):
    """Copy heads as the reads say: every destination rank ends with what it needs, written once.

    Also where ranks that hold one head of a layer cannot tell how many it has.
    """
    src, dst = data.draw(engine_pairs)
    said_src = src if told in ("all", "src") else as_workers_say(src)
    said_dst = dst if told in ("all", "dst") else as_workers_say(dst)
    plan = plan_reshard(said_src, said_dst, replica_offset=replica_offset)
    assert verify_plan(said_src, said_dst, plan) == []
    stores = {shard.rank: heads_in(shard) for shard in src}
    for shard in dst:
        received = {layer: [None] * len(held.units) for layer, held in shard.holdings.items()}
        for read in plan.reads_of(shard.rank):
            for layer in read.layers:
                for position in range(read.num_units):
                    target = read.dst_unit_offset + position
                    assert received[layer][target] is None
                    received[layer][target] = stores[read.src_rank][layer][
                        read.src_unit_offset + position
                    ]
        assert received == heads_in(shard)


@given(data=st.data(), seed=st.integers())
def test_order_of_ranks_does_not_matter(engine_pairs, data, seed):
    """A plan depends on values only."""
    src, dst = data.draw(engine_pairs)
    shuffle = random.Random(seed)
    again = plan_reshard(shuffle.sample(src, len(src)), shuffle.sample(dst, len(dst)))
    assert again == plan_reshard(src, dst)


@given(data=st.data())
def test_equal_layouts_read_one_to_one(engine_pairs, data):
    """Between equal layouts every rank reads from one rank of its stage, once."""
    src, _ = data.draw(engine_pairs)
    plan = plan_reshard(src, src)
    pairs = {(read.dst_rank, read.src_rank) for read in plan.reads}
    ranks = sorted(shard.rank for shard in src if shard.holdings)
    assert sorted(dst for dst, _ in pairs) == sorted(src for _, src in pairs) == ranks
    assert all(len(release.notifiers) == 1 for release in plan.releases)


@given(data=st.data(), replica_offset=st.integers(0, 40))
def test_replicas_share_their_readers_evenly(engine_pairs, data, replica_offset):
    """Among ranks that hold the same, none has two readers more than another."""
    src, dst = data.draw(engine_pairs)
    readers: dict = {}
    for read in plan_reshard(src, dst, replica_offset=replica_offset).reads:
        for layer in read.layers:
            replicas = frozenset(
                shard.rank
                for shard in src
                if layer in shard.holdings and shard.holdings[layer].units.contains(read.units)
            )
            counts = readers.setdefault(replicas, {rank: set() for rank in replicas})
            counts[read.src_rank].add(read.dst_rank)
    for counts in readers.values():
        numbers = [len(ranks) for ranks in counts.values()]
        assert max(numbers) - min(numbers) <= 1


def test_wide_source_to_narrow_destination():
    """TP4 to TP2 with 8 heads: two reads each, and the halves land behind one another."""
    plan = plan_reshard(engine(tp=4, heads=8, layers=1), engine(tp=2, heads=8, layers=1))
    assert summary(plan) == [
        ("pp0tp0", "pp0tp0", [0], (0, 2), 0, 0),
        ("pp0tp0", "pp0tp1", [0], (2, 4), 0, 2),
        ("pp0tp1", "pp0tp2", [0], (4, 6), 0, 0),
        ("pp0tp1", "pp0tp3", [0], (6, 8), 0, 2),
    ]


def shares(plan):
    """The reads of a plan as ranks and what each of them holds of the tokens."""
    return [
        (read.dst_rank.tp_rank, read.src_rank.tp_rank, str(read.dst_tokens), str(read.src_tokens))
        for read in plan.reads
    ]


def test_ranks_that_share_tokens_out_are_no_replicas():
    """Two of four share a latent out, to four that do: the module's example."""
    src = shard_model(ParallelMesh(1, 4), 1, 1, None, 2, 16)
    dst = shard_model(ParallelMesh(1, 4), 1, 1, None, 4, 16)
    assert shares(plan_reshard(src, dst)) == [
        (0, 0, "0 of 4 by 16", "0 of 2 by 16"),
        (1, 1, "1 of 4 by 16", "1 of 2 by 16"),
        (2, 2, "2 of 4 by 16", "0 of 2 by 16"),
        (3, 3, "3 of 4 by 16", "1 of 2 by 16"),
    ]
    (read, *_) = plan_reshard(src, shard_model(ParallelMesh(1, 1), 1, 1)).reads
    assert (str(read.dst_tokens), str(read.src_tokens)) == ("all", "0 of 2 by 16")


@pytest.mark.parametrize(
    ("src_shares", "dst_shares", "num_reads"),
    [(8, 8, 1), (8, 4, 2), (8, 2, 4), (8, 1, 8), (1, 8, 1)],
)
def test_no_more_is_read_from_than_has_tokens_that_are_needed(src_shares, dst_shares, num_reads):
    """Of eight ranks, in runs of as many tokens at both ends."""
    src = shard_model(ParallelMesh(1, 8), 1, 1, None, src_shares, 16)
    dst = shard_model(ParallelMesh(1, 8), 1, 1, None, dst_shares, 16)
    plan = plan_reshard(src, dst)
    assert all(len(plan.reads_of(shard.rank)) == num_reads for shard in dst)
    assert {len(release.notifiers) for release in plan.releases} == {num_reads}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ((), "no source rank holds heads .* layer 0, tokens 1 of 2 by 16, which .* pp0tp0 needs"),
        ((0, 2, 8), "in several ways, among 2 in runs of 8 and 2 in runs of 16: start all"),
        ((0, 1, 1), "in several ways"),
    ],
)
def test_sources_that_do_not_have_all_tokens_are_refused(change, reason):
    """A share that nobody has, and ranks that share out in other ways than their neighbours."""
    src, dst = shard_model(ParallelMesh(1, 2), 1, 1, None, 2, 16), engine(layers=1)
    others = [
        Shard(src[1].rank, {0: Holding(UnitInterval(0, 1), 1, tokens=TokenShare(*change))})
        for _ in range(bool(change))
    ]
    with pytest.raises(RemoteLayoutError, match=reason):
        plan_reshard([src[0], *others], dst)


def test_sizes_that_do_not_divide_each_other():
    """TP3 to TP2 with 6 heads is the worked example of the module's documentation."""
    plan = plan_reshard(engine(tp=3, heads=6, layers=1), engine(tp=2, heads=6, layers=1))
    assert summary(plan) == [
        ("pp0tp0", "pp0tp0", [0], (0, 2), 0, 0),
        ("pp0tp0", "pp0tp1", [0], (2, 3), 0, 2),
        ("pp0tp1", "pp0tp1", [0], (3, 4), 1, 0),
        ("pp0tp1", "pp0tp2", [0], (4, 6), 0, 1),
    ]
    assert notifiers(plan) == {
        "pp0tp0": ["pp0tp0"],
        "pp0tp1": ["pp0tp0", "pp0tp1"],
        "pp0tp2": ["pp0tp1"],
    }


def test_stages_that_differ_on_both_sides():
    """PP2 to PP3 over 4 layers: a stage reads from every stage that shares a layer with it."""
    plan = plan_reshard(engine(pp=2), engine(pp=3, partition=[1, 2, 1]))
    assert summary(plan) == [
        ("pp0tp0", "pp0tp0", [0], (0, 1), 0, 0),
        ("pp1tp0", "pp0tp0", [1], (0, 1), 0, 0),
        ("pp1tp0", "pp1tp0", [2], (0, 1), 0, 0),
        ("pp2tp0", "pp1tp0", [3], (0, 1), 0, 0),
    ]


@pytest.mark.parametrize("dst_tp", [1, 4])
@pytest.mark.parametrize("replica_offset", [0, 5])
def test_mla_reads_once_and_notifies_everybody(dst_tp, replica_offset):
    """Of 16 holders of one latent head each reader burdens one; all 16 are released."""
    src, dst = engine(tp=16), engine(tp=dst_tp)
    plan = plan_reshard(src, dst, replica_offset=replica_offset)
    assert [read.dst_rank.tp_rank for read in plan.reads] == list(range(dst_tp))
    sources = {read.src_rank.tp_rank for read in plan.reads}
    assert sources == {(replica_offset + turn) % 16 for turn in range(dst_tp)}
    assert [len(release.notifiers) for release in plan.releases] == [1] * 16
    told = Counter(release.notifiers[0] for release in plan.releases)
    assert max(told.values()) - min(told.values()) <= 1


def test_stages_of_the_destination_share_the_replicas_too():
    """Readers on different stages do not all turn to the first holder."""
    plan = plan_reshard(engine(tp=4), engine(pp=2))
    assert [read.src_rank.tp_rank for read in plan.reads] == [0, 1]


def test_replicated_heads_on_both_sides():
    """TP8 to TP4 with 2 heads: each reader has a holder of its own head for itself."""
    plan = plan_reshard(engine(tp=8, heads=2, layers=1), engine(tp=4, heads=2, layers=1))
    assert [(read.dst_rank.tp_rank, read.src_rank.tp_rank) for read in plan.reads] == [
        (0, 0),
        (1, 1),
        (2, 4),
        (3, 5),
    ]
    unread = {2, 3, 6, 7}
    assert {
        release.src_rank.tp_rank for release in plan.releases if release.src_rank.tp_rank in unread
    } == unread


def test_layers_are_matched_by_identity():
    """Layers are found by name, wherever they stand on either side."""
    one_head = Holding(UnitInterval(0, 1), 1)
    src = [
        Shard(MeshRank(0, 0), {"draft.0": one_head, "model.1": one_head}),
        Shard(MeshRank(1, 0), {"model.0": one_head, "unused": one_head}),
    ]
    dst = [Shard(MeshRank(0, 0), dict.fromkeys(("model.0", "model.1", "draft.0"), one_head))]
    plan = plan_reshard(src, dst)
    assert [read.layers for read in plan.reads] == [("model.1", "draft.0"), ("model.0",)]


def test_layers_with_different_heads_are_read_separately():
    """Layers of one model may have different numbers of heads."""
    one = Holding(UnitInterval(0, 1), 1)
    src = [
        Shard(MeshRank(0, tp), {"a": Holding(UnitInterval(tp, tp + 1), 2), "b": one})
        for tp in range(2)
    ]
    dst = [Shard(MeshRank(0, 0), {"a": Holding(UnitInterval(0, 2), 2), "b": one})]
    plan = plan_reshard(src, dst)
    assert summary(plan) == [
        ("pp0tp0", "pp0tp0", ["a", "b"], (0, 1), 0, 0),
        ("pp0tp0", "pp0tp1", ["a"], (1, 2), 0, 1),
    ]


def test_heads_that_nobody_can_count_are_read_from_a_holder_of_the_same():
    """TP12 to TP8, one head a rank: right for 1, 2 and 4 heads, which is all that it can be."""
    src, dst = as_workers_say(engine(tp=12, layers=1)), as_workers_say(engine(tp=8, layers=1))
    plan = plan_reshard(src, dst)
    assert [read.num_units for read in plan.reads] == [1] * 8
    for heads in (1, 2, 4):
        assert all(
            read.src_rank.tp_rank * heads // 12 == read.dst_rank.tp_rank * heads // 8
            for read in plan.reads
        )


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        (
            engine(tp=2, heads=8),
            engine(heads=4),
            "is of 8 units at the source but of 4 here",
        ),
        (
            as_workers_say(engine(tp=4)),
            engine(heads=8),
            "layer 0 is of 4 or a divisor of it units at the source but of 8 here",
        ),
    ],
)
def test_layers_of_other_heads_are_refused(src, dst, message):
    """Two models that agree in the names of their layers are told apart."""
    with pytest.raises(RemoteLayoutError, match=message):
        plan_reshard(src, dst)


def test_missing_heads_are_named():
    """A source that lacks a head is refused with layer, heads and reader."""
    src = engine(tp=2, heads=4)[:1]
    with pytest.raises(RemoteLayoutError, match=r"heads \[2, 4\) of layer 0, .* rank pp0tp0 needs"):
        plan_reshard(src, engine(heads=4))


def test_missing_stage_is_named():
    """A source whose second stage is unknown is refused."""
    with pytest.raises(RemoteLayoutError, match="of layer 2"):
        plan_reshard(engine(pp=2)[:1], engine())


@pytest.mark.parametrize(
    ("side", "error"), [("source", RemoteLayoutError), ("destination", LocalLayoutError)]
)
def test_rank_given_twice_is_refused(side, error):
    """Two descriptions of one rank cannot both be true."""
    shards = {"source": engine(), "destination": engine()}
    shards[side] = shards[side] * 2
    with pytest.raises(error, match=f"{side} rank pp0tp0 is given twice"):
        plan_reshard(shards["source"], shards["destination"])


def test_no_destination_is_refused():
    """Somebody must release the source."""
    with pytest.raises(LocalLayoutError, match="no destination rank"):
        plan_reshard(engine(), [])


def test_reads_are_one_line():
    """What is read from whom, and who is only notified."""
    src, dst = engine(tp=4, pp=2, heads=2), engine(heads=2)
    assert describe_reads(plan_reshard(src, dst), MeshRank(0, 0)) == (
        "reads layers 0-1, heads [0, 1) from pp0tp0; layers 0-1, heads [1, 2) from pp0tp2; "
        "layers 2-3, heads [0, 1) from pp1tp0; layers 2-3, heads [1, 2) from pp1tp2; "
        "only notifies pp0tp1, pp0tp3, pp1tp1, pp1tp3"
    )


def test_rank_without_layers_reads_nothing():
    """A rank that holds no layer is described all the same."""
    src = engine()
    dst = [Shard(MeshRank(0, 0), src[0].holdings), Shard(MeshRank(1, 0), {})]
    assert describe_reads(plan_reshard(src, dst), MeshRank(1, 0)) == "reads nothing"


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ((3,), "layer 3"),
        ((0, 1, 2, 5), "layers 0-2, 5"),
        (("model.layers.3.attn", "model.layers.10.attn", "model.layers.4.attn"), "layers 3-4, 10"),
        (("model.layers.3.attn", "draft.layers.4.attn"), "2 layers"),
        (("blocks.1.layers.3", "blocks.1.layers.4"), "2 layers"),
        (("attention",), "1 layer"),
    ],
)
def test_layers_are_told_by_index_where_names_have_one(layers, text):
    """Names of one kind are told by their indices; others are counted."""
    assert layers_text(layers) == text


def test_ranges_and_ranks():
    """Neighbours are joined, ranks within their stage."""
    assert ranges_text([0, 1, 2, 4, 6, 7]) == "0-2, 4, 6-7"
    ranks = [MeshRank(1, 0), MeshRank(0, 1), MeshRank(0, 2), MeshRank(0, 4)]
    assert ranks_text(ranks) == "pp0tp1-2, pp0tp4, pp1tp0"

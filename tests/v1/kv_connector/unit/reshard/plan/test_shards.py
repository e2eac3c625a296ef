# SPDX-License-Identifier: Apache-2.0
"""Who holds which layers and heads, compared with what vLLM's own workers would hold."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.utils import get_pp_indices

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import LocalLayoutError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import (
    ALL_TOKENS,
    Holding,
    MeshRank,
    ParallelMesh,
    Shard,
    TokenShare,
    UnitInterval,
    common_units,
    holding_of_rank,
    partition_layers,
    shard_model,
    units_of_rank,
)


def bounds(tp_size: int, num_kv_heads: int) -> list[tuple[int, int]]:
    """The head interval of every rank."""
    intervals = [units_of_rank(rank, tp_size, num_kv_heads) for rank in range(tp_size)]
    return [(heads.start, heads.stop) for heads in intervals]


@pytest.mark.parametrize(
    ("tp_size", "num_kv_heads", "expected"),
    [
        (1, 6, [(0, 6)]),
        (2, 6, [(0, 3), (3, 6)]),
        (3, 6, [(0, 2), (2, 4), (4, 6)]),
        (4, 2, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (4, 1, [(0, 1)] * 4),
    ],
)
def test_worked_examples(tp_size, num_kv_heads, expected):
    """Few ranks share the heads out; many ranks replicate them in runs."""
    assert bounds(tp_size, num_kv_heads) == expected


@given(num_kv_heads=st.integers(1, 64), quotient=st.integers(1, 16), replicated=st.booleans())
def test_every_head_is_held_equally_often(num_kv_heads, quotient, replicated):
    """No head is lost, none is favoured, and every rank holds equally many."""
    if replicated:
        tp_size, holders, per_rank = num_kv_heads * quotient, quotient, 1
        total = num_kv_heads
    else:
        tp_size, holders, per_rank = num_kv_heads, 1, quotient
        total = num_kv_heads * quotient
    held = [head for start, stop in bounds(tp_size, total) for head in range(start, stop)]
    assert sorted(held) == sorted(list(range(total)) * holders)
    assert all(stop - start == per_rank for start, stop in bounds(tp_size, total))


@pytest.mark.parametrize(("tp_size", "num_kv_heads"), [(4, 6), (6, 4), (3, 2), (5, 8)])
def test_tp_size_that_does_not_fit_is_refused(tp_size, num_kv_heads):
    """VLLM could not run such a layout; the error names both values."""
    with pytest.raises(LocalLayoutError, match=f"size {tp_size} does not fit {num_kv_heads} KV"):
        units_of_rank(0, tp_size, num_kv_heads)


def test_model_without_heads_is_refused():
    """A layer has at least one KV head."""
    with pytest.raises(LocalLayoutError, match="num_kv_heads is 0"):
        units_of_rank(0, 1, 0)


@given(num_layers=st.integers(1, 100), pp_size=st.integers(1, 16))
def test_default_partition_is_vllms(num_layers, pp_size):
    """Every stage gets the layers that vLLM gives it, also where they cannot be shared evenly."""
    if pp_size > num_layers:
        with pytest.raises(LocalLayoutError, match="without a layer"):
            partition_layers(num_layers, pp_size)
        return
    stages = partition_layers(num_layers, pp_size)
    assert [(stage.start, stage.stop) for stage in stages] == [
        get_pp_indices(num_layers, pp_rank, pp_size) for pp_rank in range(pp_size)
    ]


def test_explicit_partition_is_taken(monkeypatch):
    """An uneven partition means what VLLM_PP_LAYER_PARTITION means."""
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "10,22")
    stages = partition_layers(32, 2, [10, 22])
    assert stages == [range(0, 10), range(10, 32)]
    assert [(stage.start, stage.stop) for stage in stages] == [
        get_pp_indices(32, pp_rank, 2) for pp_rank in range(2)
    ]


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ([10, 22], "2 entries but pipeline_parallel_size is 3"),
        ([10, 10, 10], "adds up to 30 layers but the model has 32"),
        ([16, 0, 16], "stage 1 without a layer"),
        ([33, -2, 1], "stage 1 without a layer"),
    ],
)
def test_impossible_partition_is_refused(partition, message):
    """The error says which entry or sum is wrong."""
    with pytest.raises(LocalLayoutError, match=message):
        partition_layers(32, 3, partition)


def test_shards_of_a_model():
    """Each rank holds its stage's layers, with its own heads of each."""

    def half(start):
        return Holding(UnitInterval(start, start + 2), 4)

    shards = shard_model(ParallelMesh(pp_size=2, tp_size=2), num_layers=3, num_kv_heads=4)
    assert [(shard.rank, dict(shard.holdings)) for shard in shards] == [
        (MeshRank(0, 0), {0: half(0), 1: half(0)}),
        (MeshRank(0, 1), {0: half(2), 1: half(2)}),
        (MeshRank(1, 0), {2: half(0)}),
        (MeshRank(1, 1), {2: half(2)}),
    ]


def test_shards_are_values():
    """A shard cannot be changed, neither in place nor through the dictionary it was made of."""
    one = Holding(UnitInterval(0, 1), 1)
    layers = {0: one}
    shard = Shard(MeshRank(0, 0), layers)
    layers[1] = one
    assert list(shard.holdings) == [0]
    with pytest.raises(TypeError):
        shard.holdings[1] = one
    with pytest.raises(dataclasses.FrozenInstanceError):
        shard.rank = MeshRank(1, 1)


def test_layers_may_differ_and_may_have_no_cache():
    """Each layer is split by its own number of heads."""
    shards = shard_model(ParallelMesh(pp_size=1, tp_size=2), 3, {0: 4, 2: 1})
    assert [{layer: held.units for layer, held in shard.holdings.items()} for shard in shards] == [
        {0: UnitInterval(0, 2), 2: UnitInterval(0, 1)},
        {0: UnitInterval(2, 4), 2: UnitInterval(0, 1)},
    ]


@given(num_heads=st.integers(1, 12), quotient=st.integers(1, 6), replicated=st.booleans())
def test_ranks_know_their_heads_but_for_replicas(num_heads, quotient, replicated):
    """From its own number of heads a rank tells what it holds, or of which it holds one."""
    tp_size, total = (
        (num_heads * quotient, num_heads) if replicated else (num_heads, num_heads * quotient)
    )
    for rank in range(tp_size):
        truth = units_of_rank(rank, tp_size, total)
        said = holding_of_rank(rank, tp_size, len(truth))
        assert said.may_repeat == (len(truth) == 1 < tp_size)
        assert common_units([said, Holding(truth, total)]) == total
        assert said.among(total) == truth


@given(heads=st.integers(1, 8), replicas=st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_planned_units_are_parts_of_heads(heads, replicas):
    """Where nobody knows a layer's heads, ranks with one planned unit have one head."""
    sizes = [heads * each for each in replicas]
    ranks = [(rank, size) for size in sizes for rank in range(size)]
    holdings = [Holding(UnitInterval(rank, rank + 1), size, True) for rank, size in ranks]
    planned = common_units(holdings)
    assert planned is not None and planned % heads == 0
    heads_by_unit: dict = {}
    for (rank, size), holding in zip(ranks, holdings, strict=True):
        heads_by_unit.setdefault(holding.among(planned), set()).add(rank * heads // size)
    assert all(len(found) == 1 for found in heads_by_unit.values())


@pytest.mark.parametrize(
    ("units", "num_units", "may_repeat"),
    [(UnitInterval(0, 3), 2, False), (UnitInterval(0, 2), 2, True)],
)
def test_impossible_holdings_do_not_exist(units, num_units, may_repeat):
    """Nobody holds more than there is, and only single units are taken for replicas."""
    with pytest.raises(ValueError, match="cannot be held"):
        Holding(units, num_units, may_repeat)


@given(data=st.data())
def test_shares_meet_where_a_token_is_in_both(data):
    """As dealing the tokens of several rounds out shows."""
    shares = []
    for _ in range(2):
        num_shares, run_tokens = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
        shares.append(TokenShare(data.draw(st.integers(0, num_shares - 1)), num_shares, run_tokens))
    dealt = [
        {
            token
            for token in range(36 * 36)
            if token // each.run_tokens % each.num_shares == each.index
        }
        for each in shares
    ]
    assert shares[0].meets(shares[1]) is shares[1].meets(shares[0]) is bool(dealt[0] & dealt[1])


def test_all_tokens_are_one_share():
    """However long its runs would be."""
    assert TokenShare(0, 1, 16) == ALL_TOKENS
    assert (str(ALL_TOKENS), str(TokenShare(1, 4, 16))) == ("all", "1 of 4 by 16")


@pytest.mark.parametrize("share", [(-1, 2, 1), (2, 2, 1), (0, 0, 1), (0, 2, 0)])
def test_impossible_shares_do_not_exist(share):
    """Somebody holds each of them."""
    with pytest.raises(ValueError, match="is none"):
        TokenShare(*share)


def test_ranks_that_share_tokens_out_hold_the_same_units():
    """Four ranks, of which two each have one of two heads, and each of these half of its tokens."""
    shards = shard_model(ParallelMesh(1, 4), 1, 2, None, 2, 16)
    held = [shard.holdings[0] for shard in shards]
    assert [each.units.start for each in held] == [0, 0, 1, 1]
    assert [each.tokens.index for each in held] == [0, 1, 0, 1]
    assert holding_of_rank(3, 4, 1, TokenShare(1, 2, 16)) == Holding(
        UnitInterval(1, 2), 2, True, TokenShare(1, 2, 16)
    )
    # All of four ranks have what there is: nobody else can have the same head.
    assert holding_of_rank(3, 4, 1, TokenShare(3, 4)) == Holding(
        UnitInterval(0, 1), 1, tokens=TokenShare(3, 4)
    )


@pytest.mark.parametrize(
    ("tp", "heads", "num_shares", "reason"),
    [(4, 1, 3, "does not divide"), (4, 2, 4, "has 2 for each of 2"), (2, 2, 2, "has 1 for each")],
)
def test_sizes_that_share_nothing_out_are_refused(tp, heads, num_shares, reason):
    """Only ranks that would be replicas can."""
    with pytest.raises(LocalLayoutError, match=reason):
        shard_model(ParallelMesh(1, tp), 1, heads, None, num_shares)


@pytest.mark.parametrize(("start", "stop"), [(1, 1), (2, 1), (-1, 1)])
def test_empty_or_negative_intervals_do_not_exist(start, stop):
    """An interval holds at least one head."""
    with pytest.raises(ValueError, match="no interval"):
        UnitInterval(start, stop)


@given(pp_size=st.integers(1, 8), tp_size=st.integers(1, 8))
def test_ranks_are_in_the_order_of_their_global_rank(pp_size, tp_size):
    """The position of a rank is pp_rank * tp_size + tp_rank, and ranks sort in that order."""
    mesh = ParallelMesh(pp_size, tp_size)
    ranks = list(mesh.ranks())
    assert len(ranks) == len(set(ranks)) == mesh.world_size
    assert [rank.pp_rank * tp_size + rank.tp_rank for rank in ranks] == list(range(len(ranks)))
    assert sorted(ranks) == ranks


@pytest.mark.parametrize(("sizes", "axis"), [((0, 1), "pipeline"), ((1, -2), "tensor")])
def test_impossible_size_is_named(sizes, axis):
    """The error names the axis and the value."""
    with pytest.raises(LocalLayoutError, match=rf"{axis}_parallel_size is {min(sizes)} .* use 1"):
        ParallelMesh(*sizes)


def test_names_are_short():
    """Ranks and meshes read well in a log line."""
    assert str(MeshRank(1, 3)) == "pp1tp3"
    assert str(ParallelMesh(2, 4)) == "PP2 x TP4"

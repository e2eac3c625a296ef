# SPDX-License-Identifier: Apache-2.0
"""Legs, judged by moving bytes as they say between two simulated memories."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.v1.kv_connector.unit.reshard.memory.cases import (
    NUM_BLOCKS,
    SLOT,
    Memory,
    read,
    span,
    transfer,
    transfers,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import (
    LocalLayoutError,
    RemoteLayoutError,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.cache import (
    LayerCache,
    Order,
    Plane,
    RankCache,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.leg import Run
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.lowering import lower_read
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.reshard import Read


@settings(deadline=None)
@given(case=transfers(), seed=st.integers(0, 2**32 - 1))
def test_every_byte_lands_where_its_token_and_head_belong(case, seed):
    """Between any two layouts exactly the shared tokens of the named heads are written, rightly."""
    (src, dst), planned, (src_blocks, dst_blocks) = case
    random = np.random.default_rng(seed)
    src.bytes[:] = random.integers(1, 256, src.bytes.size)
    expected = dst.tensor.copy()
    for layer in range(2):
        source, target = src_blocks[src.groups[layer]], dst_blocks[dst.groups[layer]]
        for position in range(100):
            src_block, src_token = divmod(position - source.start_token, src.block_tokens)
            dst_block, dst_token = divmod(position - target.start_token, dst.block_tokens)
            if not 0 <= src_block < len(source.block_ids):
                continue
            if not 0 <= dst_block < len(target.block_ids):
                continue
            for head in range(planned.num_units):
                expected[
                    layer,
                    :,
                    target.block_ids[dst_block],
                    planned.dst_unit_offset + head,
                    dst_token // dst.slot_tokens,
                ] = src.tensor[
                    layer,
                    :,
                    source.block_ids[src_block],
                    planned.src_unit_offset + head,
                    src_token // src.slot_tokens,
                ]
    legs = lower_read(planned, src.cache(), dst.cache())
    transfer(legs, src, dst, src_blocks, dst_blocks)
    np.testing.assert_array_equal(dst.tensor, expected)


@pytest.mark.parametrize(
    ("src", "dst", "num_heads", "run", "descriptors"),
    [
        # 3 blocks of 4 tokens, 2 layers, 2 planes.
        (("HND", 4, 4), ("HND", 2, 4), 2, Run(2, 4), 12),
        (("HND", 4, 4), ("blocks first HND", 4, 4), 4, Run(4, 4), 12),
        (("NHD", 2, 4), ("NHD", 2, 4), 2, Run(2, 4), 12),
        (("NHD", 4, 4), ("NHD", 2, 4), 2, Run(2, 1), 12 * 4),
        (("HND", 2, 4), ("HND", 2, 2), 2, Run(1, 2), 12 * 2 * 2),
        (("HND", 2, 4), ("NHD", 2, 4), 2, Run(1, 1), 12 * 2 * 4),
        (("HND", 1, 4), ("NHD", 1, 4), 1, Run(1, 4), 12),
    ],
)
def test_descriptors_are_as_large_as_both_ends_allow(src, dst, num_heads, run, descriptors):
    """The table of the module's documentation holds, and costs what it says."""
    src, dst = Memory(*src), Memory(*dst)
    (leg,) = lower_read(read(num_heads), src.cache(), dst.cache())
    assert leg.run == run
    tokens = 3 * src.block_tokens
    src_blocks = [span(range(tokens // src.block_tokens))]
    dst_blocks = [span(range(tokens // dst.block_tokens))]
    assert transfer([leg], src, dst, src_blocks, dst_blocks) == descriptors


@pytest.mark.parametrize("num_blocks", [10, 1_000_000])
def test_rows_do_not_grow_with_the_number_of_blocks(num_blocks):
    """A list for a million blocks is as small as one for ten."""
    cache = Memory("HND", 4, 16).cache()
    cache = RankCache(num_blocks, cache.device_id, cache.layers)
    (leg,) = lower_read(read(2), cache, cache)
    assert leg.src.rows.shape == leg.dst.rows.shape == (4, 5)
    assert leg.src.num_descriptors == 4 * num_blocks


def test_layers_with_different_blocks_become_different_legs():
    """A hybrid model's groups may have blocks of different sizes."""
    wide, narrow = Memory("HND", 2, 8), Memory("HND", 2, 4)
    mixed = RankCache(
        NUM_BLOCKS,
        3,
        {"layer.0": wide.cache().layers["layer.0"], "layer.1": narrow.cache().layers["layer.1"]},
    )
    legs = lower_read(read(2), mixed, mixed)
    assert [leg.run for leg in legs] == [Run(2, 8), Run(2, 4)]


def packed(block_tokens: int, num_heads: int = 2) -> RankCache:
    """A cache whose backend arranges the tokens of a block as it likes."""
    head_bytes = block_tokens * SLOT
    planes = tuple(
        Plane(
            plane * NUM_BLOCKS * num_heads * head_bytes,
            num_heads * head_bytes,
            head_bytes,
            head_bytes,
            head_bytes,
            num_heads,
            block_tokens,
            slot_tokens=block_tokens,
        )
        for plane in range(2)
    )
    return RankCache(NUM_BLOCKS, 3, {f"layer.{n}": LayerCache(planes, 0) for n in range(2)})


def test_packed_blocks_move_whole_heads():
    """Where tokens have no place of their own, heads are still sliced."""
    (leg,) = lower_read(read(1, src_unit_offset=1), packed(8), packed(8, num_heads=1))
    assert leg.run == Run(1, 8)
    assert leg.src.rows[0].tolist() == [8 * SLOT, 8 * SLOT, 3, 2 * 8 * SLOT, NUM_BLOCKS]


@pytest.mark.parametrize(
    ("src", "message"),
    [
        (packed(4), "4 tokens, 4 to a slot at the source but of 8 tokens, 8 to a slot here"),
        (Memory("HND", 2, 8).cache(), "8 tokens at the source but of 8 tokens, 8 to a slot here"),
    ],
)
def test_packed_blocks_that_differ_are_refused(src, message):
    """The error names both blocks and the remedy."""
    with pytest.raises(RemoteLayoutError, match=f"{message}: .*--block-size"):
        lower_read(read(2), src, packed(8))


def test_slots_that_differ_are_refused():
    """Another dtype or head size is no layout to convert."""
    cache = Memory("HND", 1, 4).cache()
    plane = Plane(0, 32, 32, 8, 8, 1, 4)
    other = RankCache(NUM_BLOCKS, 3, {f"layer.{n}": LayerCache((plane,) * 2, 0) for n in range(2)})
    with pytest.raises(RemoteLayoutError, match="takes 8 bytes at the source but 4 here"):
        lower_read(read(1), other, cache)


def test_planes_that_differ_are_refused():
    """Keys and values cannot be filled from a latent."""
    cache = Memory("HND", 1, 4).cache()
    layers = {name: LayerCache(layer.planes[:1], 0) for name, layer in cache.layers.items()}
    with pytest.raises(RemoteLayoutError, match="has 1 planes at the source but 2 here"):
        lower_read(read(1), RankCache(NUM_BLOCKS, 3, layers), cache)


def test_heads_with_gaps_are_moved_slot_by_slot():
    """A head whose slots do not adjoin has no run but its slots."""
    torn = Plane(0, 400, 100, 10, SLOT, 1, 4)
    cache = RankCache(NUM_BLOCKS, 3, {f"layer.{n}": LayerCache((torn,) * 2, 0) for n in range(2)})
    (leg,) = lower_read(read(1), cache, cache)
    assert leg.run == Run(1, 1)


def test_lists_that_indices_cannot_count_are_refused():
    """The limit and the remedy are in the message."""
    cache = Memory("HND", 1, 4).cache()
    with pytest.raises(LocalLayoutError, match=r"4 runs in each of 1000000000 blocks .*block-size"):
        lower_read(read(1), cache, RankCache(1_000_000_000, 3, cache.layers))


@given(
    heads=st.integers(1, 3),
    tokens=st.integers(1, 3),
    strides=st.tuples(st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([1, 2, 3, 4, 6])),
)
def test_orders_are_those_in_which_the_run_is_one_stretch(heads, tokens, strides):
    """An order is offered exactly when visiting slots in that order visits adjoining bytes."""
    head_stride, token_stride = (stride * SLOT for stride in strides)
    plane = Plane(0, 1000, head_stride, token_stride, SLOT, 3, 3)
    by_head = [plane.offset_bytes(head, token) for head in range(heads) for token in range(tokens)]
    by_token = [plane.offset_bytes(head, token) for token in range(tokens) for head in range(heads)]
    stretch = [position * SLOT for position in range(heads * tokens)]
    expected = set()
    if by_head == stretch:
        expected.add(Order.HEAD_MAJOR)
    if by_token == stretch:
        expected.add(Order.TOKEN_MAJOR)
    assert plane.orders(heads, tokens) == expected


def _sides(*sizes: int, keys_lead: bool = True) -> RankCache:
    """A layer with a plane for each size of a slot, of one head and blocks of four tokens."""
    planes = tuple(
        Plane(1000 * number, 4 * size, 4 * size, size, size, 1, 4)
        for number, size in enumerate(sizes)
    )
    return RankCache(8, 0, {"layer.0": LayerCache(planes, 0, keys_lead=keys_lead)})


def _read_one() -> Read:
    return replace(read(1), layers=("layer.0",))


@pytest.mark.parametrize(
    ("src", "dst", "addresses"),
    [((6, 2), (8,), [(0, 0, 6), (1000, 6, 2)]), ((8,), (6, 2), [(0, 0, 6), (6, 1000, 2)])],
)
def test_keys_and_values_of_two_sizes_are_taken_apart(src, dst, addresses):
    """Where they meet in a slot is where the other end's keys are over."""
    legs = lower_read(_read_one(), _sides(*src), _sides(*dst))
    found = [
        (int(leg.src.rows[0, 0]), int(leg.dst.rows[0, 0]), int(leg.src.rows[0, 1])) for leg in legs
    ]
    assert found == addresses


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (_sides(4, 4), _sides(8, keys_lead=False)),
        (_sides(4, 4), _sides(9)),
        (_sides(4, 4, 4), _sides(12)),
    ],
    ids=["unknown inside", "another size", "three"],
)
def test_what_is_no_key_and_value_is_not_taken_apart(src, dst):
    """It is refused by the number of planes."""
    with pytest.raises(
        RemoteLayoutError, match=r"layer\.0 has [23] planes at the source but 1 here"
    ):
        lower_read(_read_one(), src, dst)

# SPDX-License-Identifier: Apache-2.0
"""Planes of views [blocks, heads, tokens, content], whatever lies where."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.ops.paged_attn import PagedAttention

from tests.bases import requires_base
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches.cache_views import (
    Arrangement,
    describe_layer,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import LocalLayoutError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.cache import Plane

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 6, 2, 16, 24
SIZES = dict(L=LAYERS, B=BLOCKS, H=HEADS, N=TOKENS, C=CONTENT)


def view(order: str, layer: int = 1) -> torch.Tensor:
    """A layer's view of memory whose axes come in an order."""
    together = torch.empty([SIZES[axis] for axis in order])
    return together.permute([order.index(axis) for axis in "LBHNC"])[layer]


def describe(
    tensor: torch.Tensor,
    arrangement: Arrangement = Arrangement.SLOTS,
    *,
    heads: int = HEADS,
    tokens_per_state: int | Fraction = 1,
):
    """What is made of a tensor whose layer has so many KV heads."""
    spec = SimpleNamespace(num_kv_heads=heads, tokens_per_state=tokens_per_state)
    return describe_layer("layer", tensor, spec, object(), arrangement)


def runs(plane: Plane, block: int) -> list[int]:
    """Where each head's run of a block's tokens begins, which adjoin."""
    assert plane.slot_tokens == plane.block_tokens
    return [
        plane.address + block * plane.block_stride_bytes + plane.offset_bytes(head, 0)
        for head in range(plane.num_heads)
    ]


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_every_slot_is_found(order):
    """Address and strides lead to the very element that indexing the view gives."""
    tensor = view(order)
    num_blocks, (plane,) = describe(tensor)
    assert num_blocks == BLOCKS
    assert (plane.num_heads, plane.block_tokens) == (HEADS, TOKENS)
    assert plane.slot_bytes == CONTENT * 4
    for block in range(BLOCKS):
        for head in range(HEADS):
            for token in (0, 5, TOKENS - 1):
                address = (
                    plane.address
                    + block * plane.block_stride_bytes
                    + plane.offset_bytes(head, token)
                )
                assert address == tensor[block, head, token, 0].data_ptr()


@pytest.mark.parametrize("order", ["LBHNC", "BHLNC"])
def test_packed_heads_are_whole(order):
    """A head's tokens adjoin, keys and values together, and none has a place of its own."""
    tensor = view(order)
    _, (plane,) = describe(tensor, Arrangement.HEADS)
    assert plane.orders(1, TOKENS)
    assert not plane.orders(1, 1)
    assert runs(plane, 3) == [tensor[3, head].data_ptr() for head in range(HEADS)]
    assert plane.slot_bytes == TOKENS * CONTENT * 4


def test_several_slots_of_a_head_are_one_unit():
    """MiniMax M3 keeps numbers of 4 bits in a slot for keys and one for values."""
    _, (plane,) = describe(view("LBHNC"), Arrangement.HEADS, heads=1)
    assert (plane.num_heads, plane.heads_per_unit) == (2, 2)


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "LHBNC"])
def test_sides_have_all_heads_of_a_token(order):
    """Key and value of a head are where B12X's own view of the cache has them."""
    tensor, heads = view(order), 3
    _, planes = describe(tensor, Arrangement.SIDES, heads=heads)
    # `B12xPagedAttentionImpl._kv_cache_views`
    for plane, side in zip(planes, tensor.unbind(1), strict=True):
        by_head = side.unflatten(-1, (heads, -1))
        assert (plane.num_heads, plane.slot_bytes) == (heads, by_head.shape[-1] * 4)
        for block, token, head in ((0, 0, 0), (5, 7, 2), (2, 15, 1)):
            address = (
                plane.address + block * plane.block_stride_bytes + plane.offset_bytes(head, token)
            )
            assert address == by_head[block, token, head].data_ptr()


@pytest.mark.parametrize("order", ["LBHNC", "LHBNC"])
def test_packed_sides_have_every_head_in_one_piece(order):
    """They are where ROCm's own split of the cache has them."""
    tensor, heads = view(order), 3
    _, planes = describe(tensor, Arrangement.PACKED_SIDES, heads=heads)
    assert len(planes) == 2
    keys, values = PagedAttention.split_kv_cache(tensor.transpose(0, 1), heads, CONTENT // heads)
    for plane, side in zip(planes, (keys, values), strict=True):
        assert runs(plane, 4) == [side[4, head].data_ptr() for head in range(heads)]
        assert plane.slot_bytes == side[4, 0].numel() * 4


@requires_base("0.32.0", "0.33.0", reason="FlashInfer keeps no numbers of 4 bits")
def test_quarters_are_numbers_and_scales_of_keys_and_of_values():
    """They are where FlashInfer's own views of such pages have them."""
    from vllm.utils.torch_utils import nvfp4_split_data_scale

    heads, content = 3, 72
    tensor = torch.zeros(BLOCKS, 2 * heads, TOKENS, content, dtype=torch.uint8)
    _, planes = describe(tensor, Arrangement.QUARTERS, heads=heads)
    assert [plane.slot_bytes for plane in planes] == [TOKENS * 64, TOKENS * 8] * 2
    views = []
    for side in range(2):
        # `_nvfp4_kv_views`
        views += nvfp4_split_data_scale(tensor[:, side * heads : (side + 1) * heads])
    for plane, part in zip(planes, views, strict=True):
        assert runs(plane, 2) == [part[2, head].data_ptr() for head in range(heads)]


@pytest.mark.parametrize(
    ("order", "num_heads"), [("LBHNC", 1), ("LBNHC", 1), ("BLHNC", 1), ("LHBNC", 2), ("BHLNC", 2)]
)
def test_whole_blocks_are_one_unit(order, num_heads):
    """In one piece where a rank's bytes of a block adjoin, and else in one for each slot."""
    tensor = view(order)
    _, (plane,) = describe(tensor, Arrangement.PAGE, heads=7)
    assert (plane.num_heads, plane.heads_per_unit) == (num_heads, num_heads)
    assert plane.num_heads * plane.slot_bytes == tensor[0].numel() * 4
    assert runs(plane, 5) == [tensor[5, head].data_ptr() for head in range(num_heads)]


@pytest.mark.parametrize(("states", "tokens_per_state", "size"), [(64, 4, 584), (2, 128, 584)])
def test_states_of_several_tokens(states, tokens_per_state, size):
    """A block of DeepSeek V4's need not be an integral number of bytes for each of its tokens."""
    tensor = torch.zeros(BLOCKS, 1, states, size, dtype=torch.uint8)
    options = dict(heads=1, tokens_per_state=tokens_per_state)
    _, (page,) = describe(tensor, Arrangement.PAGE, **options)
    assert (page.block_tokens, page.slot_tokens, page.slot_bytes) == (256, 256, states * size)
    _, (row,) = describe(tensor, Arrangement.SLOTS, **options)
    assert (row.block_tokens, row.slot_tokens, row.slot_bytes) == (256, tokens_per_state, size)


@pytest.mark.parametrize(
    ("tensor", "options", "message"),
    [
        (torch.empty(2, BLOCKS, HEADS, TOKENS, CONTENT), {}, "shape .*not understood"),
        (torch.empty(BLOCKS, HEADS, TOKENS, 2 * CONTENT)[..., ::2], {}, "in steps of 8 bytes"),
        # Keys of all heads and then values, as some backends store numbers of 4 bits.
        (view("LBHNC"), dict(heads=1), "keeps 1 KV heads as slots, but has 2 slots"),
        # Two slots for any number of heads, as some backends store for their kernels.
        (view("LBHNC"), dict(heads=4), "keeps 4 KV heads as slots, but has 2 slots"),
        (
            view("LBNHC"),
            dict(arrangement=Arrangement.HEADS),
            "2 KV heads as packed heads, but .*VLLM_KV_CACHE_LAYOUT unset",
        ),
        (view("LBHNC"), dict(arrangement=Arrangement.HEADS, heads=4), "4 KV heads as packed"),
        (view("LBHNC"), dict(arrangement=Arrangement.SIDES, heads=5), "5 KV heads as keys and"),
        (view("LBNHC"), dict(arrangement=Arrangement.PACKED_SIDES), "2 KV heads as keys and"),
        (view("LBHNC"), dict(arrangement=Arrangement.QUARTERS), "2 KV heads as keys, their"),
        (view("LBNHC")[:, :1], dict(arrangement=Arrangement.PAGE), "as whole blocks, but"),
        (view("LBHNC"), dict(tokens_per_state=Fraction(1, 4)), "keeps 2 KV heads as slots"),
    ],
)
def test_what_cannot_be_described_is_refused(tensor, options, message):
    """The error names the layer, and what to do."""
    with pytest.raises(LocalLayoutError, match=f"layer layer .*{message}"):
        describe(tensor, **options)

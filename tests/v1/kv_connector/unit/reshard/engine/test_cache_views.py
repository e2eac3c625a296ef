# SPDX-License-Identifier: Apache-2.0
"""Planes of views [blocks, heads, tokens, content], whatever lies where."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.cache_views import describe_layer
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import LocalLayoutError

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 6, 2, 16, 24
SIZES = dict(L=LAYERS, B=BLOCKS, H=HEADS, N=TOKENS, C=CONTENT)


def view(order: str, layer: int = 1) -> torch.Tensor:
    """A layer's view of memory whose axes come in an order."""
    together = torch.empty([SIZES[axis] for axis in order])
    return together.permute([order.index(axis) for axis in "LBHNC"])[layer]


def describe(tensor: torch.Tensor, *, heads: int = HEADS, packed: bool = False):
    """What is made of a tensor whose layer has so many KV heads."""
    spec = SimpleNamespace(num_kv_heads=heads)
    return describe_layer("layer", tensor, spec, object(), packed=packed)


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
    _, (plane,) = describe(view(order), packed=True)
    assert plane.packed
    assert plane.orders(1, TOKENS)
    assert not plane.orders(1, 1)


@pytest.mark.parametrize(
    ("tensor", "options", "message"),
    [
        (torch.empty(2, BLOCKS, HEADS, TOKENS, CONTENT), {}, "shape .*not understood"),
        (torch.empty(BLOCKS, HEADS, TOKENS, 2 * CONTENT)[..., ::2], {}, "in steps of 8 bytes"),
        # Keys of all heads and then values, as some backends store numbers of 4 bits.
        (view("LBHNC"), dict(heads=1), "keeps 1 KV heads in 2 slots"),
        # Two slots for any number of heads, as some backends store for their kernels.
        (view("LBHNC"), dict(heads=4), "keeps 4 KV heads in 2 slots"),
        (view("LBNHC"), dict(packed=True), "packs the tokens of a head and spreads them"),
    ],
)
def test_what_cannot_be_described_is_refused(tensor, options, message):
    """The error names the layer, and what to do."""
    with pytest.raises(LocalLayoutError, match=f"layer layer .*{message}"):
        describe(tensor, **options)

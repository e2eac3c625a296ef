# SPDX-License-Identifier: Apache-2.0
"""Memories of any layout, and what is read between them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.cache import (
    LayerCache,
    Plane,
    RankCache,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.leg import Leg, Selection
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.overlap import BlockRun, overlap
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.staging import (
    StagingPolicy,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.reshard import Read
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import MeshRank, UnitInterval

SLOT = 4
NUM_BLOCKS = 12
LAYOUTS = {
    # Axes of one plane's tensor, slowest first. `p` is keys and values, `l` the layers.
    "HND": "pbhts",
    "NHD": "pbths",
    "blocks first HND": "bphts",
    "blocks first NHD": "bpths",
    "cross-layer HND": "blphts",
    "side by side HND": "bhtps",
    "side by side NHD": "bthps",
    "cross-layer side by side": "bhltps",
}
SIDE_BY_SIDE = frozenset(name for name, axes in LAYOUTS.items() if axes.endswith("ps"))
"""Those in which keys and values are one plane."""


@dataclass
class Memory:
    """A simulated rank: a cache of two layers in a byte array, in one of the layouts."""

    layout: str
    num_heads: int
    block_tokens: int
    groups: tuple[int, int] = (0, 0)
    slot_tokens: int = 1

    def __post_init__(self) -> None:
        axes = LAYOUTS[self.layout]
        sizes = {
            "p": 2,
            "l": 2,
            "b": NUM_BLOCKS,
            "h": self.num_heads,
            "t": self.block_tokens // self.slot_tokens,
            "s": SLOT,
        }
        axes = axes if "l" in axes else "l" + axes
        self.bytes = np.zeros(math.prod(sizes[axis] for axis in axes), dtype=np.uint8)
        # The same bytes, indexed by layer, plane, block, head, slot, byte in this order.
        tensor = self.bytes.reshape([sizes[axis] for axis in axes])
        self.tensor = tensor.transpose([axes.index(axis) for axis in "lpbhts"])

    def cache(self) -> RankCache:
        """What the rank would say of its cache; addresses count from the array's start."""
        block, head, token = self.tensor.strides[2:5]
        num_planes = 1 if self.layout in SIDE_BY_SIDE else 2
        layers = {}
        for layer, group in enumerate(self.groups):
            planes = tuple(
                Plane(
                    address=layer * self.tensor.strides[0] + plane * self.tensor.strides[1],
                    block_stride_bytes=block,
                    head_stride_bytes=head,
                    slot_stride_bytes=token,
                    slot_bytes=2 * SLOT // num_planes,
                    num_heads=self.num_heads,
                    block_tokens=self.block_tokens,
                    slot_tokens=self.slot_tokens,
                )
                for plane in range(num_planes)
            )
            layers[f"layer.{layer}"] = LayerCache(planes, group, keys_lead=True)
        return RankCache(NUM_BLOCKS, device_id=3, layers=layers)


def descriptor(end, index: int) -> slice:
    """The bytes that one index of a prepared list stands for."""
    row, block = divmod(int(index), end.num_blocks)
    address, length, device_id, stride, count = (int(value) for value in end.rows[row])
    assert (device_id, count) == (3, NUM_BLOCKS)
    return slice(address + block * stride, address + block * stride + length)


def select(leg: Leg, src_blocks, dst_blocks) -> list[Selection]:
    """What a leg moves between blocks of each group, which are given by the tokens that they hold.

    Without what `RequestBlocks` checks of a request's blocks before.
    """
    sizes = leg.src.block_tokens, leg.dst.block_tokens
    return [
        Selection(common, planes)
        for (src, dst), planes in leg.planes_by_groups
        if (common := overlap(src_blocks[src], dst_blocks[dst], *sizes)) is not None
    ]


def transfer(legs, src: Memory, dst: Memory, src_blocks, dst_blocks) -> int:
    """Copy every descriptor; returns how many there were."""
    copied = 0
    for leg in legs:
        src_indices, dst_indices = leg.indices(select(leg, src_blocks, dst_blocks))
        assert src_indices.dtype == dst_indices.dtype == np.int32
        for src_index, dst_index in zip(src_indices, dst_indices, strict=True):
            dst.bytes[descriptor(leg.dst, dst_index)] = src.bytes[descriptor(leg.src, src_index)]
            copied += 1
    return copied


def span(block_ids, start_token: int = 0) -> BlockRun:
    """Blocks of a request."""
    return BlockRun(np.asarray(block_ids, dtype=np.int64), start_token)


def read(num_heads: int, src_unit_offset: int = 0, dst_unit_offset: int = 0) -> Read:
    """A read of both layers."""
    return Read(
        MeshRank(0, 0),
        MeshRank(0, 0),
        ("layer.0", "layer.1"),
        UnitInterval(0, num_heads),
        src_unit_offset,
        dst_unit_offset,
    )


@st.composite
def transfers(draw):
    """Two memories of any layout, a slice of heads, and a request's blocks at both ends."""
    layouts = st.sampled_from(sorted(LAYOUTS))
    num_heads = draw(st.integers(1, 3))
    offsets = draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    spare_heads = draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    block_tokens = draw(st.tuples(st.sampled_from([2, 4, 6, 12]), st.sampled_from([2, 4, 6, 12])))
    groups = draw(st.permutations([0, 1])), draw(st.permutations([0, 1]))
    slot_tokens = draw(st.sampled_from([1, 2]))
    memories = tuple(
        Memory(draw(layouts), num_heads + offset + spare, tokens, tuple(group), slot_tokens)
        for offset, spare, tokens, group in zip(
            offsets, spare_heads, block_tokens, groups, strict=True
        )
    )
    spans = []
    for memory in memories:
        spans.append([])
        for _ in range(2):
            ids = draw(st.permutations(range(NUM_BLOCKS)))[: draw(st.integers(0, 5))]
            spans[-1].append(span(ids, draw(st.integers(0, 3)) * memory.block_tokens))
    return memories, read(num_heads, *offsets), spans


counts = st.integers(1, 10**6)
policies = st.builds(StagingPolicy, counts, st.integers(1, 1000), counts)

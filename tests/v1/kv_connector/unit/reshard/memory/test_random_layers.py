# SPDX-License-Identifier: Apache-2.0
"""Plan, check and lowering together, for models no two layers of which need be alike."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.v1.kv_connector.unit.reshard.conftest import as_workers_say
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.cache import (
    LayerCache,
    Plane,
    RankCache,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.lowering import (
    lower_read,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.overlap import BlockSpan
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.reshard import plan_reshard
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import Shard
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.verify import verify_plan

NUM_IDS, NUM_TOKENS = 5, 24
_NOTHING = 255


@dataclass(frozen=True)
class Form:
    """How one engine keeps one layer.

    Attributes:
        slot_bytes: Size of a head of a token in a plane; the same at both engines.
        num_planes: The same.
        block_tokens: Tokens in a block.
        blocks_per_id: Blocks that a block id stands for.
        token_major: NHD instead of HND.
    """

    slot_bytes: int
    num_planes: int
    block_tokens: int
    blocks_per_id: int
    token_major: bool


class Rank:
    """A rank's cache, each layer in its own form and in a KV-cache group of its own."""

    def __init__(self, shard: Shard, forms: dict[int, Form]) -> None:
        self.shard, self.forms = shard, forms
        self.arrays, layers, sizes = {}, {}, []
        for layer, holding in shard.holdings.items():
            form, num_heads = forms[layer], len(holding.units)
            blocks = NUM_IDS * form.blocks_per_id
            sizes.append(form.num_planes * blocks * num_heads * form.block_tokens * form.slot_bytes)
        self.bytes = np.full(sum(sizes), _NOTHING, np.uint8)
        start = 0
        for (layer, holding), size in zip(shard.holdings.items(), sizes, strict=True):
            form, num_heads = forms[layer], len(holding.units)
            inner = (num_heads, form.block_tokens)
            array = self.bytes[start : start + size].reshape(
                form.num_planes,
                -1,
                *(reversed(inner) if form.token_major else inner),
                form.slot_bytes,
            )
            # Plane, block, head, token, byte.
            array = array.swapaxes(2, 3) if form.token_major else array
            self.arrays[layer] = array
            plane_stride, block_stride, head_stride, token_stride, _ = array.strides
            planes = tuple(
                Plane(
                    start + plane * plane_stride,
                    block_stride,
                    head_stride,
                    token_stride,
                    form.slot_bytes,
                    num_heads,
                    form.block_tokens,
                )
                for plane in range(form.num_planes)
            )
            layers[layer] = LayerCache(planes, group=layer, blocks_per_id=form.blocks_per_id)
            start += size
        self.cache = RankCache(NUM_IDS, 0, layers)

    def blocks(self, layer: int) -> np.ndarray:
        """The blocks of the sequence: those of the last ids, the last one first."""
        form = self.forms[layer]
        count = math.ceil(NUM_TOKENS / form.block_tokens)
        return np.arange(NUM_IDS * form.blocks_per_id)[::-1][:count].copy()

    def expected(self, shard: Shard) -> np.ndarray:
        """All bytes once the sequence is here, for a rank that really holds `shard`."""
        other = Rank(self.shard, self.forms)
        for layer, holding in shard.holdings.items():
            form = self.forms[layer]
            for number, block in enumerate(self.blocks(layer)):
                for position, head in enumerate(range(holding.units.start, holding.units.stop)):
                    for token in range(form.block_tokens):
                        at = number * form.block_tokens + token
                        if at < NUM_TOKENS:
                            for plane in range(form.num_planes):
                                name = (layer, plane, head, at)
                                other.arrays[layer][plane, block, position, token] = (
                                    hash(name) % _NOTHING
                                )
        return other.bytes


def spans(rank: Rank, num_layers: int) -> list[BlockSpan]:
    """The blocks of the sequence in every group."""
    nothing = BlockSpan(np.empty(0, np.int64), 0)
    return [
        BlockSpan(rank.blocks(layer), 0) if layer in rank.shard.holdings else nothing
        for layer in range(num_layers)
    ]


@st.composite
def engine_forms(draw, num_layers: int):
    """How two engines keep each layer."""
    pairs = []
    for _ in range(num_layers):
        slot_bytes, num_planes = draw(st.sampled_from([1, 3, 8])), draw(st.integers(1, 2))
        pairs.append(
            tuple(
                Form(slot_bytes, num_planes, block_tokens, draw(st.sampled_from([2, 3])), major)
                for block_tokens, major in (
                    (draw(st.sampled_from([4, 6, 12])), draw(st.booleans())) for _ in range(2)
                )
            )
        )
    return ({n: pair[end] for n, pair in enumerate(pairs)} for end in range(2))


@settings(max_examples=40)
@given(data=st.data(), replica_offset=st.integers(0, 5))
def test_every_byte_of_every_layer_lands_where_it_belongs(engine_pairs, data, replica_offset):
    """Whatever heads, sizes and blocks each layer has: all of a sequence arrives, nothing else."""
    src, dst = data.draw(engine_pairs)
    num_layers = 1 + max(layer for shard in dst for layer in shard.holdings)
    src_forms, dst_forms = data.draw(engine_forms(num_layers))
    said_src, said_dst = as_workers_say(src), as_workers_say(dst)
    plan = plan_reshard(said_src, said_dst, replica_offset=replica_offset)
    assert verify_plan(said_src, said_dst, plan) == []
    sources = {shard.rank: Rank(shard, src_forms) for shard in src}
    for shard in src:
        sources[shard.rank].bytes[:] = sources[shard.rank].expected(shard)
    for shard in dst:
        reader = Rank(shard, dst_forms)
        for read in plan.reads_of(shard.rank):
            source = sources[read.src_rank]
            for leg in lower_read(read, source.cache, reader.cache):
                selected = leg.select(spans(source, num_layers), spans(reader, num_layers))
                length = np.arange(int(leg.src.rows[0, 1]))
                from_, to = (
                    end.addresses(indices.astype(np.int64))[:, np.newaxis] + length
                    for end, indices in zip((leg.src, leg.dst), leg.indices(selected), strict=True)
                )
                reader.bytes[to] = source.bytes[from_]
        np.testing.assert_array_equal(reader.bytes, reader.expected(shard))

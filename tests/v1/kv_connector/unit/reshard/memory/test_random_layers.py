# SPDX-License-Identifier: Apache-2.0
"""Plan, check and lowering together, for models no two layers of which need be alike.

And for engines whose ranks share tokens out. Which rank has which token of which head is written
down here by hand, as a dealer would: nothing of the planner's is asked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.v1.kv_connector.unit.reshard.conftest import as_workers_say
from tests.v1.kv_connector.unit.reshard.memory.cases import select
from tools.verify import verify_plan
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.cache import (
    LayerCache,
    Plane,
    RankCache,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.lowering import lower_read
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.overlap import BlockRun
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.staging import Span, stage_leg
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.reshard import plan_reshard
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import (
    ParallelMesh,
    Shard,
    TokenShare,
    shard_model,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.arena import ArenaCopier

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
        form, share = self.forms[layer], self.shard.holdings[layer].tokens
        count = math.ceil(NUM_TOKENS / (form.block_tokens * share.num_shares))
        return np.arange(NUM_IDS * form.blocks_per_id)[::-1][:count].copy()

    def expected(self, shard: Shard) -> np.ndarray:
        """All bytes once the sequence is here, for a rank that really holds `shard`."""
        other = Rank(self.shard, self.forms)
        for layer, holding in shard.holdings.items():
            form, blocks = self.forms[layer], self.blocks(layer)
            for place, at in enumerate(dealt(holding.tokens)):
                number, token = divmod(place, form.block_tokens)
                for position, head in enumerate(range(holding.units.start, holding.units.stop)):
                    for plane in range(form.num_planes):
                        name = (layer, plane, head, at)
                        other.arrays[layer][plane, blocks[number], position, token] = (
                            hash(name) % _NOTHING
                        )
        return other.bytes


def dealt(share: TokenShare) -> list[int]:
    """The tokens of a share, in the order in which they are dealt."""
    hands: list[list[int]] = [[] for _ in range(share.num_shares)]
    for token in range(NUM_TOKENS):
        hands[token // share.run_tokens % share.num_shares].append(token)
    return hands[share.index]


def spans(rank: Rank, num_layers: int) -> list[BlockRun]:
    """The blocks of the sequence in every group."""
    nothing = BlockRun(np.empty(0, np.int64), 0)
    return [
        BlockRun(rank.blocks(layer), 0, rank.shard.holdings[layer].tokens)
        if layer in rank.shard.holdings
        else nothing
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


@st.composite
def engine_shares(draw, heads_by_layer: dict[int, int], whole: set[int]):
    """An engine of any size that shares tokens out, but those of some layers, and its runs."""
    most = math.lcm(*heads_by_layer.values())
    num_shares = draw(st.sampled_from([1, 2, 3, 4]))
    mesh = ParallelMesh(draw(st.integers(1, len(heads_by_layer))), most * num_shares)
    if draw(st.booleans()):
        mesh = ParallelMesh(mesh.pp_size, 2 * mesh.tp_size)
    run_tokens = draw(st.sampled_from([1, 2, 3, 4, 12]))
    layout = mesh, len(heads_by_layer), heads_by_layer, None
    engine = tuple(
        Shard(
            shared.rank,
            {
                layer: (replicated if layer in whole else shared).holdings[layer]
                for layer in shared.holdings
            },
        )
        for shared, replicated in zip(
            shard_model(*layout, num_shares, run_tokens), shard_model(*layout), strict=True
        )
    )
    return engine, run_tokens if num_shares > 1 else 1


@st.composite
def sharing_engines(draw):
    """Two engines that share tokens out, with the forms of their layers."""
    heads_by_layer = dict(
        enumerate(draw(st.lists(st.sampled_from([1, 2]), min_size=1, max_size=3)))
    )
    whole = draw(st.sets(st.sampled_from(sorted(heads_by_layer))))
    sides = [draw(engine_shares(heads_by_layer, whole)) for _ in range(2)]
    forms: tuple[dict[int, Form], dict[int, Form]] = ({}, {})
    for layer in heads_by_layer:
        slot_bytes, num_planes = draw(st.sampled_from([1, 3, 8])), draw(st.integers(1, 2))
        for (_, run_tokens), of_layer in zip(sides, forms, strict=True):
            sizes = [size for size in (4, 6, 12) if size % run_tokens == 0]
            of_layer[layer] = Form(
                slot_bytes,
                num_planes,
                draw(st.sampled_from(sizes)),
                draw(st.sampled_from([2, 3])),
                draw(st.booleans()),
            )
    return tuple(engine for engine, _ in sides), forms


def read_direct(leg, selected, source: Rank, reader: Rank) -> None:
    """Copy every descriptor."""
    length = np.arange(int(leg.src.rows[0, 1]))
    from_, to = (
        end.addresses(indices.astype(np.int64))[:, np.newaxis] + length
        for end, indices in zip((leg.src, leg.dst), leg.indices(selected), strict=True)
    )
    reader.bytes[to] = source.bytes[from_]


def read_staged(leg, selected, source: Rank, reader: Rank, limit_bytes: int) -> None:
    """Copy windows into an arena, and from there to where they belong."""
    staged, arena = stage_leg(leg, source.cache), torch.zeros(1 << 16, dtype=torch.uint8)
    own, length = torch.from_numpy(reader.bytes), np.arange(staged.descriptor_bytes)
    copies = ArenaCopier(arena, [own])
    for window in staged.windows(selected, limit_bytes):
        where = Span(0, window.size_bytes)
        at_source, in_arena = (each.astype(np.int64) for each in staged.indices(window, where))
        from_ = staged.src.addresses(at_source)[:, np.newaxis] + length
        arena.numpy()[in_arena[:, np.newaxis] * len(length) + length] = source.bytes[from_]
        scatter = staged.scatter(window, where)
        copies.scatter(replace(scatter, addresses=scatter.addresses + own.data_ptr()))


def assert_all_arrives(src, dst, src_forms, dst_forms, replica_offset, read_leg):
    """Have each destination rank read a sequence; all that it should hold arrives, nothing else.

    Args:
        src, dst: The shards of both engines.
        src_forms, dst_forms: How each layer is kept.
        replica_offset: Which replica reads.
        read_leg: Moves what was selected of one leg, from a source to a reader.
    """
    said_src, said_dst = as_workers_say(src), as_workers_say(dst)
    plan = plan_reshard(said_src, said_dst, replica_offset=replica_offset)
    assert verify_plan(said_src, said_dst, plan) == []
    sources = {shard.rank: Rank(shard, src_forms) for shard in src}
    for shard in src:
        sources[shard.rank].bytes[:] = sources[shard.rank].expected(shard)
    num_layers = len(src_forms)
    for shard in dst:
        reader = Rank(shard, dst_forms)
        for read in plan.reads_of(shard.rank):
            source = sources[read.src_rank]
            for leg in lower_read(read, source.cache, reader.cache):
                selected = select(leg, spans(source, num_layers), spans(reader, num_layers))
                read_leg(leg, selected, source, reader)
        np.testing.assert_array_equal(reader.bytes, reader.expected(shard))


@settings(max_examples=40)
@given(data=st.data(), replica_offset=st.integers(0, 5))
def test_every_byte_of_every_layer_lands_where_it_belongs(engine_pairs, data, replica_offset):
    """Whatever heads, sizes and blocks each layer has: all of a sequence arrives, nothing else."""
    src, dst = data.draw(engine_pairs)
    num_layers = 1 + max(layer for shard in dst for layer in shard.holdings)
    src_forms, dst_forms = data.draw(engine_forms(num_layers))
    assert len(src_forms) == num_layers
    assert_all_arrives(src, dst, src_forms, dst_forms, replica_offset, read_direct)


@settings(max_examples=150, deadline=None)
@given(
    sides=sharing_engines(),
    replica_offset=st.integers(0, 5),
    limit_bytes=st.sampled_from([None, 1, 100, 1 << 16]),
)
def test_every_token_lands_on_the_rank_that_it_is_dealt_to(sides, replica_offset, limit_bytes):
    """However two engines share tokens out, direct and by way of an arena."""
    (src, dst), (src_forms, dst_forms) = sides
    read_leg = read_direct if limit_bytes is None else partial(read_staged, limit_bytes=limit_bytes)
    assert_all_arrives(src, dst, src_forms, dst_forms, replica_offset, read_leg)

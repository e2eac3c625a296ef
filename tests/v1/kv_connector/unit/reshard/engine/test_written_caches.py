# SPDX-License-Identifier: Apache-2.0
"""What one engine's attention has written, another one's reads, whatever lies between the two.

Caches are the release's, written and read by the attention that engines have end to end; what moves
them is the connector's description of them, its plan and its descriptors, copied in memory.
"""

# What is skipped on a base imports what that base lacks.
# ruff: noqa: E402

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.bases import skip_module_unless_base

skip_module_unless_base("0.32.0", "0.33.0", reason="caches are no views")

from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, get_kv_quant_mode
from vllm.v1.kv_cache_layout import KVCacheLayout

from tests.v1.kv_connector.unit.reshard.engine.release_caches import LAYERS, Cache
from tests.v1.kv_connector.unit.reshard.memory.cases import select
from tools.pdstack.modules.gpu_caches.gpu_caches import heads, latents
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches.ownership import (
    shard_of_worker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.cache import RankCache
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.leg import Leg, LegEnd
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.lowering import lower_read
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.overlap import BlockRun
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.staging import Span, stage_leg
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.reshard import plan_reshard
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import MeshRank
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.arena import ArenaCopier

SIZE = 8
NUM_BLOCKS = 12
ALL = tuple(layout.name for layout in KVCacheLayout)
COMPACT = tuple(layout.name for layout in heads.BLOCK_COMPACT)


@dataclass(frozen=True)
class Kind:
    """What is kept, and how.

    Attributes:
        backend: Who writes and reads.
        layouts: Orders of axes that it takes.
        is_whole: Whether nobody looks into a block.
        is_packed: Whether only heads have a place of their own in it.
        is_latent: Whether all ranks have the same.
        is_scaled: Whether numbers have 8 bits.
    """

    backend: Any
    layouts: tuple[str, ...]
    is_whole: bool = False
    is_packed: bool = False
    is_latent: bool = False
    is_scaled: bool = False

    def spec(self, num_heads: int, block_tokens: int) -> Any:
        """The specification of a rank's layers, before the backend has had its say."""
        fields: dict[str, Any] = {"dtype": torch.float32}
        if self.is_scaled:
            mode = get_kv_quant_mode("fp8_per_token_head")
            fields = {"dtype": torch.uint8, "kv_quant_mode": mode}
        kind = MLAAttentionSpec if self.is_latent else FullAttentionSpec
        size = 2 * SIZE if self.is_latent else SIZE
        return kind(block_size=block_tokens, num_kv_heads=num_heads, head_size=size, **fields)


KINDS = (
    Kind(heads.Slots, ALL),
    Kind(heads.Sides, ALL),
    Kind(heads.PackedSides, ("LBHNC", "LHBNC"), is_packed=True),
    Kind(heads.Scaled, ALL, is_scaled=True),
    Kind(heads.ScalesLast, COMPACT, is_whole=True, is_scaled=True),
    Kind(heads.Scrambled, COMPACT, is_whole=True),
    Kind(latents.Slots, ALL, is_latent=True),
    Kind(latents.Scrambled, COMPACT, is_whole=True, is_latent=True),
)


@dataclass(frozen=True)
class Side:
    """An engine.

    Attributes:
        tp: TP ranks.
        stages: The layers of each stage.
        layout: In what order axes lie in memory.
        block_tokens: Tokens in a block of the scheduler's.
        kernel_tokens: The same of the backend's.
        blocks: The scheduler's ids, in the order of the sequence.
    """

    tp: int
    stages: tuple[tuple[str, ...], ...]
    layout: str
    block_tokens: int
    kernel_tokens: int
    blocks: tuple[int, ...]

    @property
    def table(self) -> torch.Tensor:
        """The backend's blocks, in the order of the sequence."""
        ratio = self.block_tokens // self.kernel_tokens
        return (torch.tensor(self.blocks)[:, None] * ratio + torch.arange(ratio)).flatten()

    def slots(self, tokens: range) -> torch.Tensor:
        """Where tokens are."""
        at = torch.arange(tokens.start, tokens.stop)
        return self.table[at // self.kernel_tokens] * self.kernel_tokens + at % self.kernel_tokens

    def span(self, start_token: int) -> BlockRun:
        """The backend's blocks that hold the sequence from a token on, which begins one."""
        return BlockRun(self.table[start_token // self.kernel_tokens :].numpy(), start_token)


class Rank:
    """A worker's caches."""

    def __init__(self, kind: Kind, side: Side, rank: MeshRank, num_heads: int) -> None:
        self.kind, self.side, self.layers = kind, side, side.stages[rank.pp_rank]
        owned = 1 if kind.is_latent else max(1, num_heads // side.tp)
        first = 0 if kind.is_latent else rank.tp_rank * num_heads // side.tp
        self.heads = slice(first, first + owned)
        spec = kind.spec(owned, side.block_tokens)
        self.cache = Cache(kind.backend, spec, side.layout, NUM_BLOCKS, side.kernel_tokens)
        for view in self.cache.views.values():
            view.zero_()
        layers = {name: self.cache.layers[name] for name in self.layers}
        caches = {name: layer.cache for name, layer in layers.items()}
        self.described = RankCache(NUM_BLOCKS, 0, caches)
        self.shard = shard_of_worker(rank, side.tp, layers)

    def write(self, whole: dict[str, tuple[torch.Tensor, torch.Tensor]], tokens: range) -> None:
        """Write tokens of a sequence, of which all heads are given."""
        for name in self.layers:
            keys, values = (side[tokens.start : tokens.stop, self.heads] for side in whole[name])
            self.kind.backend.format.write(
                self.cache.views[name], self.side.slots(tokens), keys, values
            )

    def read(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, of all tokens that there are blocks for."""
        return self.kind.backend.format.read(self.cache.views[name], self.side.table, SIZE)


@st.composite
def sides(draw, kind: Kind, num_heads: int, num_tokens: int) -> Side:
    """An engine that can hold the sequence."""
    kernel_tokens = draw(st.sampled_from([16, 32, 48]))
    # Kernels' blocks are parts of what adjoins.
    ratio = draw(st.sampled_from([1, 2, 3]))
    layout = draw(st.sampled_from([each for each in kind.layouts if ratio == 1 or each[0] == "L"]))
    if layout == "LHBNC":
        ratio = 1
    tp = draw(st.sampled_from([tp for tp in (1, 2, 3, 6) if num_heads % tp == 0 or tp == 6]))
    cut = draw(st.sampled_from([0, 1, 2]))
    stages = tuple(stage for stage in (LAYERS[:cut], LAYERS[cut:]) if stage)
    block_tokens = kernel_tokens * ratio
    needed = -(-num_tokens // block_tokens)
    blocks = draw(st.permutations(range(NUM_BLOCKS)))[:needed]
    return Side(tp, stages, layout, block_tokens, kernel_tokens, tuple(blocks))


def ranks(kind: Kind, side: Side, num_heads: int) -> dict[MeshRank, Rank]:
    """All workers of an engine."""
    meshed = [MeshRank(pp, tp) for pp in range(len(side.stages)) for tp in range(side.tp)]
    return {rank: Rank(kind, side, rank, num_heads) for rank in meshed}


def move(from_: Iterable[int], to: Iterable[int], length: int) -> None:
    """Copy pieces of memory."""
    for source, target in zip(from_, to, strict=True):
        ctypes.memmove(target, source, length)


def transfer(leg: Leg, source: Rank, reader: Rank, start_token: int, limit_bytes: int) -> None:
    """Move what a leg moves of the sequence: direct, or in windows of an arena if there is a limit.

    Args:
        leg: The leg.
        source: Whose caches it reads.
        reader: Into whose it reads.
        start_token: What comes before it, the reader has.
        limit_bytes: Of a window; 0 where it goes direct.
    """
    selected = select(leg, [source.side.span(0)], [reader.side.span(start_token)])
    if not limit_bytes:
        at_source, here = leg.indices(selected)
        move(places(leg.src, at_source), places(leg.dst, here), int(leg.src.rows[0, 1]))
        return
    staged = stage_leg(leg, source.described)
    arena, length = torch.zeros(1 << 20, dtype=torch.uint8), staged.descriptor_bytes
    storage = reader.cache.views[LAYERS[0]].untyped_storage()
    copier = ArenaCopier(arena, [torch.empty(0, dtype=torch.uint8).set_(storage)])
    for window in staged.windows(selected, limit_bytes):
        span = Span(0, window.size_bytes)
        at_source, landing = staged.indices(window, span)
        targets = (arena.data_ptr() + landing.astype(np.int64) * length).tolist()
        move(places(staged.src, at_source), targets, length)
        copier.scatter(staged.scatter(window, span))


def places(end: LegEnd, indices: np.ndarray) -> list[int]:
    """Where descriptors begin."""
    return end.addresses(indices.astype(np.int64)).tolist()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.data_too_large])
@given(
    data=st.data(),
    kind=st.sampled_from(KINDS),
    num_tokens=st.integers(1, 150),
    limit_bytes=st.sampled_from([0, 1, 1 << 12, 1 << 20]),
)
def test_what_was_written_at_one_end_is_read_at_the_other(data, kind, num_tokens, limit_bytes):
    """All tokens from where a reader's own end, of all heads of its own, to the last bit."""
    num_heads = 1 if kind.is_latent else 6
    src = data.draw(sides(kind, num_heads, num_tokens))
    dst = data.draw(sides(kind, num_heads, num_tokens))
    if kind.is_whole or kind.is_packed:
        # All but stages, which blocks these are, and the ranks of what may be cut has to be equal.
        count = len(src.blocks)
        tp = dst.tp if kind.is_latent or kind.is_packed else src.tp
        blocks = tuple(data.draw(st.permutations(range(NUM_BLOCKS)))[:count])
        dst = Side(tp, dst.stages, src.layout, src.block_tokens, src.kernel_tokens, blocks)
    random = torch.Generator().manual_seed(num_tokens)
    whole = {
        name: tuple(torch.randn(num_tokens, num_heads, SIZE, generator=random) for _ in range(2))
        for name in LAYERS
    }
    sources, readers = ranks(kind, src, num_heads), ranks(kind, dst, num_heads)
    for source in sources.values():
        source.write(whole, range(num_tokens))
    own = data.draw(st.integers(0, (num_tokens - 1) // dst.block_tokens)) * dst.block_tokens
    for reader in readers.values():
        reader.write(whole, range(own))
    plan = plan_reshard(
        [source.shard for source in sources.values()], [reader.shard for reader in readers.values()]
    )
    for rank, reader in readers.items():
        before = reader.cache.views[reader.layers[0]].clone()
        for read in plan.reads_of(rank):
            for leg in lower_read(read, sources[read.src_rank].described, reader.described):
                transfer(leg, sources[read.src_rank], reader, own, limit_bytes)
        for name in reader.layers:
            right = Rank(kind, dst, rank, num_heads)
            right.write(whole, range(num_tokens))
            for found, expected in zip(reader.read(name), right.read(name), strict=True):
                assert torch.equal(found[:num_tokens], expected[:num_tokens])
        others = [block for block in range(NUM_BLOCKS) if block not in dst.blocks]
        view = reader.cache.views[reader.layers[0]].unflatten(0, (NUM_BLOCKS, -1))
        assert torch.equal(view[others], before.unflatten(0, (NUM_BLOCKS, -1))[others])

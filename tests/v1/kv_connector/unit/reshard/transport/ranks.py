# SPDX-License-Identifier: Apache-2.0
"""Ranks with KV caches whose every byte is known, for any transport."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.cache import (
    LayerCache,
    Plane,
    RankCache,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.overlap import BlockRun
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import Shard

NUM_BLOCKS = 8
NUM_LAYERS = 8
NUM_TOKENS = 48
SLOT_BYTES = 64


class Registers(Protocol):
    """What a rank asks of its agent."""

    def register(self, regions: list[tuple[int, int, int]]) -> None:
        """Make memory known."""


@dataclass(frozen=True)
class Format:
    """How a rank lays out its cache.

    Attributes:
        block_tokens: Tokens in a block.
        token_major: NHD instead of HND.
        planes: 2 for keys and values, 1 for MLA's latent.
        side_by_side: They are one plane.
        groups: KV-cache groups; with two, every other layer is of group 1.
        device: Where the memory is.
    """

    block_tokens: int = 8
    token_major: bool = False
    planes: int = 2
    side_by_side: bool = False
    groups: int = 1
    device: str = "cpu"


class Rank:
    """A rank, its KV cache and its agent.

    The cache is a tensor of shape (layers, planes, blocks, heads, tokens, slot bytes), or with
    heads and tokens exchanged. It begins full of bytes that no sequence has.

    Args:
        shard: What the rank holds.
        form: How.
        agent: The memory is registered with it.
    """

    def __init__(self, shard: Shard, form: Format, agent: Registers) -> None:
        self.shard, self.form, self.agent = shard, form, agent
        self.num_heads = len(next(iter(shard.holdings.values())).units)
        heads_and_tokens = (self.num_heads, form.block_tokens)
        shape = (
            len(shard.holdings),
            form.planes,
            NUM_BLOCKS,
            *(reversed(heads_and_tokens) if form.token_major else heads_and_tokens),
            SLOT_BYTES,
        )
        if form.side_by_side:
            # In memory a value stands behind its key.
            in_memory = (*shape[:1], *shape[2:5], *shape[1:2], *shape[5:])
            stored = torch.full(in_memory, 255, dtype=torch.uint8, device=form.device)
            self.tensor = stored.permute(0, 4, 1, 2, 3, 5)
        else:
            self.tensor = torch.full(shape, 255, dtype=torch.uint8, device=form.device)
        self.cache = self._describe()
        device_id = max(self.tensor.get_device(), 0)
        agent.register([(self.tensor.data_ptr(), self.tensor.nbytes, device_id)])

    def fill(self, sequence: np.ndarray, blocks: list[BlockRun]) -> None:
        """Write the whole model's KV of a sequence, as far as this rank holds it."""
        self.tensor.copy_(torch.from_numpy(self.expected(sequence, blocks)))
        if self.tensor.is_cuda:
            torch.cuda.synchronize()

    def bytes(self) -> np.ndarray:
        """All bytes of the cache, in its own order of axes."""
        return self.tensor.cpu().numpy()

    def expected(self, sequence: np.ndarray, blocks: list[BlockRun]) -> np.ndarray:
        """What the cache holds after it has received a sequence, and nothing else."""
        filled = np.full(self.tensor.shape, 255, np.uint8)
        by_head = filled.swapaxes(3, 4) if self.form.token_major else filled
        for (position, layer), plane, block, heads, tokens in self._cells(blocks):
            by_head[position, plane, block] = sequence[layer, plane, heads, tokens]
        return filled

    def _cells(self, blocks: list[BlockRun]) -> Iterator[tuple]:
        for position, (layer, holding) in enumerate(self.shard.holdings.items()):
            units = holding.units
            span = blocks[self.cache.layers[layer].group]
            for number, block in enumerate(span.block_ids):
                start = span.start_token + number * self.form.block_tokens
                tokens = slice(start, start + self.form.block_tokens)
                for plane in range(self.form.planes):
                    yield (position, layer), plane, block, slice(units.start, units.stop), tokens

    def _describe(self) -> RankCache:
        layer_stride, plane_stride, block_stride, outer, inner, _ = self.tensor.stride()
        head_stride, token_stride = (inner, outer) if self.form.token_major else (outer, inner)
        num_planes = 1 if self.form.side_by_side else self.form.planes
        return RankCache(
            NUM_BLOCKS,
            max(self.tensor.get_device(), 0),
            {
                layer: LayerCache(
                    tuple(
                        Plane(
                            self.tensor.data_ptr() + position * layer_stride + plane * plane_stride,
                            block_stride,
                            head_stride,
                            token_stride,
                            SLOT_BYTES * self.form.planes // num_planes,
                            self.num_heads,
                            self.form.block_tokens,
                        )
                        for plane in range(num_planes)
                    ),
                    group=int(layer) % self.form.groups,
                    keys_lead=self.form.planes == 2,
                )
                for position, layer in enumerate(self.shard.holdings)
            },
        )


def sequence_of(num_heads: int, planes: int) -> np.ndarray:
    """The KV of a sequence, where each slot names its layer, plane, head and token.

    Shape (layers, planes, heads, tokens, slot bytes). No byte is 255.
    """
    shape = (NUM_LAYERS, planes, num_heads, NUM_TOKENS)
    names = np.stack(np.indices(shape, dtype=np.uint8), axis=-1)
    return np.tile(names, SLOT_BYTES // len(shape))


def blocks_of(form: Format, *, seed: int) -> list[BlockRun]:
    """Blocks of the sequence in each group: shuffled; in group 1 those of a window at its end."""
    random = np.random.default_rng(seed)
    count = min(NUM_TOKENS // form.block_tokens, NUM_BLOCKS)
    spans = []
    for group in range(form.groups):
        block_ids = random.permutation(NUM_BLOCKS)[:count]
        skipped = count // 2 if group else 0
        spans.append(BlockRun(block_ids[skipped:], skipped * form.block_tokens))
    return spans

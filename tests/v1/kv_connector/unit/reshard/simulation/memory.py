# SPDX-License-Identifier: Apache-2.0
"""The memory of simulated workers, where every byte says what it is and belongs to somebody."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random

import numpy as np
import torch

from tests.v1.kv_connector.unit.reshard.simulation.device import (
    Device,
    DeviceArena,
    DeviceCopies,
    Kernel,
    check_gathered,
)
from tests.v1.kv_connector.unit.reshard.simulation.wire import NOBODY, Owner, OwnerAt, check
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.cache import (
    LayerCache,
    Plane,
    RankCache,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.staging import (
    ArenaAllocator,
    ArenaCopy,
    Span,
    StagingPolicy,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import (
    ParallelMesh,
    Shard,
    shard_model,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.arena import StagingArea

NUM_LAYERS, NUM_HEADS, MAX_TOKENS = 2, 2, 16
SLOT_BYTES = 4
"""One word, which names content, layer, head and token."""


@dataclass(frozen=True)
class Layout:
    """How an engine is split, and how large its blocks are."""

    pp_size: int
    tp_size: int
    block_tokens: int

    @property
    def shards(self) -> tuple[Shard, ...]:
        """What its workers hold."""
        return _shards(self.pp_size, self.tp_size)


@lru_cache
def _shards(pp_size: int, tp_size: int) -> tuple[Shard, ...]:
    return shard_model(ParallelMesh(pp_size=pp_size, tp_size=tp_size), NUM_LAYERS, NUM_HEADS)


def kv_of(content: int) -> np.ndarray:
    """The whole model's KV of a prompt; shape (layers, heads, tokens)."""
    return np.uint32(content << 12) | _PLACES


_PLACES = (
    np.arange(NUM_LAYERS, dtype=np.uint32)[:, None, None] << 10
    | np.arange(NUM_HEADS, dtype=np.uint32)[None, :, None] << 8
    | np.arange(MAX_TOKENS, dtype=np.uint32)[None, None, :]
)


class CacheMemory:
    """The KV cache of one worker.

    Args:
        shard: What it holds.
        block_tokens: Tokens of a block.
        num_blocks: Its blocks.
        token_major: NHD instead of HND.
    """

    def __init__(
        self, shard: Shard, block_tokens: int, num_blocks: int, *, token_major: bool
    ) -> None:
        layers = list(shard.holdings)
        heads = shard.holdings[layers[0]].units
        self._held = np.s_[layers[0] : layers[-1] + 1, heads.start : heads.stop]
        self._block_tokens = block_tokens
        inner = (len(heads), block_tokens)[:: -1 if token_major else 1]
        self._words = np.zeros((len(layers), num_blocks, *inner), dtype=np.uint32)
        self._by_head = self._words.swapaxes(2, 3) if token_major else self._words
        layer_bytes, self._block_bytes, head_bytes, token_bytes = self._by_head.strides
        self._layer_bytes = layer_bytes
        self.address, self.size_bytes = self._words.ctypes.data, self._words.nbytes
        self.cache = RankCache(
            num_blocks,
            0,
            {
                layer: LayerCache(
                    (
                        Plane(
                            self.address + position * layer_bytes,
                            self._block_bytes,
                            head_bytes,
                            token_bytes,
                            SLOT_BYTES,
                            len(heads),
                            block_tokens,
                        ),
                    ),
                    group=0,
                )
                for position, layer in enumerate(layers)
            },
        )

    @property
    def tensor(self) -> torch.Tensor:
        """All of it."""
        return torch.from_numpy(self._words.view(np.uint8))

    def block_at(self, address: int) -> int | None:
        """Which block a byte is of; None for bytes elsewhere."""
        offset = address - self.address
        if not 0 <= offset < self.size_bytes:
            return None
        return offset % self._layer_bytes // self._block_bytes

    def compute(self, content: int, block_ids: Sequence[int]) -> None:
        """Write the KV of a prompt from its first token on, as many as fit these blocks."""
        num_tokens = len(block_ids) * self._block_tokens
        kv = kv_of(content)[self._held][..., :num_tokens]
        by_block = kv.reshape(*kv.shape[:2], len(block_ids), self._block_tokens)
        self._by_head[:, block_ids] = by_block.transpose(0, 2, 1, 3)

    def spoil(self, block_ids: Sequence[int], word: int) -> None:
        """Write what is no prompt's."""
        self._words[:, block_ids] = word

    def holds(self, content: int, block_ids: Sequence[int], start: int, stop: int) -> bool:
        """Whether blocks that begin with a token hold a prompt's KV up to another."""
        found = self._by_head[:, block_ids].transpose(0, 2, 1, 3)
        found = found.reshape(*found.shape[:2], -1)[..., : stop - start]
        return bool((found == kv_of(content)[self._held][..., start:stop]).all())


class OwnedArena(ArenaAllocator):
    """An allocator that knows one owner of a span from the next of the same bytes."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(size_bytes)
        self._owners: dict[Span, Owner] = {}
        self._num_spans = 0

    def allocate(self, size_bytes: int, alignment_bytes: int = 1) -> Span | None:
        """Take a span."""
        span = super().allocate(size_bytes, alignment_bytes)
        if span is not None:
            self._num_spans += 1
            self._owners[span] = Owner(f"span {self._num_spans}", reads=True)
        return span

    def free(self, span: Span) -> None:
        """Give it back."""
        super().free(span)
        del self._owners[span]

    def owner_at(self, offset: int) -> Owner:
        """Whose a byte is."""
        for span, owner in self._owners.items():
            if span.start_bytes <= offset < span.stop_bytes:
                return owner
        return NOBODY


class HostCopies:
    """Makes copies in host memory, or fails at them half way.

    Args:
        random: Decides which of them fail.
        arena: The arena.
        owner_at: Whose a byte is.
    """

    pending: Sequence[Kernel] = ()
    """Each is made when it is submitted."""

    def __init__(self, random: Random, arena: np.ndarray, owner_at: OwnerAt) -> None:
        self._random, self._arena, self._owner_at = random, arena, owner_at
        self.failure_rate = 0.0

    def scatter(self, copy: ArenaCopy) -> None:
        """Make a copy out of the arena."""
        for in_arena, in_cache in self._slots(copy, _check_scattered):
            ctypes.memmove(in_cache, in_arena, copy.slot_bytes)

    def gather(self, copy: ArenaCopy) -> None:
        """Make a copy into the arena."""
        for in_arena, in_cache in self._slots(copy, check_gathered):
            ctypes.memmove(in_arena, in_cache, copy.slot_bytes)

    def may_write(self, owner: Owner) -> bool:
        """Whether a copy may still write into what is somebody's."""
        return False

    def close(self) -> None:
        """There is nothing to wait for."""

    def _slots(
        self, copy: ArenaCopy, check_owner: Callable[[Owner | None], None]
    ) -> Iterator[tuple[int, int]]:
        """The addresses of each slot, in the arena and in the cache."""
        fails = self._random.random() < self.failure_rate
        base = self._arena.ctypes.data
        chunks = list(zip(copy.arena_offsets.tolist(), copy.addresses.tolist(), strict=True))
        for offset, address in chunks[: len(chunks) // 2] if fails else chunks:
            check_owner(self._owner_at(address))
            for head in range(copy.num_heads):
                for token in range(copy.num_slots):
                    yield (
                        base + _strided(offset, copy.arena_strides_bytes, head, token),
                        _strided(address, copy.cache_strides_bytes, head, token),
                    )
        if fails:
            raise RuntimeError("the simulated copy has failed")


def _check_scattered(owner: Owner | None) -> None:
    waits = owner is not None and owner.reads
    check(waits, f"a copy is made into memory of {owner}, which waits for none")


def _strided(start: int, strides_bytes: tuple[int, int], head: int, token: int) -> int:
    return start + head * strides_bytes[0] + token * strides_bytes[1]


class WorkerMemory:
    """The cache of a worker, and its arena.

    Attributes:
        arena: The arena, for reads or to pack in; None without one.
        area: The arena as reads use it; None where windows are packed in it.
        copies: What makes copies out of the arena, or into it; None without one.

    Args:
        cache: The cache.
        arena_bytes: Size of the arena; 0 for none.
        policy: Decides which reads go through it; None for all.
        packs: Whether windows are packed in it for others.
        random: Decides which copies fail.
        owner_of_block: Whose a block is.
        device: Where all of it is; None for the host.
    """

    def __init__(
        self,
        cache: CacheMemory,
        arena_bytes: int,
        policy: StagingPolicy | None,
        random: Random,
        owner_of_block: Callable[[int], Owner],
        device: Device | None = None,
        *,
        packs: bool,
    ) -> None:
        self.cache = cache
        self._owner_of_block = owner_of_block
        self.arena: torch.Tensor | None = None
        self.area: StagingArea | None = None
        self.copies: HostCopies | DeviceCopies | None = None
        if not arena_bytes:
            return
        # The allocation of the words outlives the tensor, which only refers to it.
        self._arena = np.zeros(arena_bytes, dtype=np.uint8)
        self.arena = torch.from_numpy(self._arena)
        if device is None:
            self.copies = HostCopies(random, self._arena, self.owner_at)
        else:
            arena = DeviceArena(self.arena, device, self.owner_at)
            self.copies = DeviceCopies(arena, [cache.tensor])
        if not packs:
            self.area = StagingArea(self.arena, self.copies, policy)
            self.spans = OwnedArena(arena_bytes)
            self.area.spans = self.spans

    def owner_at(self, address: int) -> Owner | None:
        """Whose a byte is; None for what the connector keeps for itself."""
        block = self.cache.block_at(address)
        if block is not None:
            return self._owner_of_block(block)
        if self.area is not None:
            offset = address - self._arena.ctypes.data
            if 0 <= offset < len(self._arena):
                return self.spans.owner_at(offset)
        return None

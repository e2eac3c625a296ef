# SPDX-License-Identifier: Apache-2.0
"""Workers' whole KV caches on one device, where each word says what it is."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.cache import (
    LayerCache,
    Plane,
    RankCache,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import (
    ParallelMesh,
    Shard,
    shard_model,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import NixlAgent

WORD_BYTES = 4
_UNWRITTEN = -1
DEADLINE_S = 120.0


@dataclass(frozen=True)
class Model:
    """What is kept of a prompt.

    Attributes:
        head_bytes: Of a key, or a value, of one head of one token.
        num_tokens: Of the prompt.
    """

    num_layers: int
    num_heads: int
    head_bytes: int
    num_tokens: int

    @property
    def kv_bytes(self) -> int:
        """Of all layers and heads."""
        return self.num_layers * self.num_heads * self.num_tokens * 2 * self.head_bytes

    def __str__(self) -> str:
        return (
            f"{self.num_layers} layers of {self.num_heads} KV heads of {self.head_bytes} bytes, "
            f"{self.num_tokens} tokens, {self.kv_bytes / 2**20:.0f} MiB"
        )


@dataclass(frozen=True)
class Layout:
    """How an engine splits and lays out its caches.

    Attributes:
        token_major: NHD instead of HND.
    """

    pp_size: int = 1
    tp_size: int = 1
    block_tokens: int = 16
    token_major: bool = False

    def __str__(self) -> str:
        split = f"tp{self.tp_size}pp{self.pp_size}"
        return f"{split} {'NHD' if self.token_major else 'HND'} {self.block_tokens}"

    def shards(self, model: Model) -> tuple[Shard, ...]:
        """What its workers hold of a model."""
        mesh = ParallelMesh(pp_size=self.pp_size, tp_size=self.tp_size)
        return shard_model(mesh, model.num_layers, model.num_heads)

    def block_ids(self, model: Model) -> list[int]:
        """A prompt's blocks: every other one of the pool, in disorder; 0 is nobody's."""
        count = -(-model.num_tokens // self.block_tokens)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(self.block_tokens))
        ids: list[int] = (1 + 2 * order).tolist()
        return ids


class Rank:
    """A worker's cache: shape (layers, blocks, heads, tokens, words), a value behind its key.

    Args:
        model: What is kept.
        layout: How.
        shard: What of it.
        device: Where.
    """

    def __init__(self, model: Model, layout: Layout, shard: Shard, device: str) -> None:
        self.model, self.layout, self.shard = model, layout, shard
        self.block_ids = layout.block_ids(model)
        self._heads = next(iter(shard.holdings.values())).units
        inner = len(self._heads), layout.block_tokens
        if layout.token_major:
            inner = inner[1], inner[0]
        num_blocks = 2 * len(self.block_ids) + 1
        words = 2 * model.head_bytes // WORD_BYTES
        shape = len(shard.holdings), num_blocks, *inner, words
        self._words = torch.full(shape, _UNWRITTEN, dtype=torch.int32, device=device)
        self._by_head = self._words.transpose(2, 3) if layout.token_major else self._words
        self.device_id = max(self._words.get_device(), 0)
        self.cache = self._describe(num_blocks)

    @property
    def tensor(self) -> torch.Tensor:
        """All of it."""
        return self._words

    @property
    def region(self) -> tuple[int, int, int]:
        """What an agent registers: address, size in bytes, device id."""
        return self._words.data_ptr(), self._words.nbytes, self.device_id

    def fill(self) -> None:
        """Write the prompt's KV."""
        block_tokens = self.layout.block_tokens
        for position, layer in enumerate(self.shard.holdings):
            kv = self._kv_of(int(layer))
            for number, block in enumerate(self.block_ids):
                tokens = kv[:, number * block_tokens : (number + 1) * block_tokens]
                self._by_head[position, block, :, : tokens.shape[1]] = tokens
        synchronize(self._words)

    def clear(self) -> None:
        """Have nothing."""
        self._words.fill_(_UNWRITTEN)
        synchronize(self._words)

    def difference(self) -> str:
        """Return where it is not as if `fill` had written it; an empty string where it is."""
        expected = Rank(self.model, self.layout, self.shard, str(self._words.device))
        expected.fill()
        if torch.equal(self._words, expected.tensor):
            return ""
        wrong = (self._words != expected.tensor).nonzero()
        return f"{len(wrong)} words are wrong, the first at {wrong[0].tolist()}"

    def _kv_of(self, layer: int) -> torch.Tensor:
        """The KV of a layer, a number for each word; shape (heads, tokens, words)."""
        model, device = self.model, self._words.device
        words = 2 * model.head_bytes // WORD_BYTES
        heads = torch.arange(self._heads.start, self._heads.stop, device=device)
        tokens = torch.arange(model.num_tokens, device=device)
        slots = (layer * model.num_heads + heads[:, None]) * model.num_tokens + tokens[None]
        numbers = slots[..., None] * words + torch.arange(words, device=device)
        # Below the largest prime of 31 bits, so that it is never what is unwritten.
        return (numbers % (2**31 - 1)).to(torch.int32)

    def _describe(self, num_blocks: int) -> RankCache:
        layer_bytes, block_bytes, head_bytes, slot_bytes, _ = (
            WORD_BYTES * stride for stride in self._by_head.stride()
        )
        return RankCache(
            num_blocks,
            self.device_id,
            {
                layer: LayerCache(
                    (
                        Plane(
                            self._words.data_ptr() + position * layer_bytes,
                            block_bytes,
                            head_bytes,
                            slot_bytes,
                            2 * self.model.head_bytes,
                            len(self._heads),
                            self.layout.block_tokens,
                        ),
                    ),
                    group=0,
                    keys_lead=True,
                )
                for position, layer in enumerate(self.shard.holdings)
            },
        )


def make_agent(device: str, *, polled: bool) -> NixlAgent:
    """Return an agent for a device's memory, as workers make it.

    Args:
        polled: It reads, and is not read from.
    """
    on_host = device == "cpu"
    return NixlAgent(
        f"lane-{uuid.uuid4()}",
        memory="DRAM" if on_host else "VRAM",
        polled=polled,
        progress_delay_us=100 if on_host else 0,
    )


def synchronize(tensor: torch.Tensor) -> None:
    """Wait until a tensor's device has computed."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Look until something has happened.

    Raises:
        TimeoutError: It has not.
    """
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{what} did not happen within {DEADLINE_S:.0f} s")


def tokens_of(model: Model) -> Sequence[int]:
    """The prompt's tokens."""
    return range(model.num_tokens)

# SPDX-License-Identifier: Apache-2.0
"""What `kv-plan` knows of an engine: what its workers would say, and which blocks it would hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from ..memory.cache import RankCache
from ..plan.shards import MeshRank, Shard
from ..protocol.ids import BlockIds
from .layouts import EngineLayout


class NoAnswerError(Exception):
    """VLLM does not make such engines.

    Args:
        why: The reason, in one line.
        is_final: True if it would not start them; False if it cannot tell without their device.
    """

    def __init__(self, why: str, *, is_final: bool) -> None:
        super().__init__(why)
        self.is_final = is_final


@dataclass(frozen=True, slots=True)
class Group:
    """A KV-cache group.

    Attributes:
        block_tokens: Tokens of a sequence that one block id stands for.
        window_tokens: Number of last tokens that it keeps; 0 for all.
        chunk_tokens: Number of tokens of which it keeps the last, partly filled chunk; 0 for all.
        has_state: True if it keeps one state per sequence.
    """

    block_tokens: int
    window_tokens: int = 0
    chunk_tokens: int = 0
    has_state: bool = False

    def block_ids(self, num_tokens: int) -> range:
        """Return the blocks that are held for a prompt, in vLLM's way; block 0 is none.

        Args:
            num_tokens: Tokens of the prompt.
        """
        if self.has_state:
            return range(1, 2)
        skipped = num_tokens - self.window_tokens + 1 if self.window_tokens else 0
        if self.chunk_tokens:
            skipped = num_tokens // self.chunk_tokens * self.chunk_tokens
        num_blocks = -(-num_tokens // self.block_tokens)
        return range(min(max(skipped, 0) // self.block_tokens, num_blocks) + 1, num_blocks + 1)


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine.

    Attributes:
        layout: Its layout.
        shards: What each worker holds.
        caches: Where that is, in memory that nobody has.
        groups: Its KV-cache groups.
        backends: Names of its attention backends; empty if it was not asked.
        left: Why it is left to stock vLLM's connector; None if it is not.
        fault: Why the connector would not start; None if it would.
    """

    layout: EngineLayout
    shards: tuple[Shard, ...] = ()
    caches: Sequence[RankCache] = ()
    groups: tuple[Group, ...] = ()
    backends: tuple[str, ...] = ()
    left: str | None = None
    fault: str | None = None

    def block_ids(self, num_tokens: int) -> BlockIds:
        """Return the blocks of each group that are held for a prompt."""
        return [[*group.block_ids(num_tokens)] for group in self.groups]

    def caches_for(self, num_tokens: int) -> dict[MeshRank, RankCache]:
        """Return the cache of each rank, with at least as many blocks as a prompt needs."""
        most = max(2, *(max(ids, default=0) + 1 for ids in self.block_ids(num_tokens)))
        return {
            shard.rank: dataclasses.replace(cache, num_block_ids=most)
            for shard, cache in zip(self.shards, self.caches, strict=True)
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """Both engines, and who says so.

    Attributes:
        model: The model in words.
        source: Where the sizes of its caches are from.
        device: "cpu" or "gpu"; None if nobody was asked.
        has_state: True if the model keeps recurrent state.
        engines: The engine that is read from, and the one that reads.
    """

    model: str
    source: str
    device: str | None
    has_state: bool
    engines: tuple[Engine, Engine]

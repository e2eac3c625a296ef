# SPDX-License-Identifier: Apache-2.0
"""What a request's blocks at two ends have in common.

It depends on the sizes of blocks and on the request, and on nothing else of a read: however many
ranks a request is read from, and whether directly or by way of an arena, it is computed once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """The blocks that hold a stretch of a sequence at one end, in one KV-cache group.

    Attributes:
        block_ids: Shape (blocks,), int32, in the order of the sequence.
        start_token: Position in the sequence of the first token of the first block.
    """

    block_ids: npt.NDArray[np.int32]
    start_token: int


@dataclass(frozen=True, slots=True, eq=False)
class Overlap:
    """The tokens that a request has at both ends, in one pair of KV-cache groups.

    They are cut into *chunks*: the tokens that share a block with each other at both ends.

    Attributes:
        src: The request's blocks at the source.
        dst: The same at the destination.
        chunk_starts: Where in the sequence the chunks begin, at least one; shape (chunks,), int64.
            They are in the order of the source's memory, so that adjoining blocks are adjoining
            chunks.
        src_block_ids: The source's block of each chunk, ascending; shape (chunks,), int64.
        src_blocks: The same blocks, each once; shape (blocks,), int64.
        first_chunks: Which chunk is the first of each of them; shape (blocks,), int64.
    """

    src: BlockSpan
    dst: BlockSpan
    chunk_starts: npt.NDArray[np.int64]
    src_block_ids: npt.NDArray[np.int64]
    src_blocks: npt.NDArray[np.int64]
    first_chunks: npt.NDArray[np.int64]
    _counts: dict[Hashable, int] = field(default_factory=dict, repr=False)

    def count(self, key: Hashable, count: Callable[[], int]) -> int:
        """A number that depends on the overlap and on a key, computed once for equal keys."""
        if key not in self._counts:
            self._counts[key] = count()
        return self._counts[key]

    @property
    def num_src_runs(self) -> int:
        """Runs of blocks that adjoin at the source."""
        return self.count(
            "source's runs", lambda: 1 + int(np.count_nonzero(np.diff(self.src_blocks) != 1))
        )

    def part(self, first: int, stop: int) -> Overlap:
        """What some of the source's blocks hold of it.

        Args:
            first: Position of the first one in `src_blocks`.
            stop: Position behind the last one; beyond the end for all that are left.
        """
        edges = self.first_chunks[first : stop + 1]
        end = int(edges[-1]) if stop < len(self.src_blocks) else len(self.chunk_starts)
        chunks = slice(int(edges[0]), end)
        return replace(
            self,
            chunk_starts=self.chunk_starts[chunks],
            src_block_ids=self.src_block_ids[chunks],
            src_blocks=self.src_blocks[first:stop],
            first_chunks=self.first_chunks[first:stop] - edges[0],
            _counts={},
        )


def overlap(
    src: BlockSpan, dst: BlockSpan, src_block_tokens: int, dst_block_tokens: int
) -> Overlap | None:
    """What two ends have in common; None where that is nothing.

    Args:
        src: The request's blocks at the source.
        dst: The same at the destination.
        src_block_tokens: Tokens in a block at the source.
        dst_block_tokens: The same at the destination.
    """
    start = max(src.start_token, dst.start_token)
    stop = min(
        src.start_token + len(src.block_ids) * src_block_tokens,
        dst.start_token + len(dst.block_ids) * dst_block_tokens,
    )
    if start >= stop:
        return None
    chunk_tokens = math.gcd(src_block_tokens, dst_block_tokens)
    chunk_starts = np.arange(start, stop, chunk_tokens, dtype=np.int64)
    ids = src.block_ids[(chunk_starts - src.start_token) // src_block_tokens].astype(np.int64)
    steps = np.diff(ids, prepend=-1)
    if (steps < 0).any():
        order = np.argsort(ids, kind="stable")
        chunk_starts, ids = chunk_starts[order], ids[order]
        steps = np.diff(ids, prepend=-1)
    first_chunks = np.flatnonzero(steps)
    return Overlap(src, dst, chunk_starts, ids, ids[first_chunks], first_chunks)

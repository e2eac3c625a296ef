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
        block_ids: Shape (blocks,), int64, in the order of the sequence.
        start_token: Position in the sequence of the first token of the first block.
    """

    block_ids: npt.NDArray[np.int64]
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
        dst_block_ids: The destination's block of each chunk; shape (chunks,), int64.
        src_blocks: The same blocks, each once; shape (blocks,), int64.
        first_chunks: Which chunk is the first of each of them; shape (blocks,), int64.
    """

    src: BlockSpan
    dst: BlockSpan
    chunk_starts: npt.NDArray[np.int64]
    src_block_ids: npt.NDArray[np.int64]
    dst_block_ids: npt.NDArray[np.int64]
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
            "source's runs", lambda: 1 + int(np.count_nonzero(_steps(self.src_blocks) != 1))
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
            dst_block_ids=self.dst_block_ids[chunks],
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
    src_ids = _blocks_of(src, src_block_tokens, chunk_starts, chunk_tokens)
    dst_ids = _blocks_of(dst, dst_block_tokens, chunk_starts, chunk_tokens)
    least_step = int(_steps(src_ids).min(initial=1))
    if least_step < 0:
        order = np.argsort(src_ids, kind="stable")
        chunk_starts, src_ids, dst_ids = chunk_starts[order], src_ids[order], dst_ids[order]
        least_step = int(_steps(src_ids).min())
    if least_step > 0:
        # Each chunk has a block of its own.
        first_chunks = np.arange(len(src_ids))
        return Overlap(src, dst, chunk_starts, src_ids, dst_ids, src_ids, first_chunks)
    first_chunks = np.flatnonzero(np.concatenate(([1], _steps(src_ids))))
    src_blocks = src_ids[first_chunks]
    return Overlap(src, dst, chunk_starts, src_ids, dst_ids, src_blocks, first_chunks)


def _blocks_of(
    span: BlockSpan, block_tokens: int, chunk_starts: npt.NDArray[np.int64], chunk_tokens: int
) -> npt.NDArray[np.int64]:
    """The block of each chunk, which are in the order of the sequence."""
    if block_tokens == chunk_tokens:
        first = (int(chunk_starts[0]) - span.start_token) // block_tokens
        return span.block_ids[first : first + len(chunk_starts)]
    found: npt.NDArray[np.int64] = span.block_ids[(chunk_starts - span.start_token) // block_tokens]
    return found


def _steps(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """From each to the next; shape (ids - 1,)."""
    steps: npt.NDArray[np.int64] = ids[1:] - ids[:-1]
    return steps

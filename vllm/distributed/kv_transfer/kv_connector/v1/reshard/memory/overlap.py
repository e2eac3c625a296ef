# SPDX-License-Identifier: Apache-2.0
"""Overlaps: the tokens that a request's blocks have at both ends.

An overlap depends only on the block sizes, on the request and on the tokens that each end holds. So
it is computed once, however many ranks the request is read from, and both for direct and for staged
reads.

A rank that holds a share of a sequence has its own tokens in its blocks one after another. A
token's *position* counts these, which differs from its place in the sequence:

    token of the sequence        0   1   2   3   4   5   6   7   8   9   10  11
    position, share 1 of 3 by 2          0   1                   2   3
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..plan.shards import ALL_TOKENS, TokenShare


@dataclass(frozen=True, slots=True)
class BlockRun:
    """The blocks that hold a stretch of a sequence at one end, in one KV-cache group.

    Attributes:
        block_ids: Ids of the blocks, in the order of the sequence; shape (blocks,), int64.
        start_token: Position within the share of the first block's first token.
        tokens: Share of the sequence's tokens that the blocks hold, in whole runs for each block.
    """

    block_ids: npt.NDArray[np.int64]
    start_token: int
    tokens: TokenShare = ALL_TOKENS

    def places(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the positions of tokens of the share, counted from the first block's first token.

        Args:
            tokens: Places of the tokens in the sequence; shape (tokens,).
        """
        if not self.tokens.is_all:
            run_tokens = self.tokens.run_tokens
            tokens = tokens // self.tokens.period_tokens * run_tokens + tokens % run_tokens
        places: npt.NDArray[np.int64] = tokens - self.start_token
        return places

    def stretch(self, block_tokens: int) -> tuple[int, int]:
        """Return where in the sequence the blocks start and stop, given their size in tokens."""
        start, stop = self.start_token, self.start_token + len(self.block_ids) * block_tokens
        return start * self.tokens.num_shares, stop * self.tokens.num_shares


@dataclass(frozen=True, eq=False)
class Overlap:
    """The tokens that a request has at both ends, in one pair of KV-cache groups.

    They are cut into *chunks*: consecutive tokens of the sequence that lie in one block at each
    end.

    Attributes:
        src: The request's blocks at the source.
        dst: The same at the destination.
        chunk_starts: Places in the sequence where the chunks begin, at least one; shape (chunks,),
            int64. They are in the order of the source's memory, so that adjoining blocks are
            adjoining chunks. If both ends have the same share, they are positions within it.
        src_block_ids: The source's block of each chunk, ascending; shape (chunks,), int64.
        dst_block_ids: The destination's block of each chunk; shape (chunks,), int64.
        src_blocks: The source's blocks without repetition; shape (blocks,), int64.
        first_chunks: Index of the first chunk of each block in `src_blocks`; shape (blocks,),
            int64.
        merged: Numbers of merged descriptors that legs have counted, by `Leg.shape`.
    """

    src: BlockRun
    dst: BlockRun
    chunk_starts: npt.NDArray[np.int64]
    src_block_ids: npt.NDArray[np.int64]
    dst_block_ids: npt.NDArray[np.int64]
    src_blocks: npt.NDArray[np.int64]
    first_chunks: npt.NDArray[np.int64]
    merged: dict[Hashable, int] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def num_src_runs(self) -> int:
        """Number of runs of blocks that adjoin at the source."""
        return 1 + int(np.count_nonzero(_steps(self.src_blocks) != 1))

    def part(self, first: int, stop: int) -> Overlap:
        """Return the part of the overlap that lies in some of the source's blocks.

        Args:
            first: Index of the first block in `src_blocks`.
            stop: Index after the last block; past the end for all remaining blocks.
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
        )


def overlap(
    src: BlockRun, dst: BlockRun, src_block_tokens: int, dst_block_tokens: int
) -> Overlap | None:
    """Return the overlap of two ends; None if they have no token in common.

    Args:
        src: The request's blocks at the source.
        dst: The same at the destination.
        src_block_tokens: Number of tokens in a block at the source.
        dst_block_tokens: Number of tokens in a block at the destination.
    """
    chunk_tokens = tokens_of_chunk(src.tokens, dst.tokens, src_block_tokens, dst_block_tokens)
    if src.tokens == dst.tokens and not src.tokens.is_all:
        src, dst = (replace(span, tokens=ALL_TOKENS) for span in (src, dst))
    src_stretch, dst_stretch = src.stretch(src_block_tokens), dst.stretch(dst_block_tokens)
    start, stop = max(src_stretch[0], dst_stretch[0]), min(src_stretch[1], dst_stretch[1])
    if start >= stop:
        return None
    chunk_starts = np.arange(start, stop, chunk_tokens, dtype=np.int64)
    for share in (src.tokens, dst.tokens):
        if not share.is_all:
            turns = chunk_starts // share.run_tokens % share.num_shares
            chunk_starts = chunk_starts[turns == share.index]
    if not len(chunk_starts):
        return None
    adjoin = src.tokens.is_all and dst.tokens.is_all
    src_ids = _blocks_of(src, src_block_tokens, chunk_starts, chunk_tokens, adjoin=adjoin)
    dst_ids = _blocks_of(dst, dst_block_tokens, chunk_starts, chunk_tokens, adjoin=adjoin)
    least_step = int(_steps(src_ids).min(initial=1))
    if least_step < 0:
        order = np.argsort(src_ids, kind="stable")
        chunk_starts, src_ids, dst_ids = chunk_starts[order], src_ids[order], dst_ids[order]
        least_step = int(_steps(src_ids).min())
    if least_step > 0:
        # No two chunks share a source block.
        first_chunks = np.arange(len(src_ids))
        return Overlap(src, dst, chunk_starts, src_ids, dst_ids, src_ids, first_chunks)
    first_chunks = np.flatnonzero(np.concatenate(([1], _steps(src_ids))))
    src_blocks = src_ids[first_chunks]
    return Overlap(src, dst, chunk_starts, src_ids, dst_ids, src_blocks, first_chunks)


def tokens_of_chunk(
    src: TokenShare, dst: TokenShare, src_block_tokens: int, dst_block_tokens: int
) -> int:
    """Return the tokens of a chunk, given the two ends' shares and block sizes."""
    if src == dst:
        return math.gcd(src_block_tokens, dst_block_tokens)
    return math.gcd(
        src_block_tokens if src.is_all else src.run_tokens,
        dst_block_tokens if dst.is_all else dst.run_tokens,
    )


def _blocks_of(
    span: BlockRun,
    block_tokens: int,
    chunk_starts: npt.NDArray[np.int64],
    chunk_tokens: int,
    *,
    adjoin: bool,
) -> npt.NDArray[np.int64]:
    """Return the block of each chunk; `adjoin`: the chunks adjoin in the sequence."""
    if block_tokens == chunk_tokens and adjoin:
        first = (int(chunk_starts[0]) - span.start_token) // block_tokens
        return span.block_ids[first : first + len(chunk_starts)]
    found: npt.NDArray[np.int64] = span.block_ids[span.places(chunk_starts) // block_tokens]
    return found


def _steps(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the differences between neighbours; shape (ids - 1,)."""
    steps: npt.NDArray[np.int64] = ids[1:] - ids[:-1]
    return steps

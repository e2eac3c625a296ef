# SPDX-License-Identifier: Apache-2.0
"""Legs: reads lowered to descriptors, and the way from block ids to descriptor indices.

A read becomes a *leg*: two lists of descriptors, one at each end, where equal indices belong
together. A list has strided rows; each row stands for one piece of a block, in all blocks:

    index = row * num_blocks + block id

Blocks of the two ends are matched by the positions of their tokens in the sequence, not one by one.
If ranks share tokens out, a run of a share counts instead of a block at that end, unless the other
end has the same share: a row stands for tokens that adjoin in the sequence at both ends.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..plan.reshard import Read
from ..plan.shards import Layer
from .cache import Plane
from .overlap import BlockRun, Overlap, tokens_of_chunk

Rows: TypeAlias = npt.NDArray[np.uint64]
"""Strided descriptors, shape (rows, 5): address, length, device id, stride, count; in bytes."""

Indices: TypeAlias = npt.NDArray[np.int32]
"""Descriptor indices of one end, shape (descriptors,)."""

MAX_DESCRIPTORS = int(np.iinfo(np.int32).max)
"""Most descriptors of one list: NIXL's indices are signed 32-bit numbers."""


def side_by_side(address: int, size_bytes: int, device_id: int, count: int) -> Rows:
    """Return one row of `count` descriptors of one size, each starting where the last ends."""
    return np.array([(address, size_bytes, device_id, size_bytes, count)], dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class Run:
    """The heads and tokens that one descriptor moves."""

    num_heads: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class LegEnd:
    """One end of a leg.

    Attributes:
        rows: Strided descriptors, grouped by plane, then by head run, and ordered by token.
        num_blocks: Number of blocks that each row stands for.
        block_tokens: Number of tokens in a block.
        runs_per_block: Number of token runs in a block, which are the rows of one head run.
        blocks_per_id: Number of blocks that one block id of the scheduler stands for.
    """

    rows: Rows
    num_blocks: int
    block_tokens: int
    runs_per_block: int
    blocks_per_id: int

    @property
    def tokens_per_id(self) -> int:
        """Tokens that one rank holds of a block of the scheduler."""
        return self.block_tokens * self.blocks_per_id

    @property
    def num_descriptors(self) -> int:
        """Number of descriptors that the rows stand for."""
        return len(self.rows) * self.num_blocks

    @property
    def may_adjoin(self) -> bool:
        """True if runs of one block or of two blocks may adjoin."""
        return self.runs_per_block > 1 or bool(self.rows[0, 3] == self.rows[0, 1])

    @property
    def shape(self) -> Hashable:
        """Layout of one head run in the blocks, independent of their address."""
        rows = self.rows[: self.runs_per_block].copy()
        rows[:, 0] -= rows[0, 0]
        return self.block_tokens, rows.tobytes()

    def addresses(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the addresses of descriptors by their indices; same shape."""
        row, block = np.divmod(indices, self.num_blocks)
        address, stride = self.rows[row, 0].astype(np.int64), self.rows[row, 3].astype(np.int64)
        found: npt.NDArray[np.int64] = address + block * stride
        return found


@dataclass(frozen=True, slots=True)
class PlanePair:
    """One plane of a layer at both ends.

    Attributes:
        layer: The layer.
        src: The plane at the source.
        dst: The plane at the destination.
        groups: The layer's KV-cache groups at the source and at the destination.
        blocks_per_id: Number of the layer's blocks that one block id stands for, at each end.
    """

    layer: Layer
    src: Plane
    dst: Plane
    groups: tuple[int, int]
    blocks_per_id: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Selection:
    """The planes and chunks that a request moves for one pair of KV-cache groups.

    Attributes:
        overlap: Overlap of the request's blocks in the two groups.
        planes: Positions of the planes in the leg; shape (planes,), int64.
    """

    overlap: Overlap
    planes: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Leg:
    """A read, or some of its layers, lowered to descriptors.

    Attributes:
        read: The read.
        pairs: Its planes, all of the same shape.
        run: Heads and tokens that one descriptor moves.
        src: The source's end.
        dst: The destination's end.
        planes_by_groups: For each pair of a source and a destination KV-cache group, the positions
            of the planes of its layers; shape (planes,), int64.
        shape: Key of `Overlap.merged`; equal for legs with the same layout of head runs.
    """

    read: Read
    pairs: tuple[PlanePair, ...]
    run: Run
    src: LegEnd
    dst: LegEnd
    planes_by_groups: tuple[tuple[tuple[int, int], npt.NDArray[np.int64]], ...]
    shape: Hashable

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk, which adjoin in the sequence and in a block of both ends."""
        return tokens_of_chunk(
            self.read.src_tokens,
            self.read.dst_tokens,
            self.src.block_tokens,
            self.dst.block_tokens,
        )

    @property
    def per_sequence(self) -> bool:
        """True if a block holds the state of a whole sequence."""
        return self.pairs[0].dst.per_sequence

    @property
    def num_heads(self) -> int:
        """Number of heads to read of each plane."""
        return self.read.num_units * self.pairs[0].dst.heads_per_unit

    @property
    def src_head_offset(self) -> int:
        """Position of the first head to read within the source's planes."""
        return self.read.src_unit_offset * self.pairs[0].dst.heads_per_unit

    @property
    def dst_head_offset(self) -> int:
        """Position of the first head to read within the destination's planes."""
        return self.read.dst_unit_offset * self.pairs[0].dst.heads_per_unit

    def indices(self, selections: Sequence[Selection]) -> tuple[Indices, Indices]:
        """Return the descriptor indices of selections.

        Returns:
            Indices at the source and at the destination, of equal length.
        """
        head_runs_per_plane = self._head_runs_per_plane
        src_parts: list[npt.NDArray[np.int64]] = []
        dst_parts: list[npt.NDArray[np.int64]] = []
        for each in selections:
            head_runs = _expand(each.planes * head_runs_per_plane, head_runs_per_plane)
            src, dst = self._descriptors(each, head_runs)
            src_parts.append(src)
            dst_parts.append(dst)
        return _as_indices(src_parts), _as_indices(dst_parts)

    def num_descriptors(self, selections: Sequence[Selection]) -> int:
        """Count the descriptors of selections, before merging."""
        return self._runs_per_chunk * self._head_runs_per_plane * count_chunks(selections)

    def num_merged(self, selections: Sequence[Selection]) -> int:
        """Count the descriptors that are left after merging those that adjoin at both ends.

        NIXL merges consecutive ones. Only the first head run is counted here: the others have the
        same layout.
        """
        if not (self.src.may_adjoin and self.dst.may_adjoin):
            return self.num_descriptors(selections)
        return self._head_runs_per_plane * sum(
            self._num_merged(each) * len(each.planes) for each in selections
        )

    @property
    def _runs_per_chunk(self) -> int:
        """Number of token runs in a chunk."""
        return self.chunk_tokens // self.run.num_tokens

    @property
    def _head_runs_per_plane(self) -> int:
        """Number of head runs to read of each plane."""
        return self.num_heads // self.run.num_heads

    def _num_merged(self, selection: Selection) -> int:
        """Count the merged descriptors of the first head run, once for legs of one shape."""
        counts = selection.overlap.merged
        if self.shape not in counts:
            ends = self._descriptors(selection, np.zeros(1, dtype=np.int64))
            addresses = self.src.addresses(ends[0]), self.dst.addresses(ends[1])
            counts[self.shape] = count_merged(addresses, int(self.src.rows[0, 1]))
        return counts[self.shape]

    def _descriptors(
        self, selection: Selection, head_runs: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the descriptors of some head runs at both ends, ordered by head run."""
        common = selection.overlap
        return (
            self._descriptors_at(self.src, common.src, common.src_block_ids, common, head_runs),
            self._descriptors_at(self.dst, common.dst, common.dst_block_ids, common, head_runs),
        )

    def _descriptors_at(
        self,
        end: LegEnd,
        span: BlockRun,
        block_ids: npt.NDArray[np.int64],
        common: Overlap,
        head_runs: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.int64]:
        """Return the descriptors of one end; `block_ids` has the block of each chunk there."""
        rows = head_runs[:, np.newaxis] * end.runs_per_block
        # If a block is a single run, so is a chunk.
        if end.runs_per_block > 1:
            tokens = span.places(common.chunk_starts) % end.block_tokens
            rows = rows + _expand(tokens // self.run.num_tokens, self._runs_per_chunk)
            block_ids = np.repeat(block_ids, self._runs_per_chunk)
        descriptors: npt.NDArray[np.int64] = (rows * end.num_blocks + block_ids).ravel()
        return descriptors


def count_chunks(selections: Sequence[Selection]) -> int:
    """Count the selected chunks in all planes."""
    return sum(len(each.planes) * len(each.overlap.chunk_starts) for each in selections)


def count_merged(addresses: Sequence[npt.NDArray[np.int64]], length_bytes: int) -> int:
    """Count the descriptors that are left after merging equally long ones that adjoin.

    Args:
        addresses: Addresses of the descriptors at each end; shape (descriptors,) each.
        length_bytes: Length of every descriptor.
    """
    if not len(addresses[0]):
        return 0
    adjoin = [each[1:] - each[:-1] == length_bytes for each in addresses]
    return len(addresses[0]) - int(np.count_nonzero(np.logical_and.reduce(adjoin)))


def _expand(starts: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """Replace each start by `count` consecutive numbers that begin with it."""
    if count == 1:
        return starts
    expanded: npt.NDArray[np.int64] = (starts[:, np.newaxis] + np.arange(count)).ravel()
    return expanded


def _as_indices(parts: Sequence[npt.NDArray[np.int64]]) -> Indices:
    return np.concatenate(parts).astype(np.int32) if parts else np.empty(0, dtype=np.int32)

# SPDX-License-Identifier: Apache-2.0
"""From a planned read to descriptors, and from block ids to indices into them.

A read becomes a *leg*: two lists of descriptors, one at each end, with the same meaning at the same
index. A descriptor is a *run* of heads and tokens that is contiguous at both ends, the largest that
is. Each list has one strided row for each run of a block, which stands for that run in all blocks:

    index = row * num_blocks + block id

so that preparing a list costs the same for any number of blocks. What a row is depends on how the
two ends differ (`T` tokens in a block, `n` heads to read):

    both ends                            run                    rows of a plane
    HND, same T                          n heads x T tokens     1
    HND, T and T'                        1 head x gcd(T, T')    n * T / gcd
    NHD, all heads                       n heads x gcd(T, T')   T / gcd
    NHD, some heads                      n heads x 1 token      T
    HND and NHD                          1 head x 1 token       n * T

Where a slot stands for several tokens, a run has that many at least, and `T` counts slots. Where
keys and values lie side by side at one end, and are planes of their own at the other, they are two
planes at both, whose slots do not adjoin: a run is one slot.

Blocks of the two ends are matched by the position of their tokens in the sequence, not one by one.
Where ranks share tokens out, those of a run take the place of those of a block at that end, unless
the other has the very same share: rows stand for tokens of the sequence that adjoin at both ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import LocalLayoutError, RemoteLayoutError
from ..plan.reshard import Read
from ..plan.shards import Layer
from .cache import Plane, RankCache
from .overlap import BlockSpan, Overlap, overlap, tokens_of_chunk

Rows: TypeAlias = npt.NDArray[np.uint64]
"""Strided descriptors, shape (rows, 5): address, length, device id, stride, count; in bytes."""

Indices: TypeAlias = npt.NDArray[np.int32]
"""Descriptor indices of one end, shape (descriptors,)."""

MAX_DESCRIPTORS = int(np.iinfo(np.int32).max)
"""Descriptors of one list: NIXL's indices are signed numbers of 32 bits."""
_MAX_ROWS = 1 << 20
"""Rows of one list: more than any model has runs in a block, and few enough to be written down."""


@dataclass(frozen=True, slots=True)
class Run:
    """Heads and tokens that one descriptor moves."""

    num_heads: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class LegEnd:
    """One end of a leg.

    Attributes:
        rows: The strided descriptors; the rows of one plane stand together, those of one head run
            within a plane too, ordered by token.
        num_blocks: Blocks that each row stands for.
        block_tokens: Tokens in a block.
        runs_per_block: Rows of one head run: runs of tokens in a block.
        blocks_per_id: Blocks that one block id of the scheduler stands for.
    """

    rows: Rows
    num_blocks: int
    block_tokens: int
    runs_per_block: int
    blocks_per_id: int

    @property
    def tokens_per_id(self) -> int:
        """Tokens in a block of the scheduler's, as many as one rank has."""
        return self.block_tokens * self.blocks_per_id

    @property
    def num_descriptors(self) -> int:
        """Descriptors that the rows stand for."""
        return len(self.rows) * self.num_blocks

    @property
    def may_adjoin(self) -> bool:
        """Whether runs of a block, or of two blocks, may adjoin."""
        return self.runs_per_block > 1 or bool(self.rows[0, 3] == self.rows[0, 1])

    @property
    def shape(self) -> Hashable:
        """How one run of heads lies in the blocks, wherever these are."""
        rows = self.rows[: self.runs_per_block].copy()
        rows[:, 0] -= rows[0, 0]
        return self.block_tokens, rows.tobytes()

    def addresses(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where descriptors begin, by their indices; of the same shape."""
        row, block = np.divmod(indices, self.num_blocks)
        address, stride = self.rows[row, 0].astype(np.int64), self.rows[row, 3].astype(np.int64)
        found: npt.NDArray[np.int64] = address + block * stride
        return found


@dataclass(frozen=True, slots=True)
class PlanePair:
    """One plane of a layer at both ends, with what is the layer's there.

    Attributes:
        src: The plane at the source.
        dst: The same at the destination.
        groups: The layer's KV-cache groups, at the source and at the destination.
        blocks_per_id: Blocks of the layer that one block id stands for, at both.
    """

    src: Plane
    dst: Plane
    groups: tuple[int, int]
    blocks_per_id: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Selection:
    """What a request moves of the planes of one pair of KV-cache groups.

    Attributes:
        overlap: What its blocks have in common there.
        planes: Positions of the planes in the leg; shape (planes,), int64.
    """

    overlap: Overlap
    planes: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Leg:
    """A read made ready for transfer.

    Attributes:
        read: The read.
        pairs: Its planes, all alike in their shapes.
        run: What one descriptor moves.
        src: The source's end.
        dst: The destination's end.
        planes_by_groups: For each pair of a source and a destination KV-cache group, the positions
            of the planes of its layers; shape (planes,), int64.
        shape: Equal for legs whose runs of heads lie alike: what is counted of one is true of all.
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
        """Whether a block holds a whole sequence's state."""
        return self.pairs[0].dst.per_sequence

    @property
    def num_heads(self) -> int:
        """Heads that are read of each plane."""
        return self.read.num_units * self.pairs[0].dst.heads_per_unit

    @property
    def src_head_offset(self) -> int:
        """Position of the first of them within the source's planes."""
        return self.read.src_unit_offset * self.pairs[0].dst.heads_per_unit

    @property
    def dst_head_offset(self) -> int:
        """Position of the first of them within the destination's planes."""
        return self.read.dst_unit_offset * self.pairs[0].dst.heads_per_unit

    def select(
        self, src_blocks: Sequence[BlockSpan], dst_blocks: Sequence[BlockSpan]
    ) -> list[Selection]:
        """What a request's blocks have in common; nothing of groups where that is nothing.

        Args:
            src_blocks: The request's blocks at the source, one span for each of its groups.
            dst_blocks: The same at the destination.
        """
        return self.selections(
            lambda groups: overlap(
                src_blocks[groups[0]],
                dst_blocks[groups[1]],
                self.src.block_tokens,
                self.dst.block_tokens,
            )
        )

    def selections(
        self, overlap_of: Callable[[tuple[int, int]], Overlap | None]
    ) -> list[Selection]:
        """As `select`, where others tell what the blocks of two groups have in common.

        Args:
            overlap_of: Takes a group at the source and one at the destination.
        """
        return [
            Selection(common, planes)
            for groups, planes in self.planes_by_groups
            if (common := overlap_of(groups)) is not None
        ]

    def indices(self, selections: Sequence[Selection]) -> tuple[Indices, Indices]:
        """The descriptors that move what was selected.

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
        """Descriptors that move what was selected, before any are merged."""
        return self._runs_per_chunk * self._head_runs_per_plane * count_chunks(selections)

    def num_merged(self, selections: Sequence[Selection]) -> int:
        """Descriptors that are left once those are merged that adjoin at both ends.

        NIXL merges those that follow one another. That is done here for the first run of heads
        only: the others lie in memory as it does.
        """
        if not (self.src.may_adjoin and self.dst.may_adjoin):
            return self.num_descriptors(selections)
        return self._head_runs_per_plane * sum(
            each.overlap.count(self.shape, partial(self._num_merged, each)) * len(each.planes)
            for each in selections
        )

    @property
    def _runs_per_chunk(self) -> int:
        """Runs of tokens in a chunk."""
        return self.chunk_tokens // self.run.num_tokens

    @property
    def _head_runs_per_plane(self) -> int:
        """Runs of heads that are read of each plane."""
        return self.num_heads // self.run.num_heads

    def _num_merged(self, selection: Selection) -> int:
        """The same of the first run of heads."""
        ends = self._descriptors(selection, np.zeros(1, dtype=np.int64))
        addresses = self.src.addresses(ends[0]), self.dst.addresses(ends[1])
        return count_merged(addresses, int(self.src.rows[0, 1]))

    def _descriptors(
        self, selection: Selection, head_runs: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The descriptors of both ends for some runs of heads, by run of heads."""
        common = selection.overlap
        return (
            self._descriptors_at(self.src, common.src, common.src_block_ids, common, head_runs),
            self._descriptors_at(self.dst, common.dst, common.dst_block_ids, common, head_runs),
        )

    def _descriptors_at(
        self,
        end: LegEnd,
        span: BlockSpan,
        block_ids: npt.NDArray[np.int64],
        common: Overlap,
        head_runs: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.int64]:
        """The descriptors of one end; `block_ids` are those of the chunks there."""
        rows = head_runs[:, np.newaxis] * end.runs_per_block
        # Where a block is a single run, so is a chunk.
        if end.runs_per_block > 1:
            tokens = span.places(common.chunk_starts) % end.block_tokens
            rows = rows + _expand(tokens // self.run.num_tokens, self._runs_per_chunk)
            block_ids = np.repeat(block_ids, self._runs_per_chunk)
        descriptors: npt.NDArray[np.int64] = (rows * end.num_blocks + block_ids).ravel()
        return descriptors


def count_chunks(selections: Sequence[Selection]) -> int:
    """How many chunks were selected, in all planes."""
    return sum(len(each.planes) * len(each.overlap.chunk_starts) for each in selections)


def count_merged(addresses: Sequence[npt.NDArray[np.int64]], length_bytes: int) -> int:
    """How many are left of equally long descriptors when those that adjoin are merged.

    Args:
        addresses: Where they begin, at each end; shape (descriptors,) each.
        length_bytes: Of each.
    """
    if not len(addresses[0]):
        return 0
    adjoin = [each[1:] - each[:-1] == length_bytes for each in addresses]
    return len(addresses[0]) - int(np.count_nonzero(np.logical_and.reduce(adjoin)))


def lower_read(read: Read, src: RankCache, dst: RankCache) -> tuple[Leg, ...]:
    """Turn a planned read into legs: one, unless its layers differ in the shape of their blocks.

    Args:
        read: The read.
        src: The cache of `read.src_rank`.
        dst: The cache of `read.dst_rank`.

    Raises:
        RemoteLayoutError: The two caches differ in their planes, or in what makes a slot.
        LocalLayoutError: A list would have more descriptors than NIXL's indices can count.
    """
    pairs_by_shape: dict[tuple[Run, tuple[int, int], Plane, Plane], list[PlanePair]] = defaultdict(
        list
    )
    for layer in read.layers:
        for pair in _paired_planes(layer, src, dst):
            run = _common_run(read, layer, pair)
            src_shape, dst_shape = (replace(each, address=0) for each in (pair.src, pair.dst))
            pairs_by_shape[run, pair.blocks_per_id, src_shape, dst_shape].append(pair)
    return tuple(_leg(read, run, pairs, src, dst) for (run, *_), pairs in pairs_by_shape.items())


def _leg(read: Read, run: Run, pairs: Sequence[PlanePair], src: RankCache, dst: RankCache) -> Leg:
    """Write both lists for planes that are alike."""
    planes: dict[tuple[int, int], list[int]] = defaultdict(list)
    src_blocks_per_id, dst_blocks_per_id = pairs[0].blocks_per_id
    # The same at both ends.
    heads_per_unit = pairs[0].dst.heads_per_unit
    slice_ = read.num_units * heads_per_unit, run
    for position, pair in enumerate(pairs):
        planes[pair.groups].append(position)
    src_end = write_end(
        [pair.src for pair in pairs],
        src,
        src_blocks_per_id,
        read.src_unit_offset * heads_per_unit,
        *slice_,
    )
    dst_end = write_end(
        [pair.dst for pair in pairs],
        dst,
        dst_blocks_per_id,
        read.dst_unit_offset * heads_per_unit,
        *slice_,
    )
    return Leg(
        read,
        tuple(pairs),
        run,
        src_end,
        dst_end,
        tuple(
            (groups, np.asarray(positions, dtype=np.int64))
            for groups, positions in sorted(planes.items())
        ),
        (run, src_end.shape, dst_end.shape),
    )


def _paired_planes(layer: Layer, src: RankCache, dst: RankCache) -> Iterator[PlanePair]:
    """Match a layer's planes by position, where one end has them apart at both."""
    src_layer, dst_layer = src.layers[layer], dst.layers[layer]
    groups = src_layer.group, dst_layer.group
    blocks_per_id = src_layer.blocks_per_id, dst_layer.blocks_per_id
    src_planes, dst_planes = src_layer.planes, dst_layer.planes
    if dst_layer.keys_lead:
        src_planes, dst_planes = _apart(src_planes, dst_planes), _apart(dst_planes, src_planes)
    if len(src_planes) != len(dst_planes):
        raise RemoteLayoutError(
            f"layer {layer} has {len(src_planes)} planes at the source but {len(dst_planes)} here: "
            "run both engines with the same attention backend"
        )
    for src_plane, dst_plane in zip(src_planes, dst_planes, strict=True):
        if _page_kind(src_plane) != _page_kind(dst_plane):
            options = "attention backend and --block-size"
            if dst_plane.per_sequence:
                options = "model and --speculative-config"
            raise RemoteLayoutError(
                f"layer {layer} has blocks of {_page_text(src_plane)} at the source but of "
                f"{_page_text(dst_plane)} here: run both engines with the same {options}"
            )
        if src_plane.slot_bytes != dst_plane.slot_bytes:
            raise RemoteLayoutError(
                f"a slot of layer {layer} takes {src_plane.slot_bytes} bytes at the source but "
                f"{dst_plane.slot_bytes} here: run both engines with the same model, dtype and "
                "--kv-cache-dtype"
            )
        yield PlanePair(src_plane, dst_plane, groups, blocks_per_id)


def _apart(planes: tuple[Plane, ...], others: tuple[Plane, ...]) -> tuple[Plane, ...]:
    """Keys and values that lie side by side as two planes, where the other end has them so.

    Args:
        planes: Of a layer at one end; a slot of theirs begins with a key.
        others: The same layer's at the other end.
    """
    if len(planes) != 1 or len(others) != 2:
        return planes
    (plane,), (key_bytes, value_bytes) = planes, (other.slot_bytes for other in others)
    if plane.slot_bytes != key_bytes + value_bytes:
        return planes
    return (
        replace(plane, slot_bytes=key_bytes),
        replace(plane, address=plane.address + key_bytes, slot_bytes=value_bytes),
    )


def _page_kind(plane: Plane) -> tuple[object, ...]:
    """What must be equal at both ends for a plane's blocks to be matched."""
    return (
        plane.slot_tokens,
        plane.per_sequence,
        plane.heads_per_unit,
        plane.per_sequence and plane.block_tokens,
    )


def _page_text(plane: Plane) -> str:
    if plane.per_sequence:
        return f"{plane.block_tokens} rows of state, {plane.heads_per_unit} channels to a unit"
    text = f"{plane.block_tokens} tokens"
    if plane.slot_tokens > 1:
        text += f", {plane.slot_tokens} to a slot"
    return text if plane.heads_per_unit == 1 else f"{text}, {plane.heads_per_unit} slots to a unit"


def _common_run(read: Read, layer: Layer, pair: PlanePair) -> Run:
    """The largest run that is contiguous, in one order, at both ends."""
    num_heads, slot_tokens = read.num_units * pair.dst.heads_per_unit, pair.dst.slot_tokens
    num_tokens = tokens_of_chunk(
        read.src_tokens, read.dst_tokens, pair.src.block_tokens, pair.dst.block_tokens
    )
    if num_tokens % slot_tokens:
        raise RemoteLayoutError(
            f"{slot_tokens} tokens of layer {layer} are in one piece, but ranks share tokens out "
            f"in pieces of {num_tokens} (tokens {read.src_tokens} at the source, "
            f"{read.dst_tokens} here): give both engines one --block-size and "
            "--cp-kv-cache-interleave-size, both of the same number"
        )
    candidates = [
        Run(heads, tokens) for heads in (num_heads, 1) for tokens in (num_tokens, slot_tokens)
    ]
    candidates.sort(key=lambda run: run.num_heads * run.num_tokens, reverse=True)
    # There always is one: a slot.
    return next(
        run
        for run in candidates
        if pair.src.orders(run.num_heads, run.num_tokens)
        & pair.dst.orders(run.num_heads, run.num_tokens)
    )


def write_end(
    planes: Sequence[Plane],
    cache: RankCache,
    blocks_per_id: int,
    head_offset: int,
    num_heads: int,
    run: Run,
) -> LegEnd:
    """Write the strided rows of one end.

    Args:
        planes: The planes, all of one shape.
        cache: Whose they are.
        blocks_per_id: Blocks of theirs that one block id stands for.
        head_offset: The first head, within the planes.
        num_heads: How many heads.
        run: What one descriptor is to move; it must be contiguous.

    Raises:
        LocalLayoutError: There would be more descriptors than NIXL's indices can count.
    """
    block_tokens = planes[0].block_tokens
    num_blocks = cache.num_block_ids * blocks_per_id
    num_rows = len(planes) * (num_heads // run.num_heads) * (block_tokens // run.num_tokens)
    if num_rows > _MAX_ROWS or num_rows * num_blocks > MAX_DESCRIPTORS:
        remedy = "use a larger --block-size, the same on both engines, or fewer blocks"
        if planes[0].per_sequence:
            remedy = "set VLLM_SSM_CONV_STATE_LAYOUT to the same on both engines"
        raise LocalLayoutError(
            f"{num_rows} runs in each of {num_blocks} blocks are more descriptors than one "
            f"transfer list can hold, {_MAX_ROWS} runs and {MAX_DESCRIPTORS} in all: {remedy}"
        )
    rows = [
        (
            plane.address + plane.offset_bytes(head, token),
            run.num_heads * (run.num_tokens // plane.slot_tokens) * plane.slot_bytes,
            cache.device_id,
            plane.block_stride_bytes,
            num_blocks,
        )
        for plane in planes
        for head in range(head_offset, head_offset + num_heads, run.num_heads)
        for token in range(0, block_tokens, run.num_tokens)
    ]
    return LegEnd(
        np.array(rows, dtype=np.uint64),
        num_blocks,
        block_tokens,
        block_tokens // run.num_tokens,
        blocks_per_id,
    )


def _expand(starts: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """For each start so many numbers in a row that begin there."""
    if count == 1:
        return starts
    expanded: npt.NDArray[np.int64] = (starts[:, np.newaxis] + np.arange(count)).ravel()
    return expanded


def _as_indices(parts: Sequence[npt.NDArray[np.int64]]) -> Indices:
    return np.concatenate(parts).astype(np.int32) if parts else np.empty(0, dtype=np.int32)

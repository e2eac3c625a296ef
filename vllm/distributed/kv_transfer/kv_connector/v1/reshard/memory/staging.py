# SPDX-License-Identifier: Apache-2.0
"""Staged reads: into an arena in the source's order, and from there into our blocks.

A descriptor of a direct read is only as long as the bytes are contiguous at both ends. If the ends
differ, it is short: from TP2 to TP1, a page at the source is half a page here, and no two halves
adjoin. A staged read has two steps instead:

    source's blocks  ---- NIXL, long runs ---->  arena  ---- scatter, local ---->  our blocks

In the arena, the slices of a plane's blocks lie one after the other. Each has its heads and tokens
in the source's order, and the blocks are in the order of the source's memory. So blocks that adjoin
at the source adjoin in the arena, and NIXL merges them. The scatter then moves *chunks*: tokens
that share a block both at the source and here. Block sizes and the order of heads and tokens may
differ.

A read is cut into *windows*. Each takes one span of the arena, and has some planes with all of
their blocks or, if a single plane is too large, some blocks of one plane. `StagingPolicy` chooses
between a direct, a staged and a packed read.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from .cache import Order, Plane, RankCache
from .leg import Indices, Leg, LegEnd, Run, Selection, count_chunks
from .lowering import write_end


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of an arena, half-open.

    Attributes:
        start_bytes: Offset of its start in the arena.
        stop_bytes: Offset of its end in the arena.
    """

    start_bytes: int
    stop_bytes: int

    @property
    def size_bytes(self) -> int:
        """Its length."""
        return self.stop_bytes - self.start_bytes


class ArenaAllocator:
    """Hands out spans of an arena.

    It handles offsets only, not the memory: first fit, with free neighbours joined. A span stays in
    use until it is freed, so a span that may still be written to is never handed out again.

    Args:
        size_bytes: Size of the arena.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._in_use: set[Span] = set()
        # Start and stop of every free stretch, in order; no two of them adjoin.
        self._free: list[tuple[int, int]] = [(0, size_bytes)] if size_bytes else []

    @property
    def free_bytes(self) -> int:
        """Number of bytes in no span, not necessarily in one stretch."""
        return sum(stop - start for start, stop in self._free)

    def allocate(self, size_bytes: int, alignment_bytes: int = 1) -> Span | None:
        """Allocate a span.

        Args:
            size_bytes: Size of the span; at least 1.
            alignment_bytes: Divisor of the span's start; not necessarily a power of two.

        Returns:
            The span, or None if no free stretch can hold it.
        """
        assert size_bytes > 0, f"a span of {size_bytes} bytes"
        for position, (start, stop) in enumerate(self._free):
            aligned = -(-start // alignment_bytes) * alignment_bytes
            if aligned + size_bytes <= stop:
                rest = (start, aligned), (aligned + size_bytes, stop)
                self._free[position : position + 1] = [each for each in rest if each[0] < each[1]]
                span = Span(aligned, aligned + size_bytes)
                self._in_use.add(span)
                return span
        return None

    def free(self, span: Span) -> None:
        """Return a span that is in use."""
        self._in_use.remove(span)
        start, stop = span.start_bytes, span.stop_bytes
        position = bisect_left(self._free, (start, stop))
        if position < len(self._free) and self._free[position][0] == stop:
            stop = self._free.pop(position)[1]
        if position and self._free[position - 1][1] == start:
            start = self._free.pop(position - 1)[0]
        insort(self._free, (start, stop))


LARGEST_ARENA_BYTES = 256 << 20
"""Size of a reader's arena if memory is plentiful and no size is configured."""

LARGEST_PACKING_BYTES = 64 << 20
"""The same of a holder's arena: room for a reader with all windows that it asks for at once."""


class Strategy(str, Enum):
    """The way a read takes."""

    DIRECT = "direct"
    """From the peer's blocks straight into ours, as is what found no room in the arena."""

    STAGED = "staged"
    """Into an arena, from which the bytes are scattered into our blocks. A value for each window of
    at most 8 MiB, of the read alone."""

    PACKED = "packed"
    """As staged, but the peer has gathered the window before, so that it is one piece. A value for
    each window of at most 8 MiB, of the read alone."""


@dataclass(frozen=True, slots=True)
class StagingPolicy:
    """Thresholds for staging: it pays for many small descriptors that merge in the arena.

    They come from two machines without an accelerator, over shared memory. Staged reads of 64 MiB
    took 0.7 to 0.9 of the time of direct ones in pieces of 4 KiB, and up to 1.4 of it in
    pieces of 8 KiB; staged reads of 4 MiB took 0.8 ms longer (decision 10).

    Attributes:
        max_descriptor_bytes: Largest average size of direct descriptors, once merged.
        min_merge_factor: Least number of direct descriptors for each staged one.
        min_descriptors: Least number of direct descriptors in the read.
        max_packed_bytes: Largest average size of descriptors, direct or staged, that are packed
            instead.
        min_packed: Least number of descriptors, direct or staged, that are packed instead.
        packs_all: Whether all reads are packed whose peer packs.
    """

    max_descriptor_bytes: int = 4 << 10
    min_merge_factor: int = 16
    min_descriptors: int = 2048
    max_packed_bytes: int = 4 << 10
    min_packed: int = 2048
    packs_all: bool = False

    def packs(self, num_bytes: int, num_descriptors: int) -> bool:
        """Return whether a read is packed, given the fewest descriptors that it has otherwise."""
        return (
            num_descriptors >= self.min_packed
            and num_bytes <= self.max_packed_bytes * num_descriptors
        )

    def choose(self, num_bytes: int, num_direct: int, num_staged: int) -> Strategy:
        """Return which way a read takes.

        Args:
            num_bytes: Size of the read.
            num_direct: Number of descriptors of a direct read, once adjoining ones are merged.
            num_staged: Number of descriptors of a staged read, once adjoining ones are merged.
        """
        gains = (
            num_direct >= self.min_descriptors
            and num_bytes <= self.max_descriptor_bytes * num_direct
            and num_direct >= self.min_merge_factor * num_staged
        )
        return Strategy.STAGED if gains else Strategy.DIRECT


MAX_WINDOW_BYTES = 8 << 20
"""A window of this size is still in the processor's cache when it is scattered. Packed ones of half
the size took 1.2 to 1.4 times as long for 32 to 128 MiB in pieces of 512 bytes, over shared
memory."""


@dataclass(frozen=True, slots=True)
class ArenaCopy:
    """A copy of chunks between an arena and the cache, all chunks of one shape.

    Attributes:
        arena_offsets: Offset of each chunk in the arena, in bytes; shape (chunks,), int64.
        addresses: Address of each chunk in the cache; same shape.
        num_heads: Number of heads in a chunk.
        num_slots: Number of slots of each head in a chunk.
        slot_bytes: Size of a slot, which is contiguous at both ends.
        arena_strides_bytes: Distances in the arena from one head, and from one slot, to the next.
        cache_strides_bytes: The same distances in the cache.
    """

    arena_offsets: npt.NDArray[np.int64]
    addresses: npt.NDArray[np.int64]
    num_heads: int
    num_slots: int
    slot_bytes: int
    arena_strides_bytes: tuple[int, int]
    cache_strides_bytes: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a staged read that is in the arena as a whole.

    Attributes:
        selection: The planes and chunks that it moves, a part of the request's selection.
        size_bytes: Bytes that it takes in the arena.
    """

    selection: Selection
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StagedLeg:
    """A leg that is read through the arena.

    Attributes:
        leg: The leg.
        src: The source's end, with one descriptor for each run that is contiguous there. The rows
            of a plane are in the order of the arena.
        rows_per_block: Number of rows of one plane.
        slice: Layout of a block's slice in the arena; its address is unused.
    """

    leg: Leg
    src: LegEnd
    rows_per_block: int
    slice: Plane

    @property
    def descriptor_bytes(self) -> int:
        """Size of every descriptor."""
        return int(self.src.rows[0, 1])

    @property
    def slice_bytes(self) -> int:
        """Bytes that a block takes in the arena for each plane."""
        return self.slice.block_stride_bytes

    def windows(
        self, selections: Sequence[Selection], limit_bytes: int, max_blocks: int | None = None
    ) -> Iterator[Window]:
        """Cut selections into windows.

        Args:
            selections: Result of the leg's `select`.
            limit_bytes: Largest size of a window; one block of one plane may exceed it.
            max_blocks: Most blocks of a plane in a window; None for any number.
        """
        for selection in selections:
            num_blocks = len(selection.overlap.src_blocks)
            blocks_at_once = min(max(limit_bytes // self.slice_bytes, 1), num_blocks)
            blocks_at_once = min(blocks_at_once, max_blocks or num_blocks)
            # A window of a plane that is cut has a part of that plane only.
            whole = blocks_at_once == num_blocks
            plane_bytes = blocks_at_once * self.slice_bytes
            planes_at_once = max(limit_bytes // plane_bytes, 1) if whole else 1
            for plane in range(0, len(selection.planes), planes_at_once):
                planes = selection.planes[plane : plane + planes_at_once]
                for block in range(0, num_blocks, blocks_at_once):
                    common = selection.overlap
                    if not whole:
                        common = common.part(block, block + blocks_at_once)
                    size_bytes = len(planes) * len(common.src_blocks) * self.slice_bytes
                    yield Window(Selection(common, planes), size_bytes)

    def indices(self, window: Window, span: Span) -> tuple[Indices, Indices]:
        """Return the indices of a window's descriptors at the source and in the arena.

        Args:
            window: The window.
            span: Its span of the arena, of its size and aligned to `descriptor_bytes`.
        """
        rows = window.selection.planes[:, np.newaxis] * self.rows_per_block
        rows = rows + np.arange(self.rows_per_block)
        # In the order of the arena: by plane, then block, then row of the block.
        at_source = (
            rows[:, np.newaxis, :] * self.src.num_blocks
            + window.selection.overlap.src_blocks[:, np.newaxis]
        ).ravel()
        first = span.start_bytes // self.descriptor_bytes
        in_arena = np.arange(first, first + len(at_source), dtype=np.int32)
        return at_source.astype(np.int32), in_arena

    def scatter(self, window: Window, span: Span) -> ArenaCopy:
        """Return the copy of a window from its span into our blocks."""
        selection, leg, src, dst = window.selection, self.leg, self.slice, self.leg.pairs[0].dst
        common = selection.overlap
        src_block = np.searchsorted(common.src_blocks, common.src_block_ids)
        src_token = common.src.places(common.chunk_starts) % leg.src.block_tokens
        dst_token = common.dst.places(common.chunk_starts) % leg.dst.block_tokens
        # Equal at both ends.
        slot_tokens = dst.slot_tokens
        src_planes = np.arange(len(selection.planes)) * (len(common.src_blocks) * self.slice_bytes)
        dst_planes = np.array([leg.pairs[plane].dst.address for plane in selection.planes.tolist()])
        # Addresses of memory are below 2**63.
        return ArenaCopy(
            (
                span.start_bytes
                + src_planes[:, np.newaxis]
                + src_block * self.slice_bytes
                + src_token // slot_tokens * src.slot_stride_bytes
            ).ravel(),
            (
                dst_planes[:, np.newaxis]
                + dst.offset_bytes(leg.dst_head_offset, 0)
                + common.dst_block_ids * dst.block_stride_bytes
                + dst_token // slot_tokens * dst.slot_stride_bytes
            ).ravel(),
            leg.num_heads,
            leg.chunk_tokens // slot_tokens,
            dst.slot_bytes,
            (src.head_stride_bytes, src.slot_stride_bytes),
            (dst.head_stride_bytes, dst.slot_stride_bytes),
        )

    def name(self, window: Window, number: int) -> str:
        """Name a chunk of a window, and how a page lies at both ends.

        Args:
            window: The window.
            number: Position of the chunk in the window's copy.
        """
        common, leg = window.selection.overlap, self.leg
        plane, chunk = divmod(number, len(common.chunk_starts))
        pair, units = leg.pairs[int(window.selection.planes[plane])], leg.read.units
        return (
            f"layer {pair.layer} of KV-cache groups {pair.groups[0]} there and {pair.groups[1]} "
            f"here, heads or channels {units.start} to {units.stop - 1}, "
            f"{leg.chunk_tokens} tokens from {common.chunk_starts[chunk]} on, in block "
            f"{common.src_block_ids[chunk]} there and {common.dst_block_ids[chunk]} here; "
            f"{pair.src.strides_text()} there, {pair.dst.strides_text()} here"
        )

    def num_merged(self, selections: Sequence[Selection]) -> int:
        """Count the descriptors that are left after merging those that adjoin at the source."""
        # If a slice is one row, as long as pages are apart, it is the whole page. Several rows of
        # one slice never adjoin, or they would be one row.
        pages_adjoin = int(self.src.rows[0, 3]) == self.descriptor_bytes
        one_row = self.rows_per_block == 1 and pages_adjoin
        return sum(
            len(each.planes)
            * (
                each.overlap.num_src_runs
                if one_row
                else len(each.overlap.src_blocks) * self.rows_per_block
            )
            for each in selections
        )

    def choose(
        self,
        selections: Sequence[Selection],
        policy: StagingPolicy | None,
        *,
        may_pack: bool = False,
    ) -> Strategy:
        """Return how to read selections.

        Args:
            selections: Result of the leg's `select`.
            policy: Thresholds; None to stage all.
            may_pack: Whether the source packs.
        """
        if policy is None:
            return Strategy.STAGED
        if may_pack and policy.packs_all:
            return Strategy.PACKED
        chunk_bytes = self.slice_bytes * self.leg.chunk_tokens // self.leg.src.block_tokens
        num_bytes = count_chunks(selections) * chunk_bytes
        num_planes = sum(len(each.planes) for each in selections)
        num_direct = self.leg.num_descriptors(selections)
        may_pack = may_pack and policy.packs(num_bytes, num_direct)
        # The best case for staging: nothing merges direct, and each plane is one descriptor staged.
        may_stage = policy.choose(num_bytes, num_direct, num_planes) is Strategy.STAGED
        if not may_pack and not may_stage:
            return Strategy.DIRECT
        num_merged, num_staged = self.leg.num_merged(selections), self.num_merged(selections)
        if may_pack and policy.packs(num_bytes, min(num_merged, num_staged)):
            return Strategy.PACKED
        return policy.choose(num_bytes, num_merged, num_staged)


def stage_leg(leg: Leg, src: RankCache) -> StagedLeg:
    """Lower a leg for reading through an arena.

    Args:
        leg: The leg.
        src: Cache of the rank that it reads from.

    Raises:
        LocalLayoutError: A list would have more descriptors than NIXL's indices can count.
    """
    planes = [pair.src for pair in leg.pairs]
    plane, num_heads = planes[0], leg.num_heads
    run, token_major = _source_run(plane, num_heads)
    rows_per_block = (num_heads // run.num_heads) * (plane.block_tokens // run.num_tokens)
    head_bytes = plane.block_tokens // plane.slot_tokens * plane.slot_bytes
    return StagedLeg(
        leg,
        write_end(planes, src, leg.src.blocks_per_id, leg.src_head_offset, num_heads, run),
        rows_per_block,
        Plane(
            address=0,
            block_stride_bytes=num_heads * head_bytes,
            head_stride_bytes=plane.slot_bytes if token_major else head_bytes,
            slot_stride_bytes=plane.slot_bytes * (num_heads if token_major else 1),
            slot_bytes=plane.slot_bytes,
            num_heads=num_heads,
            block_tokens=plane.block_tokens,
            slot_tokens=plane.slot_tokens,
        ),
    )


def _source_run(plane: Plane, num_heads: int) -> tuple[Run, bool]:
    """Return the largest run contiguous at the source, and True if its tokens vary slowest."""
    tokens = plane.block_tokens
    for run, token_major in (
        (Run(num_heads, tokens), False),
        (Run(num_heads, tokens), True),
        (Run(1, tokens), False),
        (Run(num_heads, plane.slot_tokens), True),
    ):
        order = Order.TOKEN_MAJOR if token_major else Order.HEAD_MAJOR
        if order in plane.orders(run.num_heads, run.num_tokens):
            return run, token_major
    return Run(1, plane.slot_tokens), False

# SPDX-License-Identifier: Apache-2.0
"""Reads that stop over in an arena: there in the source's order, from there to where they belong.

A descriptor of a direct read is as long as both ends are contiguous. Where they differ, it is
short: TP2 to TP1, a page at the source is half a page here, and no two halves adjoin. A staged read
has two steps instead:

    source's blocks  ---- NIXL, long runs ---->  arena  ---- scatter, local ---->  our blocks

In the arena, the slices of a plane's blocks lie one after the other, each with the heads and tokens
in the order of the source, and the blocks in the order of the source's memory. So blocks that
adjoin there adjoin here, and NIXL merges them. The scatter then moves *chunks*: the tokens that
share a block with each other both at the source and here. Neither block sizes nor the order of
heads and tokens need be the same.

A read is cut into *windows*, each of which is one span of the arena: some planes with all of their
blocks, or, where a single plane is too large for that, some blocks of one plane.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .arena import Span
from .cache import Order, Plane, RankCache
from .leg import Indices, Leg, LegEnd, Run, Selection, count_chunks
from .lowering import write_end
from .strategy import StagingPolicy, Strategy


@dataclass(frozen=True, slots=True)
class Scatter:
    """A copy of chunks from the arena to our blocks, all chunks of one shape.

    Attributes:
        src_offsets: Where each chunk begins in the arena; shape (chunks,), int64, in bytes.
        dst_addresses: Where it goes; of the same shape.
        num_heads: Heads of a chunk.
        num_slots: Slots of a head of a chunk.
        slot_bytes: Size of a slot, which is contiguous at both ends.
        src_strides_bytes: From one head to the next in the arena, and from one slot to the next.
        dst_strides_bytes: The same in our blocks.
    """

    src_offsets: npt.NDArray[np.int64]
    dst_addresses: npt.NDArray[np.int64]
    num_heads: int
    num_slots: int
    slot_bytes: int
    src_strides_bytes: tuple[int, int]
    dst_strides_bytes: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a staged read that is in the arena as a whole.

    Attributes:
        selection: What it moves: some of the planes and chunks that its request selected.
        size_bytes: What it takes of the arena.
    """

    selection: Selection
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StagedLeg:
    """A leg as it is read by way of the arena.

    Attributes:
        leg: The leg.
        src: The source's end, with one descriptor for what is contiguous there; the rows of a
            plane are in the order in which they lie in the arena.
        rows_per_block: Rows of one plane.
        slice: How the slice of a block lies in the arena; its address means nothing.
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
        """What a block takes of the arena in each plane."""
        return self.slice.block_stride_bytes

    def windows(self, selections: Sequence[Selection], limit_bytes: int) -> Iterator[Window]:
        """Cut what is to be moved into windows.

        Args:
            selections: From the leg's `select`.
            limit_bytes: No window is larger, unless that is less than one block of one plane.
        """
        for selection in selections:
            num_blocks = len(selection.overlap.src_blocks)
            blocks_at_once = min(max(limit_bytes // self.slice_bytes, 1), num_blocks)
            # Where a plane is cut, each window has a part of a single one.
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
        """The descriptors to read for a window: at the source, and in the arena.

        Args:
            window: The window.
            span: Where it lands: of its size, and aligned to `descriptor_bytes`.
        """
        rows = window.selection.planes[:, np.newaxis] * self.rows_per_block
        rows = rows + np.arange(self.rows_per_block)
        # By plane, block and row of the block, which is the order of the arena.
        at_source = (
            rows[:, np.newaxis, :] * self.src.num_blocks
            + window.selection.overlap.src_blocks[:, np.newaxis]
        ).ravel()
        first = span.start_bytes // self.descriptor_bytes
        in_arena = np.arange(first, first + len(at_source), dtype=np.int32)
        return at_source.astype(np.int32), in_arena

    def scatter(self, window: Window, span: Span) -> Scatter:
        """The copy that brings a window to where it belongs."""
        selection, leg, src, dst = window.selection, self.leg, self.slice, self.leg.pairs[0].dst
        common = selection.overlap
        src_block = np.searchsorted(common.src_blocks, common.src_block_ids)
        src_token = common.src.places(common.chunk_starts) % leg.src.block_tokens
        dst_token = common.dst.places(common.chunk_starts) % leg.dst.block_tokens
        # The same at both ends.
        slot_tokens = dst.slot_tokens
        src_planes = np.arange(len(selection.planes)) * (len(common.src_blocks) * self.slice_bytes)
        dst_planes = np.array([leg.pairs[plane].dst.address for plane in selection.planes.tolist()])
        # Addresses are below 2**63 wherever there is memory.
        return Scatter(
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

    def num_merged(self, selections: Sequence[Selection]) -> int:
        """Descriptors that are left once those are merged that adjoin at the source."""
        # A slice of one row is the whole page where pages are as far apart as it is long; and rows
        # of one slice do not adjoin, or they were one.
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

    def choose(self, selections: Sequence[Selection], policy: StagingPolicy) -> Strategy:
        """Return how to read what was selected.

        Args:
            selections: From the leg's `select`.
            policy: Which reads are staged.
        """
        chunk_bytes = self.slice_bytes * self.leg.chunk_tokens // self.leg.src.block_tokens
        num_bytes = count_chunks(selections) * chunk_bytes
        num_planes = sum(len(each.planes) for each in selections)
        num_direct = self.leg.num_descriptors(selections)
        # Even if nothing merged direct, and each plane were one descriptor staged.
        if policy.choose(num_bytes, num_direct, num_planes) is Strategy.DIRECT:
            return Strategy.DIRECT
        num_merged, num_staged = self.leg.num_merged(selections), self.num_merged(selections)
        return policy.choose(num_bytes, num_merged, num_staged)


def stage_leg(leg: Leg, src: RankCache) -> StagedLeg:
    """Lower a leg for reading by way of an arena.

    Args:
        leg: The leg.
        src: The cache of the rank that it reads from.

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
    """The largest run that is contiguous at the source, and whether tokens vary slowest there."""
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

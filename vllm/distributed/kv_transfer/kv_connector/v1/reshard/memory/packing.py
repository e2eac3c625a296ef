# SPDX-License-Identifier: Apache-2.0
"""Packed reads: slices that a holder gathers, so that a reader reads them as one piece.

A direct read has a descriptor for each run that is contiguous at both ends, and a staged read one
for each that is contiguous at the source. Where these are short even there, the holder puts them
together first:

    holder's blocks  -- gather -->  its arena  ---- NIXL ---->  arena  -- scatter -->  our blocks

A window of the holder's arena has the bytes of a staged read's window in the same order, so it is
scattered alike. The holder's planes are known by their positions in its description, layer by
layer.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import RemoteLayoutError
from ..plan.shards import Layer
from .cache import LayerCache, Plane, RankCache
from .leg import PlanePair
from .staging import ArenaCopy, StagedLeg

PACK_UNIT_BYTES = 64 << 10
"""Windows begin and end at multiples of this, so that one list of descriptors serves all: NIXL
merges those of a window into one."""

MAX_PACKED_BLOCKS = 1024
"""Blocks of a window, whose ids a notification carries."""

Positions: TypeAlias = npt.NDArray[np.int64]
"""Numbers of planes or of blocks, from 0 on; shape (planes,) or (blocks,)."""


def in_units(size_bytes: int) -> int:
    """Return a size, rounded up to whole units."""
    return -(-size_bytes // PACK_UNIT_BYTES) * PACK_UNIT_BYTES


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of a block's page that is gathered, in all planes of a leg.

    Attributes:
        head_offset: Position of its first head in the page.
        num_heads: Number of heads.
        slot_bytes: Its size in each slot.
        token_major: Whether its tokens vary slowest in the arena, and not its heads.
    """

    head_offset: int
    num_heads: int
    slot_bytes: int
    token_major: bool


@dataclass(frozen=True, slots=True)
class PackedLeg:
    """What to ask the holder for to read a leg packed.

    Attributes:
        slice: The slice.
        planes: The leg's planes, by their positions at the holder.
        slot_offsets_bytes: Where the slice begins in a slot of each plane: not 0 for the values of
            slots that have keys before; shape (planes,), int64.
    """

    slice: Slice
    planes: Positions
    slot_offsets_bytes: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Gather:
    """What a reader asks a holder to put together, checked against the holder's cache.

    Attributes:
        plane: A plane of the shape that all have, with the slice's part of each slot.
        slice: The slice of each page.
        addresses: Address of the slice's first slot in block 0 of each plane, but for its first
            head; shape (planes,), int64.
        block_ids: Blocks in the order of the window; shape (blocks,), int64.
        group: The planes' KV-cache group.
        blocks_per_id: Number of blocks that one of the scheduler's block ids stands for.
    """

    plane: Plane
    slice: Slice
    addresses: npt.NDArray[np.int64]
    block_ids: Positions
    group: int
    blocks_per_id: int

    @property
    def _num_slots(self) -> int:
        return self.plane.block_tokens // self.plane.slot_tokens

    @property
    def size_bytes(self) -> int:
        """Size of the window."""
        slice_bytes = self.slice.num_heads * self._num_slots * self.plane.slot_bytes
        return len(self.addresses) * len(self.block_ids) * slice_bytes

    def copy(self, start_bytes: int) -> ArenaCopy:
        """Return the copy into the holder's arena.

        Args:
            start_bytes: Offset of the window in the arena.
        """
        plane, num_heads, num_slots = self.plane, self.slice.num_heads, self._num_slots
        pages = self.addresses[:, np.newaxis] + self.block_ids * plane.block_stride_bytes
        addresses = pages.ravel() + plane.offset_bytes(self.slice.head_offset, 0)
        slice_bytes = num_heads * num_slots * plane.slot_bytes
        strides_bytes = (num_slots * plane.slot_bytes, plane.slot_bytes)
        if self.slice.token_major:
            strides_bytes = (plane.slot_bytes, num_heads * plane.slot_bytes)
        return ArenaCopy(
            start_bytes + slice_bytes * np.arange(len(addresses), dtype=np.int64),
            addresses,
            num_heads,
            num_slots,
            plane.slot_bytes,
            strides_bytes,
            (plane.head_stride_bytes, plane.slot_stride_bytes),
        )


class PackedCache:
    """A rank's planes by their positions, at either end of a packed read.

    Args:
        cache: The rank's cache, with its layers in the order of its description.
    """

    def __init__(self, cache: RankCache) -> None:
        self._num_block_ids = cache.num_block_ids
        self._planes: list[tuple[Plane, LayerCache]] = []
        self._positions: dict[Layer, range] = {}
        for name, layer in cache.layers.items():
            first = len(self._planes)
            self._planes += [(plane, layer) for plane in layer.planes]
            self._positions[name] = range(first, len(self._planes))
        self._addresses = np.array([plane.address for plane, _ in self._planes], dtype=np.int64)
        # Planes with the same number may share a window.
        numbers: dict[Hashable, int] = {}
        self._kinds = np.array(
            [
                numbers.setdefault(
                    (replace(plane, address=0), layer.group, layer.blocks_per_id), len(numbers)
                )
                for plane, layer in self._planes
            ]
        )

    def lower(self, staged: StagedLeg) -> PackedLeg:
        """Return what to ask the rank that has this cache for, to read a leg of it packed."""
        sources = np.array([pair.src.address for pair in staged.leg.pairs], dtype=np.int64)
        planes = np.array([self._position(pair) for pair in staged.leg.pairs], dtype=np.int64)
        slice_ = Slice(
            staged.leg.src_head_offset,
            staged.leg.num_heads,
            staged.slice.slot_bytes,
            token_major=staged.slice.slot_stride_bytes > staged.slice.slot_bytes,
        )
        return PackedLeg(slice_, planes, sources - self._addresses[planes])

    def _position(self, pair: PlanePair) -> int:
        """Return the position of a pair's source: layers of other groups may share its address."""
        # A plane that the leg has split begins within its slot.
        begun = (
            each
            for each in self._positions[pair.layer]
            if self._addresses[each] <= pair.src.address
        )
        return max(begun, key=self._addresses.__getitem__)

    def check(
        self,
        slice_: Slice,
        planes: Positions,
        slot_offsets_bytes: npt.NDArray[np.int64],
        block_ids: Positions,
    ) -> Gather:
        """Check what a reader asks for.

        Args:
            slice_: The slice.
            planes: Positions of the planes.
            slot_offsets_bytes: Where the slice begins in a slot of each plane; same shape.
            block_ids: Blocks in the order of the window; shape (blocks,).

        Raises:
            RemoteLayoutError: There is no such plane, slice or block.
        """
        is_whole = len(planes) == len(slot_offsets_bytes) > 0 and len(block_ids) > 0
        if not is_whole or int(planes.max()) >= len(self._planes):
            raise RemoteLayoutError(
                f"a window of {len(block_ids)} blocks in {len(planes)} planes is asked for, of "
                f"this worker's {len(self._planes)}: {_REMEDY}"
            )
        plane, layer = self._planes[int(planes[0])]
        if (self._kinds[planes] != self._kinds[planes[0]]).any():
            raise RemoteLayoutError(
                f"a window of {len(planes)} planes is asked for, which differ: {_REMEDY}"
            )
        head_stop = slice_.head_offset + slice_.num_heads
        slot_stop_bytes = int(slot_offsets_bytes.max()) + slice_.slot_bytes
        if head_stop > plane.num_heads or slot_stop_bytes > plane.slot_bytes:
            raise RemoteLayoutError(
                f"heads up to {head_stop} and bytes up to {slot_stop_bytes} of a slot are asked "
                f"for, but a page has {plane.num_heads} heads and slots of {plane.slot_bytes} "
                f"bytes: {_REMEDY}"
            )
        num_blocks = self._num_block_ids * layer.blocks_per_id
        if int(block_ids.min()) < 0 or int(block_ids.max()) >= num_blocks:
            raise RemoteLayoutError(
                f"a window of blocks {block_ids.min()} to {block_ids.max()} is asked for, but "
                f"this worker has {num_blocks}: {_REMEDY}"
            )
        return Gather(
            replace(plane, slot_bytes=slice_.slot_bytes),
            slice_,
            self._addresses[planes] + slot_offsets_bytes,
            block_ids,
            layer.group,
            layer.blocks_per_id,
        )


_REMEDY = "run the same build of the connector on both engines"

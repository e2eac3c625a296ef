# SPDX-License-Identifier: Apache-2.0
"""The choice between a direct, a staged and a packed read."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

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

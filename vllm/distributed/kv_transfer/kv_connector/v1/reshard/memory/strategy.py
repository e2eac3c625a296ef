# SPDX-License-Identifier: Apache-2.0
"""Direct or staged: which way a read goes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

LARGEST_ARENA_BYTES = 256 << 20
"""Size of the arena where memory is plenty and nothing else is configured."""


class Strategy(str, Enum):
    """How a read goes."""

    DIRECT = "direct"
    """From the peer's blocks into ours, without a stop."""

    STAGED = "staged"
    """By way of an arena, from where its bytes are scattered into our blocks."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a read is made of.

    Attributes:
        num_descriptors: Descriptors, once those that adjoin are merged.
        num_bytes: Bytes.
    """

    num_descriptors: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StagingPolicy:
    """Which reads are staged: large ones, of small descriptors that the arena merges.

    The defaults are from two machines without an accelerator, over shared memory: reads of 64 MiB
    in pieces of 4 KiB took 0.7 to 0.9 of the time of direct ones, in pieces of 8 KiB up to 1.4 of
    it, and reads of 4 MiB 0.8 ms more (decision 10).

    Attributes:
        max_descriptor_bytes: Of direct descriptors, once merged, on average.
        min_merge_factor: How many direct descriptors become one.
        min_bytes: Of the read.
    """

    max_descriptor_bytes: int = 4 << 10
    min_merge_factor: int = 16
    min_bytes: int = 8 << 20

    def choose(self, direct: Work, staged: Work) -> Strategy:
        """The way of a read, from what it is made of either way."""
        gains = (
            direct.num_bytes >= self.min_bytes
            and direct.num_bytes <= self.max_descriptor_bytes * direct.num_descriptors
            and direct.num_descriptors >= self.min_merge_factor * staged.num_descriptors
        )
        return Strategy.STAGED if gains else Strategy.DIRECT

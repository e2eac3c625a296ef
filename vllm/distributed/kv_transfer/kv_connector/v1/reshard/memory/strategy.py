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
class StagingPolicy:
    """Which reads are staged: those of many small descriptors that the arena merges.

    The defaults are from two machines without an accelerator, over shared memory: reads of 64 MiB
    in pieces of 4 KiB took 0.7 to 0.9 of the time of direct ones, in pieces of 8 KiB up to 1.4 of
    it, and reads of 4 MiB 0.8 ms more (decision 10).

    Attributes:
        max_descriptor_bytes: Largest average size of direct descriptors, once merged.
        min_merge_factor: Direct descriptors for each staged one, at least.
        min_descriptors: Direct descriptors of the read, at least.
    """

    max_descriptor_bytes: int = 4 << 10
    min_merge_factor: int = 16
    min_descriptors: int = 2048

    def choose(self, num_bytes: int, num_direct: int, num_staged: int) -> Strategy:
        """Return how a read goes.

        Args:
            num_bytes: Size of the read.
            num_direct: Descriptors of a direct read, once those that adjoin are merged.
            num_staged: Descriptors of a staged read, once those that adjoin are merged.
        """
        gains = (
            num_direct >= self.min_descriptors
            and num_bytes <= self.max_descriptor_bytes * num_direct
            and num_direct >= self.min_merge_factor * num_staged
        )
        return Strategy.STAGED if gains else Strategy.DIRECT

# SPDX-License-Identifier: Apache-2.0
"""Direct or staged: what a read costs either way."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

_MARGIN = 0.8
"""Staging must promise to take at most this part of the time of a direct read: it costs memory and
a copy, and what is measured while other engines start on the same cores is noisy."""

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
class CostModel:
    """What NIXL and the copy take, each a line through what was measured; in seconds.

    Attributes:
        descriptor_s: Of NIXL, for each descriptor.
        byte_s: Of NIXL, for each byte.
        chunk_s: Of the copy out of the arena, for each chunk of each plane.
        copied_byte_s: Of the copy, for each byte.
        stop_s: Of stopping over at all.
    """

    descriptor_s: float
    byte_s: float
    chunk_s: float
    copied_byte_s: float
    stop_s: float

    def __str__(self) -> str:
        return (
            f"a descriptor takes {1e6 * self.descriptor_s:.2f} us, reads make "
            f"{1e-9 / self.byte_s:.1f} GB/s, copies {1e-9 / self.copied_byte_s:.1f} GB/s and "
            f"{1e6 * self.chunk_s:.2f} us a chunk, a stop {1e6 * self.stop_s:.0f} us"
        )

    def direct_s(self, work: Work) -> float:
        """How long a direct read takes."""
        return work.num_descriptors * self.descriptor_s + work.num_bytes * self.byte_s

    def staged_s(self, work: Work, num_chunks: int, arena_bytes: int) -> float:
        """How long a staged read takes, with so many chunks to scatter."""
        copy_s = num_chunks * self.chunk_s + work.num_bytes * self.copied_byte_s
        # What does not fit into the arena waits until what does was read and copied.
        num_stops = 1 + work.num_bytes // max(arena_bytes, 1)
        return num_stops * self.stop_s + self.direct_s(work) + copy_s

    def choose(self, direct: Work, staged: Work, num_chunks: int, arena_bytes: int) -> Strategy:
        """The better way; the direct one where there is little between them."""
        gains = self.staged_s(staged, num_chunks, arena_bytes) < _MARGIN * self.direct_s(direct)
        return Strategy.STAGED if gains else Strategy.DIRECT


DEFAULT_COSTS = CostModel(
    descriptor_s=4e-6, byte_s=1.5e-10, chunk_s=1e-7, copied_byte_s=3e-10, stop_s=1e-3
)
"""Of a small machine without an accelerator: where nothing is measured, or measuring fails."""


def fit_line(
    small: tuple[float, float], large: tuple[float, float], *, least: float
) -> tuple[float, float]:
    """A line through two measurements.

    Args:
        small: How much there was to do, and how long that took, in seconds.
        large: The same of more.
        least: Bounds both results from below, against noise.

    Returns:
        What is there anyway, and what each unit adds to it, in seconds.
    """
    slope = max((large[1] - small[1]) / (large[0] - small[0]), least)
    return max(small[1] - slope * small[0], least), slope

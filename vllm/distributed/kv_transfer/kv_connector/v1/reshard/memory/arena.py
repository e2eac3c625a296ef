# SPDX-License-Identifier: Apache-2.0
"""Allocator for the bytes of an arena: first fit, with free neighbours joined."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass


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

    It handles offsets only, not the memory. A span stays in use until it is freed, so a span that
    may still be written to is never handed out again.

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

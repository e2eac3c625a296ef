# SPDX-License-Identifier: Apache-2.0
"""Windows that a holder packs for readers, without sockets, threads or clocks.

    reader   asks for a window  ------------ notification ----------->  holder
                                                                        gathers it, then enters it
    reader   looks at the table  --- read --->  is it there, and where?
             reads the window    --- read --->
             looks at the table  --- read --->  is it still there?  Only then it counts.
             returns it  ------------------- notification ----------->  uses its room again

The table has a row for each window: its key, where it lies, and the number of the entry. A holder
removes the row before it uses the room again, whether the reader has returned the window or not. So
the second look tells that the bytes were those of the window for as long as they were read, as with
`leases`: no reader need be trusted or waited for. The number tells a window from the same one that
was packed again, for a message that has come twice. A key is known to its reader and the holder
only.

All of this belongs to the connector's thread.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import RemoteLayoutError, ReshardError
from ..memory.packing import PACK_UNIT_BYTES, Gather, in_units
from ..memory.staging import ArenaAllocator, Span
from .messages import Pack, PackEntry

NUM_ROWS, WORDS_PER_ROW = 64, 2
TABLE_BYTES = NUM_ROWS * WORDS_PER_ROW * 8
"""The table is read as a whole, with one look."""

_FREE = 0
_KEY, _WHERE = range(WORDS_PER_ROW)
_PLACE_BITS = 32
"""Of the second word: the lower half is the place, the upper one the number of the entry."""

MOST_ASKED = 64
"""Windows of one reader that wait to be packed; more are not heard."""

_MOST_READERS = 256
"""Readers that are served at the same time; more are not heard, and read direct."""

#: interval packed window: a window that its reader has not returned makes room for others.
_RETURNED_WITHIN_S = 1.0
"""A reader takes milliseconds. Until then a window may keep others from being packed."""


@dataclass(frozen=True, slots=True)
class PackAddress:
    """Where a worker packs windows for its readers.

    Attributes:
        table: Address of its table, in host memory.
        arena: Address of its arena, in the memory of its KV cache.
        arena_bytes: Size of the arena; 0 if it packs none.
    """

    table: int = 0
    arena: int = 0
    arena_bytes: int = 0


NOTHING_PACKED = PackAddress()
"""What workers tell that pack nothing."""


def key_of(reader: bytes, ticket: int) -> int:
    """Return the key of a window's row, which only its reader and the holder can tell; not 0."""
    digest = hashlib.blake2b(ticket.to_bytes(8, "little"), digest_size=8, key=reader).digest()
    return int.from_bytes(digest, "little") or 1


class Entered(NamedTuple):
    """What a row says of a window.

    Attributes:
        number: Number of the entry.
        place: Where the window lies in the arena, in units.
    """

    number: int
    place: int


def entered(table: npt.NDArray[np.uint64]) -> dict[int, Entered]:
    """Return the windows that a look at a table shows, by key.

    Args:
        table: The words of a table, in any shape.
    """
    rows = table.reshape(-1, WORDS_PER_ROW).tolist()
    return {key: Entered(*divmod(where, 1 << _PLACE_BITS)) for key, where in rows if key != _FREE}


class PackTable:
    """A holder's table of packed windows.

    Attributes:
        words: What readers read; shape (`NUM_ROWS`, `WORDS_PER_ROW`).
    """

    def __init__(self) -> None:
        self.words: npt.NDArray[np.uint64] = np.zeros((NUM_ROWS, WORDS_PER_ROW), dtype=np.uint64)
        self._free = list(range(NUM_ROWS))
        self._num_entered = 0

    def enter(self, key: int, place: int) -> int:
        """Enter a window that is packed; return its row."""
        row = self._free.pop()
        self._num_entered = (self._num_entered + 1) % (1 << _PLACE_BITS)
        # The key last: whoever sees it finds the place, or another one at the second look.
        self.words[row, _WHERE] = self._num_entered << _PLACE_BITS | place
        self.words[row, _KEY] = key
        return row

    def remove(self, row: int) -> None:
        """Remove a window, before anything is written where it lies."""
        self.words[row, _KEY] = _FREE
        self._free.append(row)


@dataclass(slots=True, eq=False)
class Packing:
    """A window that has room in the arena.

    Attributes:
        reader: Its reader.
        ticket: Its number there.
        gather: What it has.
        span: Its room.
        row: Its row in the table; None until it is packed.
        since_s: Since when it is packed.
        is_over: Whether its reader has returned it, or not in time.
    """

    reader: bytes
    ticket: int
    gather: Gather
    span: Span
    row: int | None = None
    since_s: float = 0.0
    is_over: bool = False


@dataclass(slots=True)
class _Reader:
    """What a reader has asked for.

    Attributes:
        heard_at_s: When it last asked for something or returned it.
        asked: Windows that wait, by ticket, in order.
        packings: Windows that have room.
    """

    heard_at_s: float
    asked: dict[int, PackEntry] = field(default_factory=dict)
    packings: dict[int, Packing] = field(default_factory=dict)

    @property
    def room_bytes(self) -> int:
        return sum(each.span.size_bytes for each in self.packings.values())


class Packer:
    """Which windows a holder packs, in which order, and where.

    Readers take turns, one window each, and each has an equal share of the arena at most.

    Args:
        arena_bytes: Size of the arena.

    Attributes:
        table: Its table.
    """

    def __init__(self, arena_bytes: int) -> None:
        self.table = PackTable()
        self._arena_bytes = arena_bytes
        self._spans = ArenaAllocator(arena_bytes)
        # In the order of their turns.
        self._readers: dict[bytes, _Reader] = {}
        # Packed ones, oldest first; those that are over stay until they are first.
        self._packed: deque[Packing] = deque()
        self._num_packings = 0

    def __len__(self) -> int:
        """Return the number of readers with a window that waits or is packed."""
        return len(self._readers)

    def hear(self, pack: Pack, now_s: float) -> None:
        """Note what a reader asks for and returns."""
        reader = self._readers.get(pack.reader)
        if reader is None:
            if not pack.asked or len(self._readers) >= _MOST_READERS:
                return
            reader = self._readers[pack.reader] = _Reader(now_s)
        reader.heard_at_s = now_s
        for ticket in pack.returned:
            reader.asked.pop(ticket, None)
            if (packing := reader.packings.get(ticket)) is None:
                continue
            if packing.row is None:
                packing.is_over = True
            else:
                self.end(packing)
        # Returning its last window has made it forgotten.
        self._readers[pack.reader] = reader
        for entry in pack.asked:
            if len(reader.asked) < MOST_ASKED and entry.ticket not in reader.packings:
                reader.asked[entry.ticket] = entry
        self._forget_if_idle(pack.reader)

    def next(self, check: Callable[[PackEntry], Gather | None]) -> Packing | None:
        """Return the next window to pack; None without one that may be packed now.

        Args:
            check: Returns what an entry asks for; None if it is not offered yet; raises
                `ReshardError` if it may not have it.

        Raises:
            ReshardError: A reader may not have what it asks for, which is then forgotten.
        """
        if self._num_packings == NUM_ROWS:
            return None
        for name in list(self._readers):
            # Its next turn comes after all others.
            reader = self._readers[name] = self._readers.pop(name)
            for ticket, entry in list(reader.asked.items()):
                try:
                    gather = check(entry)
                    if gather is not None and in_units(gather.size_bytes) > self._arena_bytes:
                        raise RemoteLayoutError(
                            f"a window of {gather.size_bytes} bytes is asked for, but the arena "
                            f"has {self._arena_bytes}: run the same build of the connector on "
                            "both engines"
                        )
                except ReshardError:
                    del reader.asked[ticket]
                    self._forget_if_idle(name)
                    raise
                if gather is None:
                    continue
                if (span := self._allocate(reader, in_units(gather.size_bytes))) is None:
                    break
                del reader.asked[ticket]
                packing = reader.packings[ticket] = Packing(name, ticket, gather, span)
                self._num_packings += 1
                return packing
        return None

    def enter(self, packing: Packing, now_s: float) -> None:
        """Show a window to its reader: it is packed."""
        if packing.is_over:
            self.end(packing)
            return
        packing.since_s = now_s
        place = packing.span.start_bytes // PACK_UNIT_BYTES
        packing.row = self.table.enter(key_of(packing.reader, packing.ticket), place)
        self._packed.append(packing)

    def end(self, packing: Packing) -> None:
        """Use a window's room again; nothing must be copied into it any more."""
        reader = self._readers[packing.reader]
        if packing.row is not None:
            self.table.remove(packing.row)
            packing.row = None
        packing.is_over = True
        del reader.packings[packing.ticket]
        self._num_packings -= 1
        self._spans.free(packing.span)
        self._forget_if_idle(packing.reader)

    def expire(self, now_s: float) -> None:
        """Use the room of windows again that were not returned in time.

        What else is asked for by a reader that is not heard any more is forgotten.
        """
        for name, reader in list(self._readers.items()):
            if now_s >= reader.heard_at_s + _RETURNED_WITHIN_S:
                reader.asked.clear()
                self._forget_if_idle(name)
        while self._packed:
            oldest = self._packed[0]
            if not oldest.is_over:
                if now_s < oldest.since_s + _RETURNED_WITHIN_S:
                    return
                self.end(oldest)
            self._packed.popleft()

    def _allocate(self, reader: _Reader, size_bytes: int) -> Span | None:
        """Return room for a window within the reader's share; its first one may exceed that."""
        share_bytes = self._arena_bytes // len(self._readers)
        if reader.packings and reader.room_bytes + size_bytes > share_bytes:
            return None
        return self._spans.allocate(size_bytes, PACK_UNIT_BYTES)

    def _forget_if_idle(self, name: bytes) -> None:
        reader = self._readers.get(name)
        if reader is not None and not reader.asked and not reader.packings:
            del self._readers[name]

# SPDX-License-Identifier: Apache-2.0
"""The windows that another engine's worker packs for this one. See `protocol.packing`.

Everything here belongs to the connector's thread of the reading worker.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np

from ..errors import TransferError, quote
from ..memory.leg import Indices
from ..memory.packing import PACK_UNIT_BYTES, PackedLeg, in_units
from ..memory.staging import Span, Window
from ..protocol.fingerprint import OfferFingerprint
from ..protocol.ids import RequestId
from ..protocol.lifetimes import PEER_GRACE_S
from ..protocol.messages import Pack, PackEntry, Receive, encode_notification
from ..protocol.packing import Entered, entered, key_of
from .agent import Prepared, TransferState
from .lease_check import Reads, RowBuffer, RowRead

MOST_ASKED_AT_ONCE = 8
"""Windows of one worker that are asked for and not returned, so that some are packed meanwhile."""

#: interval packed: a window is read direct, as it was not packed.
PACKED_WITHIN_S = 0.1
"""How long windows of a worker are waited for before one of them is packed."""

_LOOK_HANGS_S = 1.0
"""How long a look may take until all windows are read direct."""

_DIRECT_FOR_S = 1.0
"""How long nothing more is asked of a worker that has not packed a window in time."""


class PackState(Enum):
    """Where a window is.

    Attributes:
        ASKED: Asked for.
        PACKED: In the holder's arena, and may be read.
        READ: It was read.
        CONFIRMED: It was read, and was the window for as long as that took.
        LOST: It is to be read direct.
    """

    ASKED = "asked"
    PACKED = "packed"
    READ = "read"
    CONFIRMED = "confirmed"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Claim:
    """An offer, as its reader knows it.

    Attributes:
        request_id: The producer's id of the request.
        fingerprint: Fingerprint of the offer.
    """

    request_id: RequestId
    fingerprint: OfferFingerprint

    @classmethod
    def of(cls, receive: Receive) -> Claim | None:
        """Return the offer of a request; None before there is one."""
        if receive.fingerprint is None:
            return None
        return cls(receive.remote_request_id, receive.fingerprint)


@dataclass(slots=True, eq=False)
class PackedWindow:
    """A window that was asked for.

    Attributes:
        ticket: Its number.
        key: Key of its row in the holder's table.
        asked_at_s: When it was asked for.
        verifies: Whether others are no less asked for if it is lost.
        state: Where it is.
        entered: What the holder's table says of it, once it is packed.
    """

    ticket: int
    key: int
    asked_at_s: float
    verifies: bool = False
    state: PackState = PackState.ASKED
    entered: Entered | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Look:
    """A read of the holder's table.

    Attributes:
        read: The read.
        posted_at_s: When it was posted.
        has_read: Windows that had been read when it was posted.
    """

    read: RowRead
    posted_at_s: float
    has_read: frozenset[PackedWindow]


class PackedWindows:
    """Asks one worker of another engine to pack windows, and follows them.

    Each poll first calls `look`, then `send`.

    Args:
        buffer: Buffer that the worker's table is read into.
        reads: Connection with the worker's engine.
        table: The worker's table.
        arena: The worker's arena, in units.
        local: Our arena, in units.
        notify: Sends the worker a message; raises `TransferError`.
    """

    def __init__(
        self,
        buffer: RowBuffer,
        reads: Reads,
        table: Prepared,
        arena: Prepared,
        local: Prepared,
        notify: Callable[[bytes], None],
    ) -> None:
        self._buffer = buffer
        self._reads = reads
        self._table = table
        self._arena = arena
        self._local = local
        self._notify = notify
        self._name = os.urandom(16)
        self._num_asked = 0
        self._windows: dict[PackedWindow, None] = {}
        self._look: _Look | None = None
        self._asked: list[PackEntry] = []
        self._returned: list[int] = []
        # When the last window was seen that was packed.
        self._packed_at_s = -math.inf
        self._asks_again_at_s = -math.inf

    @property
    def is_moving(self) -> bool:
        """Whether a window is waited for, or something is to be sent."""
        return bool(self._windows or self._asked or self._returned)

    @property
    def is_busy(self) -> bool:
        """Whether it is moving, or a look is in flight."""
        return self.is_moving or self._look is not None

    @property
    def has_room(self) -> bool:
        """Whether another window may be asked for now."""
        return len(self._windows) < MOST_ASKED_AT_ONCE

    def serves(self, now_s: float) -> bool:
        """Return whether the worker has packed in time of late, and no look hangs."""
        look = self._look
        hangs = look is not None and now_s >= look.posted_at_s + _LOOK_HANGS_S
        return now_s >= self._asks_again_at_s and not hangs

    def hangs(self, now_s: float) -> bool:
        """Return whether a look has hung for so long that its peer counts as hung."""
        return self._look is not None and now_s >= self._look.posted_at_s + PEER_GRACE_S

    def ask(
        self,
        claim: Claim,
        leg: PackedLeg,
        window: Window,
        now_s: float,
        *,
        verifies: bool = False,
    ) -> PackedWindow:
        """Ask for a window; `advance` sends that.

        Args:
            claim: The offer.
            leg: What to ask for to read its leg.
            window: The window.
            now_s: The time.
            verifies: Whether others are no less asked for if it is lost.
        """
        ticket = self._num_asked
        self._num_asked += 1
        print_, slice_, selection = claim.fingerprint, leg.slice, window.selection
        self._asked.append(
            PackEntry(
                ticket,
                claim.request_id,
                print_.num_tokens,
                print_.content,
                print_.blocks,
                slice_.head_offset,
                slice_.num_heads,
                slice_.slot_bytes,
                slice_.token_major,
                leg.planes[selection.planes].astype("<u2").tobytes(),
                leg.slot_offsets_bytes[selection.planes].astype("<u4").tobytes(),
                selection.overlap.src_blocks.astype("<u4").tobytes(),
            )
        )
        key = key_of(self._name, ticket)
        asked = PackedWindow(ticket, key, now_s, verifies)
        self._windows[asked] = None
        return asked

    def lists(
        self, asked: PackedWindow, window: Window, span: Span
    ) -> tuple[Prepared, Indices, Prepared, Indices]:
        """Return what to read a packed window with: lists and indices, local and remote."""
        count = in_units(window.size_bytes) // PACK_UNIT_BYTES
        first = span.start_bytes // PACK_UNIT_BYTES
        local = np.arange(first, first + count, dtype=np.int32)
        assert asked.entered is not None
        place = asked.entered.place
        remote = np.arange(place, place + count, dtype=np.int32)
        return self._local, local, self._arena, remote

    def give_back(self, asked: PackedWindow) -> None:
        """Return a window's room to the holder; a second call changes nothing."""
        if self._windows.pop(asked, self) is None:
            self._returned.append(asked.ticket)

    def look(self, now_s: float) -> None:
        """Take note of what the last look has found, and of windows that took too long.

        Raises:
            TransferError: The worker cannot be read from.
        """
        self._finish_look(now_s)
        for each in self._windows:
            # Others share the worker, which packs in the order that it was asked.
            since_s = max(each.asked_at_s, self._packed_at_s)
            if each.state is PackState.ASKED and now_s >= since_s + PACKED_WITHIN_S:
                each.state = PackState.LOST
                if not each.verifies:
                    self._asks_again_at_s = max(self._asks_again_at_s, now_s + _DIRECT_FOR_S)

    def send(self, now_s: float) -> None:
        """Send what is asked for and returned, and begin the next look.

        Raises:
            TransferError: The worker cannot be reached.
        """
        # A message for each window, as its blocks take some kilobytes.
        while self._asked or self._returned:
            pack = Pack(self._name, self._asked[:1], self._returned[:256])
            self._notify(encode_notification(pack))
            del self._asked[:1], self._returned[:256]
        if self._look is None and self._windows and self._buffer.num_free:
            read = self._buffer.post(self._reads, self._table, [0])
            has_read = (each for each in self._windows if each.state is PackState.READ)
            self._look = _Look(read, now_s, frozenset(has_read))

    def lose_all(self) -> None:
        """Take all windows for lost: the worker cannot be reached, or does not answer."""
        for each in self._windows:
            each.state = PackState.LOST
        self._windows.clear()
        self._asked.clear()
        self._returned.clear()

    def _finish_look(self, now_s: float) -> None:
        """Take note of what a look has found.

        Raises:
            TransferError: It has failed.
        """
        look = self._look
        if look is None:
            return
        state = self._reads.poll(look.read.transfer)
        if state is TransferState.IN_FLIGHT:
            if now_s >= look.posted_at_s + _LOOK_HANGS_S:
                # It is polled on: once its lane is retired, that closes as soon as the look ends.
                self.lose_all()
            return
        self._look = None
        if state is not TransferState.DONE:
            raise TransferError(f"the windows of {quote(self._table.peer)} could not be looked up")
        found = entered(self._buffer.landed(look.read))
        self._buffer.free(self._reads, look.read)
        for each in self._windows:
            row = found.get(each.key)
            if each.state is PackState.ASKED and row is not None:
                each.state, each.entered = PackState.PACKED, row
                self._packed_at_s = now_s
            elif each.state is PackState.READ and each in look.has_read:
                each.state = PackState.CONFIRMED if row == each.entered else PackState.LOST

# SPDX-License-Identifier: Apache-2.0
"""Reads of boards whose results are no longer needed.

Such a read may still land, so its connection cannot be closed before it has. A read that fails or
takes too long is ended by closing its lane, like a read of blocks: if its engine is gone, nothing
else would notice, and the connection would stay open for ever.

All of this belongs to the connector's thread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...errors import TransferError
from ...transport.connection import PeerConnection
from ...transport.row_buffer import RowRead
from ..connecting.peers import PeerTable

#: interval look: the lane of a look at another engine's board is retired; the next look goes over
#: another one.
BOARD_READ_LIMIT_S = 5.0
"""How long a read of a board may take; after that its connection is given up."""

_REST_S = 0.1
"""Interval between two polls of abandoned reads."""


@dataclass(slots=True)
class _Abandoned:
    """An abandoned read, its connection, and when to give that up."""

    connection: PeerConnection
    read: RowRead
    limit_s: float

    def is_over(self) -> bool:
        """Return whether it has landed, or its lane is closed.

        Raises:
            TransferError: It has failed.
        """
        reader = self.connection.board() if self.connection.is_connected else None
        return reader is None or reader.take(self.read) is not None


class AbandonedReads:
    """The abandoned reads of a worker.

    Args:
        peers: The engines whose boards are read.
    """

    def __init__(self, peers: PeerTable) -> None:
        self._peers = peers
        self._abandoned: list[_Abandoned] = []
        self._due_s = 0.0

    @property
    def next_due_s(self) -> float:
        """When to poll them next; infinite without any."""
        return self._due_s if self._abandoned else math.inf

    def add(self, connection: PeerConnection, read: RowRead, posted_s: float) -> None:
        """Abandon a read that was posted at `posted_s`."""
        self._abandoned.append(_Abandoned(connection, read, posted_s + BOARD_READ_LIMIT_S))

    def stood_still(self, for_s: float) -> None:
        """Extend all limits by `for_s` seconds, in which nothing could be polled."""
        for each in self._abandoned:
            each.limit_s += for_s

    def advance(self, now_s: float) -> None:
        """Poll all reads that are due, and give up connections whose reads do not land."""
        if now_s < self._due_s:
            return
        self._due_s = now_s + _REST_S
        self._abandoned = [each for each in self._abandoned if self._may_land(each, now_s)]

    def _may_land(self, abandoned: _Abandoned, now_s: float) -> bool:
        try:
            is_over = abandoned.is_over()
        except TransferError:
            self._peers.break_off(abandoned.connection, now_s)
            return False
        if not is_over and now_s >= abandoned.limit_s:
            self._peers.break_off(abandoned.connection, now_s)
            abandoned.limit_s = math.inf
        return not is_over

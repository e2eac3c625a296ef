# SPDX-License-Identifier: Apache-2.0
"""Reads of boards whose results are not wanted any more.

Such a read may still land, so that its connection cannot end before it has. A read that fails, or
takes too long, ends with its lane, as a read of blocks does: else the connection would be waited
for for ever where its engine is gone, as nothing else would notice.

All of this belongs to the connector's thread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import TransferError
from ..transport.connection import PeerConnection
from ..transport.row_buffer import RowRead
from .peers import PeerTable

BOARD_READ_LIMIT_S = 5.0
"""A read of a board that takes longer has failed: its connection is given up."""

_REST_S = 0.1
"""Between two polls of them."""


@dataclass(slots=True)
class _Abandoned:
    """A read, what it is made with, and when that is to be given up."""

    connection: PeerConnection
    read: RowRead
    limit_s: float

    def is_over(self) -> bool:
        """Whether it has landed, or its lane has ended.

        Raises:
            TransferError: It has failed.
        """
        reader = self.connection.board() if self.connection.is_connected else None
        return reader is None or reader.take(self.read) is not None


class AbandonedReads:
    """Those of a worker.

    Args:
        peers: The engines whose boards are read.
    """

    def __init__(self, peers: PeerTable) -> None:
        self._peers = peers
        self._abandoned: list[_Abandoned] = []
        self._due_s = 0.0

    @property
    def next_due_s(self) -> float:
        """When to poll them next."""
        return self._due_s if self._abandoned else math.inf

    def add(self, connection: PeerConnection, read: RowRead, posted_s: float) -> None:
        """A read is not wanted any more that was posted at that time."""
        self._abandoned.append(_Abandoned(connection, read, posted_s + BOARD_READ_LIMIT_S))

    def stood_still(self, for_s: float) -> None:
        """They could not be polled for so many seconds."""
        for each in self._abandoned:
            each.limit_s += for_s

    def advance(self, now_s: float) -> None:
        """Give up connections whose reads do not land."""
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

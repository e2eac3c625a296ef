# SPDX-License-Identifier: Apache-2.0
"""Looks at boards that nobody waits for any more.

Such a look may still land, so that its connection cannot end before it has. A look that fails, or
takes too long, ends with its lane, as a read of blocks does: else the connection would be waited
for for ever where its engine is gone, with nobody to miss it.

All of this belongs to the connector's thread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import TransferError
from ..transport.connection import PeerConnection
from ..transport.row_buffer import RowRead
from .peers import PeerTable

LOOK_LIMIT_S = 5.0
"""A look that takes longer is none: its connection is given up."""

_REST_S = 0.1
"""How long they are left alone."""


@dataclass(slots=True)
class _Left:
    """A look, what it is made with, and when that is to be given up."""

    connection: PeerConnection
    look: RowRead
    limit_s: float

    def is_over(self) -> bool:
        """Whether it has landed, or its lane has ended.

        Raises:
            TransferError: It has failed.
        """
        reader = self.connection.board() if self.connection.is_connected else None
        return reader is None or reader.take(self.look) is not None


class LeftLooks:
    """Those of a worker.

    Args:
        peers: The engines that are looked at.
    """

    def __init__(self, peers: PeerTable) -> None:
        self._peers = peers
        self._left: list[_Left] = []
        self._due_s = 0.0

    @property
    def next_due_s(self) -> float:
        """When to look after them next."""
        return self._due_s if self._left else math.inf

    def add(self, connection: PeerConnection, look: RowRead, posted_s: float) -> None:
        """Nobody waits for a look any more that was posted at that time."""
        self._left.append(_Left(connection, look, posted_s + LOOK_LIMIT_S))

    def stood_still(self, for_s: float) -> None:
        """This worker could not look after them for so many seconds."""
        for left in self._left:
            left.limit_s += for_s

    def advance(self, now_s: float) -> None:
        """Give up connections whose looks do not land."""
        if now_s < self._due_s:
            return
        self._due_s = now_s + _REST_S
        self._left = [each for each in self._left if self._may_land(each, now_s)]

    def _may_land(self, left: _Left, now_s: float) -> bool:
        try:
            is_over = left.is_over()
        except TransferError:
            self._peers.break_off(left.connection, now_s)
            return False
        if not is_over and now_s >= left.limit_s:
            self._peers.break_off(left.connection, now_s)
            left.limit_s = math.inf
        return not is_over

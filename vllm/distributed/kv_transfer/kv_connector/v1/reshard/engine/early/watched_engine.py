# SPDX-License-Identifier: Apache-2.0
"""An engine whose board is read for requests that it has not offered yet.

One small read at a time, and a rest after it: of the buckets of requests that wait, or of the
records that were found there. Each such read is a *look*.

All of this belongs to the connector's thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice

import numpy as np
import numpy.typing as npt

from ...errors import TransferError
from ...protocol.ids import RequestId
from ...protocol.messages import RemoteEngineAddress
from ...protocol.watch import Pace
from ...transport.board_reader import BoardReader
from ...transport.connection import PeerConnection
from ...transport.row_buffer import RowRead
from ..connecting.peers import PeerTable
from .abandoned_reads import BOARD_READ_LIMIT_S, AbandonedReads
from .watched_requests import WantedRecord, WatchedRequest

_NO_ROOM_S = 0.01
"""When to try again where other looks have taken all rows."""

LOOK_REQUESTS = 256
"""So many requests are looked at together: what is found takes 0.7 ms to go through, and a thousand
would keep the thread from reads."""


class WatchedEngine:
    """An engine that is watched.

    Args:
        address: The engine.
        peers: How it is connected.
        abandoned: What has become of looks that are not wanted any more.

    Attributes:
        requests: The requests there that are not offered yet, by this engine's ids.
        pace: How fast it was with the last ones, once it was looked at.
        look_at_s: When to look next.
        overdue_s: When some request may be overdue.
        connection: What the look is made with that is under way.
        asked: The requests whose buckets it is for.
        wanted: The records that it is for instead, if any.
    """

    def __init__(
        self, address: RemoteEngineAddress, peers: PeerTable, abandoned: AbandonedReads
    ) -> None:
        self._peers = peers
        self._abandoned = abandoned
        self._look: RowRead | None = None
        self._looked_s = 0.0
        self.address = address
        self.requests: dict[RequestId, WatchedRequest] = {}
        self.pace = Pace()
        self.look_at_s = 0.0
        self.overdue_s = math.inf
        self.connection: PeerConnection | None = None
        self.asked: list[RequestId] = []
        self.wanted: dict[RequestId, WantedRecord] = {}

    @property
    def is_looking(self) -> bool:
        """Whether a look is under way."""
        return self._look is not None

    @property
    def num_free(self) -> int:
        """How many rows can be read now; a look has just been taken."""
        return self._reader().num_free

    def add(self, request_id: RequestId, request: WatchedRequest) -> None:
        """Look at a request, too, at once."""
        self.requests[request_id] = request
        self.look_at_s = 0.0
        self.overdue_s = min(self.overdue_s, request.watch.due_s)

    def look(self, now_s: float) -> str | None:
        """Look at the buckets of requests, of those first that were not looked at last.

        Returns:
            Why there is nothing to look at, and never will be; None where there is.
        """
        peer = self._peers.get_or_connect(self.address, now_s)
        self.connection, self.pace = peer.connection, peer.pace
        if self.connection is None:
            return None
        try:
            reader = self.connection.board()
        except TransferError:
            self._break_off(now_s)
            return None
        if reader is None:
            return "that engine does not say how far it is: set early_dispatch there, too"
        self.asked = list(islice(self.requests, min(reader.num_free, LOOK_REQUESTS)))
        if len(self.asked) < len(self.requests):
            for request_id in self.asked:
                self.requests[request_id] = self.requests.pop(request_id)
        self._post([self.requests[each].entry.bucket for each in self.asked], now_s)
        return None

    def take(self, now_s: float) -> npt.NDArray[np.uint64] | None:
        """The rows that a look has found; None as long as it has not, or where it never will."""
        assert self.connection is not None and self._look is not None
        if not self.connection.is_connected:
            self._reconnect(now_s)
            return None
        try:
            rows = self._reader().take(self._look)
        except TransferError:
            self._break_off(now_s)
            return None
        if rows is not None:
            self._look = None
        elif now_s >= self._looked_s + BOARD_READ_LIMIT_S:
            self._break_off(now_s)
        return rows

    def read_records(self, wanted: Mapping[RequestId, WantedRecord], now_s: float) -> None:
        """Read the records of some requests, for which there is room."""
        self.wanted.update(wanted)
        self._post([row for each in wanted.values() for row in each.place.rows], now_s)

    def rest(self, now_s: float) -> None:
        """Nothing is left to be seen for now: look again after a while."""
        left = [self.requests[each] for each in self.asked if each in self.requests]
        self.look_at_s = now_s + min((each.watch.rest_s for each in left), default=0.0)

    def stood_still(self, for_s: float) -> None:
        """It could not be looked at for so many seconds."""
        self._looked_s += for_s
        for request in self.requests.values():
            request.watch.stood_still(for_s)

    def let_go(self) -> None:
        """Want nothing of a look any more, and look over its connection no more."""
        if self._look is not None and self.connection is not None:
            self._abandoned.add(self.connection, self._look, self._looked_s)
        self._look = self.connection = None
        self.wanted = {}

    def _reader(self) -> BoardReader:
        """What its board is read with, where it is known to be connected, and to have one."""
        assert self.connection is not None
        reader = self.connection.board()
        assert reader is not None
        return reader

    def _post(self, rows: list[int], now_s: float) -> None:
        if not rows:
            # There is no room, or no request is left.
            self.look_at_s = now_s + _NO_ROOM_S
            return
        try:
            self._look, self._looked_s = self._reader().post(rows), now_s
        except TransferError:
            self._break_off(now_s)

    def _break_off(self, now_s: float) -> None:
        """A look has failed: the engine is asked anew, if it is there, and if it is the same."""
        assert self.connection is not None
        self._peers.break_off(self.connection, now_s)
        self._reconnect(now_s)

    def _reconnect(self, now_s: float) -> None:
        """Look on once there is another connection."""
        self.let_go()
        if self.requests:
            self._peers.get_or_connect(self.address, now_s)

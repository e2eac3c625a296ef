# SPDX-License-Identifier: Apache-2.0
"""An engine whose board is polled for requests that it has not offered yet.

One small read runs at a time, with a pause after it. It reads the buckets of waiting requests, or
the records that were found there. Each such read is a *look*.

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
from ...transport.board_reader import BoardReader
from ...transport.connection import PeerConnection
from ...transport.row_buffer import RowRead
from ..connecting.peers import PeerTable
from .abandoned_reads import BOARD_READ_LIMIT_S, AbandonedReads
from .watched_requests import WantedRecord, WatchedRequest

_NO_ROOM_S = 0.01
"""Delay before retrying a look if no row is free."""

LOOK_REQUESTS = 256
"""Maximum requests per look: processing the result takes 0.7 ms, and a thousand requests would
delay the thread's reads."""


class WatchedEngine:
    """A watched engine.

    Args:
        address: The engine's address.
        peers: Table of peers, which connects the engine.
        abandoned: Receives looks that are given up while under way.

    Attributes:
        requests: Requests that the engine has not offered yet, by their ids in this engine.
        look_at_s: When to look next.
        overdue_s: Earliest time at which a request may be overdue.
        connection: Connection of the current or last look; None before a first one, and once it
            is dropped.
        asked: Requests whose buckets the look reads.
        wanted: Records that the look reads instead, by request id; empty if it reads buckets.
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
        self.look_at_s = 0.0
        self.overdue_s = math.inf
        self.connection: PeerConnection | None = None
        self.asked: list[RequestId] = []
        self.wanted: dict[RequestId, WantedRecord] = {}

    @property
    def is_looking(self) -> bool:
        """True while a look is under way."""
        return self._look is not None

    @property
    def num_free(self) -> int:
        """Number of rows that can be read now. Valid only just after `take` returned rows."""
        return self._reader().num_free

    def add(self, request_id: RequestId, request: WatchedRequest) -> None:
        """Watch a further request, and look at once."""
        self.requests[request_id] = request
        self.look_at_s = 0.0
        self.overdue_s = min(self.overdue_s, request.watch.due_s)

    def look(self, now_s: float) -> str | None:
        """Start a look at the buckets of requests, beginning with those not in the last look.

        Returns:
            Why the engine can never be watched; None if it can.
        """
        self.connection = self._peers.get_or_connect(self.address, now_s).connection
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
        """Return the rows that a look has read; None while it is under way, or if it failed."""
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
        """Start a look at the records of some requests; the caller ensures that they fit."""
        self.wanted.update(wanted)
        self._post([row for each in wanted.values() for row in each.place.rows], now_s)

    def rest(self, now_s: float) -> None:
        """Schedule the next look after the shortest pause of the requests in the last one."""
        left = [self.requests[each] for each in self.asked if each in self.requests]
        self.look_at_s = now_s + min((each.watch.rest_s for each in left), default=0.0)

    def stood_still(self, for_s: float) -> None:
        """Extend deadlines by seconds during which no look was possible."""
        self._looked_s += for_s
        for request in self.requests.values():
            request.watch.stood_still(for_s)

    def let_go(self) -> None:
        """Abandon the look under way, if any, and drop its connection."""
        if self._look is not None and self.connection is not None:
            self._abandoned.add(self.connection, self._look, self._looked_s)
        self._look = self.connection = None
        self.wanted = {}

    def _reader(self) -> BoardReader:
        """Return the board reader; the engine must be connected and have a board."""
        assert self.connection is not None
        reader = self.connection.board()
        assert reader is not None
        return reader

    def _post(self, rows: list[int], now_s: float) -> None:
        if not rows:
            # No row is free, or no request is left.
            self.look_at_s = now_s + _NO_ROOM_S
            return
        try:
            self._look, self._looked_s = self._reader().post(rows), now_s
        except TransferError:
            self._break_off(now_s)

    def _break_off(self, now_s: float) -> None:
        """Break off the connection after a failed look, so that the engine is asked again."""
        assert self.connection is not None
        self._peers.break_off(self.connection, now_s)
        self._reconnect(now_s)

    def _reconnect(self, now_s: float) -> None:
        """Drop the connection, and request another one if requests are left."""
        self.let_go()
        if self.requests:
            self._peers.get_or_connect(self.address, now_s)

# SPDX-License-Identifier: Apache-2.0
"""Requests that a worker receives before the engine that computes their prompts has offered them.

    received  ->  watched on the other engine's board  ->  offered  ->  read like any other request
                      |  last chunk, or a fault: reported to the scheduler

A request is handed on once its offer is known, from the board, and the blocks to fill, from the
scheduler, which allocates them when the last chunk is computed. If there is room it allocates them
earlier, and the computed part is handed on as well. Each worker watches for itself, so that none
waits for another one's step: one small read of each engine at a time, with a pause after it.
Nothing is read into blocks here.

All of this belongs to the connector's thread.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from vllm.logger import init_logger

from ...errors import RemoteEngineChangedError
from ...protocol.board import Record, Sighting, State, board_entry, look_up, read_record
from ...protocol.ids import RequestId
from ...protocol.messages import Receive, RemoteEngineAddress, RemoteRequest
from ...protocol.quoting import one_line, quote
from ...protocol.states import ReadState
from ...protocol.watch import Watch
from ..connecting.peers import Peer, PeerTable
from ..metadata import WorkerNews
from ..stats import ReadFailure
from .abandoned_reads import AbandonedReads
from .watched_engine import WatchedEngine
from .watched_requests import (
    Computed,
    Offered,
    Refusal,
    WantedRecord,
    WatchedRequest,
    with_record,
)

logger = init_logger(__name__)


class EarlyRequests:
    """All requests of a worker that are not offered yet.

    Args:
        peers: The engines that compute them.
        record_wait: Called with the seconds that a request waited until it was offered.

    Attributes:
        ready: Requests to read, or to release at their producer. The caller removes them.
        computed: Requests with a part that can be read already. The caller removes them.
        refused: Requests that have blocks and will not be read. The caller removes them.
        has_moved: True if the last look found a record, whose read will soon be complete.
    """

    def __init__(self, peers: PeerTable, record_wait: Callable[[float], None]) -> None:
        self._peers = peers
        self._record_wait = record_wait
        self._engines: dict[RemoteEngineAddress, WatchedEngine] = {}
        self._at: dict[RequestId, RemoteEngineAddress] = {}
        # Offered requests that have no blocks yet.
        self._offered: dict[RequestId, tuple[WatchedRequest, RemoteEngineAddress, Record]] = {}
        # Why requests without blocks failed; they may have been given some meanwhile.
        self._faults: dict[RequestId, tuple[WatchedRequest, str]] = {}
        # Time of the current poll.
        self._now_s = 0.0
        self._news = WorkerNews()
        self._abandoned = AbandonedReads(peers)
        self._renewed: dict[RequestId, RemoteRequest] = {}
        self.ready: deque[Offered] = deque()
        self.computed: deque[Computed] = deque()
        self.refused: deque[Refusal] = deque()
        self.has_moved = False

    def __len__(self) -> int:
        """Return the number of requests that wait for their offer or for their blocks."""
        return len(self._at) + len(self._offered) + len(self._faults)

    @property
    def is_looking(self) -> bool:
        """True while a look is under way."""
        return any(each.is_looking for each in self._engines.values())

    @property
    def next_due_s(self) -> float:
        """Time of the next action; -inf if one is due, inf without one."""
        if self.ready or self.computed or self.refused or self._news:
            return -math.inf
        due_s = [
            engine.look_at_s if engine.connection else -math.inf
            for address, engine in self._engines.items()
            if engine.connection or self._peers.connected_at(address) == address
        ]
        due_s += [engine.overdue_s for engine in self._engines.values()]
        return min([self._abandoned.next_due_s, *due_s])

    def begin(self, requests: Mapping[RequestId, RemoteRequest], now_s: float) -> None:
        """Watch requests on the boards of the engines that compute them."""
        self._now_s = now_s
        for request_id, request in requests.items():
            if request_id not in self._at:
                there = self._peers.connected_at(request.source) or request.source
                self._put(request_id, WatchedRequest(request.request_id, Watch(now_s)), there)

    def take_over(self, request_id: RequestId, receive: Receive) -> None:
        """Set the blocks of a request; if it needs none, its offer is released once it is seen."""
        if request_id in self._faults:
            watched, fault = self._faults.pop(request_id)
            self._refuse(request_id, watched, receive, fault)
        elif request_id in self._offered:
            watched, address, record = self._offered.pop(request_id)
            if receive.fault is None:
                self._hand_on(request_id, watched, receive, address, record)
            else:
                self._refuse(request_id, watched, receive, receive.fault)
        elif request_id in self._at:
            watched = self._find(request_id)
            watched.receive = receive
            if receive.fault is not None:
                self._drop(request_id)
                self._refuse(request_id, watched, receive, receive.fault)
        else:
            unknown = WatchedRequest(receive.remote_request_id, Watch(self._now_s))
            self._refuse(request_id, unknown, receive, receive.fault or "it is not waited for")

    def give_up(self, request_ids: Iterable[RequestId], reason: str) -> None:
        """Fail requests that are no longer needed; their offers are released once they are seen."""
        for request_id in request_ids:
            self._faults.pop(request_id, None)
            if request_id not in self._at:
                continue
            watched = self._find(request_id)
            if watched.receive is not None:
                self._refuse(request_id, watched, watched.receive, reason, None)
                watched.receive = replace(watched.receive, local_block_ids=())

    def stood_still(self, for_s: float) -> None:
        """Extend deadlines by seconds during which this worker could not look."""
        self._abandoned.stood_still(for_s)
        for engine in self._engines.values():
            engine.stood_still(for_s)

    def on_handshake_failed(self, peer: Peer, error: Exception) -> None:
        """Fail an engine's requests; those not seen yet move to an engine that answered instead."""
        engine = self._engines.get(peer.address)
        if engine is None:
            return
        engine.let_go()
        found = error.found if isinstance(error, RemoteEngineChangedError) else ""
        for request_id, watched in list(engine.requests.items()):
            if found and watched.watch.state is None and found != peer.address.engine_id:
                self._drop(request_id)
                self._put(request_id, watched, replace(peer.address, engine_id=found))
            else:
                self._fail(request_id, watched, f"handshake failed: {one_line(error)}")

    def advance(self, now_s: float) -> None:
        """Start looks that are due, and process those that are complete."""
        self._now_s, self.has_moved = now_s, False
        self._abandoned.advance(now_s)
        for engine in list(self._engines.values()):
            try:
                self._advance(engine, now_s)
            except Exception as error:
                logger.exception(
                    "Requests at %s are not waited for", quote(engine.address.engine_id)
                )
                engine.let_go()
                self._fail_all(engine, f"unforeseen: {one_line(repr(error))}")

    def take_renewed(self) -> dict[RequestId, RemoteRequest]:
        """Return the requests offered since the last call whose leases are to be renewed."""
        renewed, self._renewed = self._renewed, {}
        return renewed

    def take_news(self) -> WorkerNews:
        """Return the news for the scheduler since the last call."""
        news, self._news = self._news, WorkerNews()
        return news

    def _advance(self, engine: WatchedEngine, now_s: float) -> None:
        if now_s >= engine.overdue_s:
            for request_id, watched in list(engine.requests.items()):
                if (fault := watched.watch.overdue(now_s)) is not None:
                    self._fail(request_id, watched, fault)
            due_s = (each.watch.due_s for each in engine.requests.values())
            engine.overdue_s = min(due_s, default=math.inf)
        if not engine.requests and not engine.is_looking:
            del self._engines[engine.address]
            return
        if engine.is_looking:
            self._take(engine, now_s)
        elif now_s >= engine.look_at_s or engine.connection is None:
            fault = engine.look(now_s)
            if fault is not None:
                self._fail_all(engine, fault)

    def _take(self, engine: WatchedEngine, now_s: float) -> None:
        """Process the result of a look if it is complete."""
        rows = engine.take(now_s)
        if rows is None:
            return
        if engine.wanted:
            self._read_records(engine, rows, now_s)
        else:
            self._read_buckets(engine, rows, now_s)
        if not engine.is_looking:
            engine.rest(now_s)

    def _read_buckets(
        self, engine: WatchedEngine, rows: npt.NDArray[np.uint64], now_s: float
    ) -> None:
        """Update requests from their buckets, and start reading the records that are needed."""
        room = engine.num_free
        found: dict[RequestId, WantedRecord] = {}
        asked = [engine.requests.get(each) for each in engine.asked]
        names = [each.entry.name if each else 0 for each in asked]
        for request_id, watched, sighting in zip(
            engine.asked, asked, look_up(rows, names), strict=True
        ):
            if watched is None:
                continue
            watched.has_waited |= sighting.state is not State.OFFERED
            fault = watched.watch.see(sighting.state, now_s)
            if fault is not None:
                self._fail(request_id, watched, fault)
                continue
            if sighting.state is State.LAST_CHUNK:
                watched.enter(ReadState.IN_LAST_CHUNK, request_id, engine.address, now_s)
            elif sighting.num_computed:
                watched.enter(ReadState.IN_PREFILL, request_id, engine.address, now_s)
            self._tell(request_id, watched, sighting)
            if (record := watched.wanted_record(sighting)) is not None:
                found[request_id] = record
        wanted: dict[RequestId, WantedRecord] = {}
        # Offers first.
        for request_id, record in sorted(found.items(), key=lambda each: each[1].num_computed > 0):
            if record.place.num_rows <= room:
                room -= record.place.num_rows
                wanted[request_id] = record
        if wanted:
            self.has_moved = True
            engine.read_records(wanted, now_s)

    def _tell(self, request_id: RequestId, watched: WatchedRequest, sighting: Sighting) -> None:
        """Report that some of a request is computed, or that its wait for blocks is over."""
        has_none = watched.receive is None
        if sighting.num_computed and has_none and not watched.is_begun:
            watched.is_begun = True
            self._news.begun.add(request_id)
        if watched.watch.may_have_blocks and not watched.is_told and (has_none or watched.is_begun):
            watched.is_told = True
            self._news.may_have_blocks.add(request_id)

    def _read_records(
        self, engine: WatchedEngine, rows: npt.NDArray[np.uint64], now_s: float
    ) -> None:
        """Hand on the records read; a later look rereads those that changed during the read."""
        first = 0
        for request_id, (place, num_computed) in engine.wanted.items():
            landed = rows[first : first + place.num_rows]
            first += place.num_rows
            watched = engine.requests.get(request_id)
            record = read_record(landed.tobytes()[: place.size_bytes], place.digest)
            if watched is None or record is None:
                continue
            if num_computed:
                watched.num_computed = num_computed
                if isinstance(record, Record) and watched.receive is not None:
                    part = with_record(watched.receive, engine.address, record)
                    part = replace(part, remote_tokens=record.num_tokens)
                    self.computed.append(Computed(request_id, watched.receive, part))
            elif isinstance(record, str):
                self._fail(request_id, watched, record)
            else:
                self._take_offer(request_id, watched, engine, record, now_s)
        engine.wanted = {}

    def _take_offer(
        self,
        request_id: RequestId,
        watched: WatchedRequest,
        engine: WatchedEngine,
        record: Record,
        now_s: float,
    ) -> None:
        """Process the offer of a request; it is handed on once it has blocks."""
        watched.enter(ReadState.OFFERED, request_id, engine.address, now_s)
        self._drop(request_id)
        if record.first_token is not None:
            self._news.first_tokens[request_id] = record.first_token
        if watched.has_waited:
            self._record_wait(now_s - watched.watch.since_s)
        receive = watched.receive
        if receive is None or any(receive.local_block_ids):
            self._renewed[request_id] = RemoteRequest(engine.address, record.request_id)
        if receive is None:
            self._offered[request_id] = watched, engine.address, record
        else:
            self._hand_on(request_id, watched, receive, engine.address, record)

    def _hand_on(
        self,
        request_id: RequestId,
        watched: WatchedRequest,
        receive: Receive,
        address: RemoteEngineAddress,
        record: Record,
    ) -> None:
        """Hand on a request to be read like any other, since its offer and blocks are known."""
        # `since_s` is when its offer was seen; it may have waited for blocks since.
        self.ready.append(
            Offered(request_id, with_record(receive, address, record), watched.since_s)
        )

    def _fail_all(self, engine: WatchedEngine, reason: str) -> None:
        for request_id, watched in list(engine.requests.items()):
            self._fail(request_id, watched, reason)

    def _fail(self, request_id: RequestId, watched: WatchedRequest, reason: str) -> None:
        logger.debug(
            "Request %s will not be offered by engine %s, after %.1f ms of %s: %s",
            quote(request_id),
            quote(self._at[request_id].engine_id),
            1e3 * (self._now_s - watched.since_s),
            one_line(watched.state.value),
            one_line(reason),
        )
        self._drop(request_id)
        if watched.receive is None:
            self._news.faults[request_id] = reason
            self._faults[request_id] = watched, reason
        else:
            self._refuse(request_id, watched, watched.receive, reason)

    def _refuse(
        self,
        request_id: RequestId,
        watched: WatchedRequest,
        receive: Receive,
        reason: str,
        failure: ReadFailure | None = ReadFailure.PREFILL,
    ) -> None:
        if any(receive.local_block_ids):
            self.refused.append(
                Refusal(request_id, receive, reason, failure, watched.state, watched.since_s)
            )

    def _find(self, request_id: RequestId) -> WatchedRequest:
        return self._engines[self._at[request_id]].requests[request_id]

    def _put(
        self, request_id: RequestId, watched: WatchedRequest, address: RemoteEngineAddress
    ) -> None:
        watched.entry = board_entry(address.engine_id, watched.name)
        if address not in self._engines:
            self._engines[address] = WatchedEngine(address, self._peers, self._abandoned)
        self._engines[address].add(request_id, watched)
        self._at[request_id] = address
        logger.debug(
            "Request %s: %s at engine %s, which knows it as %s.",
            quote(request_id),
            one_line(watched.state.value),
            quote(address.engine_id),
            quote(watched.name),
        )

    def _drop(self, request_id: RequestId) -> None:
        del self._engines[self._at.pop(request_id)].requests[request_id]

# SPDX-License-Identifier: Apache-2.0
"""Requests that a worker hears of before the engine that computes their prompts has offered them.

    asked for  ->  watched on the other engine's board  ->  offered  ->  read like any other request
                      |  last chunk, or a fault: the scheduler hears of it

A request is handed on once two things are known: what is offered, from the board, and the blocks to
fill, from the scheduler, which gives it some when its last chunk is computed. Where there is room,
it has some before, and what is computed so far is handed on as well. Each worker watches for
itself, so that none waits for another one's step: one small read of each engine at a time, and a
rest after it. Nothing is read into blocks here.

All of this belongs to the connector's thread.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from vllm.logger import init_logger

from ..errors import RemoteEngineChangedError, TransferError
from ..protocol.board import (
    Record,
    RecordPlace,
    Sighting,
    State,
    board_entry,
    look_up,
    read_record,
)
from ..protocol.fingerprint import with_blocks
from ..protocol.ids import RequestId
from ..protocol.leases import Entry
from ..protocol.messages import Receive, RemoteEngineAddress, RemoteRequest
from ..protocol.quoting import one_line, quote
from ..protocol.watch import Pace, Watch
from ..transport.board_reader import BoardReader
from ..transport.connection import PeerConnection
from ..transport.row_buffer import RowRead
from .left_looks import LOOK_LIMIT_S, LeftLooks
from .peers import Peer, PeerTable
from .stats import ReadFailure

logger = init_logger(__name__)

_NO_ROOM_S = 0.01
"""When to try again where other looks have taken all rows."""

_LOOK_REQUESTS = 256
"""So many requests are looked at together: what is found takes 0.7 ms to go through, and a thousand
would keep the thread from reads."""


_PARTS_OF_A_PROMPT = 64
"""In so many parts it is read at most while it is computed: each is told of with a record of all
blocks so far, however many of them another engine says there are."""


@dataclass(slots=True)
class _Waiting:
    """A request that is watched.

    Attributes:
        name: The name that both engines have for it.
        watch: What was seen of it.
        entry: What stands for its name on the boards of the engine that computes it.
        receive: What to fill, once the scheduler has said so.
        is_begun: The scheduler has heard that something of it is computed.
        is_told: The scheduler has heard that it may have blocks.
        has_waited: It was not offered at the first look, as it is where a router is serial.
        step_tokens: How many tokens the step of its last chunk computes; 0 until that is known.
        num_computed: How many of its tokens were handed on as computed.
    """

    name: str
    watch: Watch
    entry: Entry = field(init=False)
    receive: Receive | None = None
    is_begun: bool = False
    is_told: bool = False
    has_waited: bool = False
    step_tokens: int = 0
    num_computed: int = 0


class _Sought(NamedTuple):
    """A record that is read.

    Attributes:
        place: Where it lies.
        num_computed: How many tokens are computed of whose blocks it tells; 0 for that of an offer.
    """

    place: RecordPlace
    num_computed: int


class Computed(NamedTuple):
    """A request that has blocks, and of which something is computed.

    Attributes:
        request_id: The request.
        receive: What is to be read of it once it is offered.
        part: What can be read now: as many tokens as it says there are.
    """

    request_id: RequestId
    receive: Receive
    part: Receive


class Refusal(NamedTuple):
    """A request that has blocks, and will not be read.

    Attributes:
        request_id: The request.
        receive: What should have been read.
        reason: Why it is not.
        failure: Of what kind that is; None where it is told elsewhere.
    """

    request_id: RequestId
    receive: Receive
    reason: str
    failure: ReadFailure | None


@dataclass(slots=True)
class _Place:
    """An engine that is watched.

    Attributes:
        waiting: The requests there that are not offered yet, by this engine's ids.
        pace: How fast it was with the last ones, once it was looked at.
        look_at_s: When to look next.
        overdue_s: When some request may be overdue.
        looked_s: When the look began that is under way.
        connection: What that is made with.
        look: That look; None without one.
        asked: The requests whose buckets it is for.
        sought: The records that it is for instead, if any.
    """

    waiting: dict[RequestId, _Waiting] = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace)
    look_at_s: float = 0.0
    overdue_s: float = math.inf
    looked_s: float = 0.0
    connection: PeerConnection | None = None
    look: RowRead | None = None
    asked: list[RequestId] = field(default_factory=list)
    sought: dict[RequestId, _Sought] = field(default_factory=dict)

    @property
    def reader(self) -> BoardReader:
        """What its board is read with, where it is known to be connected, and to have one."""
        assert self.connection is not None
        reader = self.connection.board()
        assert reader is not None
        return reader


@dataclass(slots=True)
class EarlyNews:
    """What the scheduler should hear.

    Attributes:
        begun: Requests of whose prompts something is computed.
        admissible: Requests that are to have blocks now.
        faults: Requests that will not be read, each with the reason.
        first_tokens: The token that is told with the offer of some requests.
    """

    begun: set[RequestId] = field(default_factory=set)
    admissible: set[RequestId] = field(default_factory=set)
    faults: dict[RequestId, str] = field(default_factory=dict)
    first_tokens: dict[RequestId, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.begun or self.admissible or self.faults or self.first_tokens)

    def add(self, later: EarlyNews) -> None:
        """Take in what was seen since."""
        self.begun |= later.begun
        self.admissible |= later.admissible
        self.faults |= later.faults
        self.first_tokens |= later.first_tokens


class EarlyRequests:
    """All requests of a worker that are not offered yet.

    Args:
        peers: The engines that compute them.
        record_wait: Called with the seconds that a request has waited until it was offered.

    Attributes:
        ready: Requests that can be read, or told to their producer. The caller takes them out.
        computed: Requests of which something can be read already. The caller takes them out.
        refused: Those that have blocks, and will not be read. The caller takes them out.
        has_moved: The last look has found a record, which is soon there.
    """

    def __init__(self, peers: PeerTable, record_wait: Callable[[float], None]) -> None:
        self._peers = peers
        self._record_wait = record_wait
        self._places: dict[RemoteEngineAddress, _Place] = {}
        self._at: dict[RequestId, RemoteEngineAddress] = {}
        # Those that are offered, and have no blocks yet.
        self._offered: dict[RequestId, tuple[RemoteEngineAddress, Record]] = {}
        # Why some will not be read that the scheduler may have given blocks meanwhile.
        self._faults: dict[RequestId, str] = {}
        self._news = EarlyNews()
        self._left = LeftLooks(peers)
        self._renewed: dict[RequestId, RemoteRequest] = {}
        self.ready: deque[tuple[RequestId, Receive]] = deque()
        self.computed: deque[Computed] = deque()
        self.refused: deque[Refusal] = deque()
        self.has_moved = False

    def __len__(self) -> int:
        """Requests that are waited for, or for whose blocks is."""
        return len(self._at) + len(self._offered) + len(self._faults)

    @property
    def is_looking(self) -> bool:
        """Whether a look is under way."""
        return any(place.look is not None for place in self._places.values())

    @property
    def next_due_s(self) -> float:
        """When there is something to do next."""
        if self.ready or self.computed or self.refused or self._news:
            return -math.inf
        due_s = [
            place.look_at_s if place.connection else -math.inf
            for address, place in self._places.items()
            if place.connection or self._peers.connected_at(address) == address
        ]
        due_s += [place.overdue_s for place in self._places.values()]
        return min([self._left.next_due_s, *due_s])

    def begin(self, requests: Mapping[RequestId, RemoteRequest], now_s: float) -> None:
        """Watch some requests, under the names that both engines have for them."""
        for request_id, request in requests.items():
            if request_id not in self._at:
                there = self._peers.connected_at(request.source) or request.source
                self._put(request_id, _Waiting(request.request_id, Watch(now_s)), there)

    def take_over(self, request_id: RequestId, receive: Receive) -> None:
        """A request has blocks; or it needs none, and its producer is told once it offers it."""
        fault = self._faults.pop(request_id, None) or receive.fault
        if fault is not None:
            self._offered.pop(request_id, None)
            if request_id in self._at:
                self._drop(request_id)
            self._refuse(request_id, receive, fault, ReadFailure.PREFILL)
        elif request_id in self._offered:
            self._hand_on(request_id, receive, *self._offered.pop(request_id))
        elif request_id in self._at:
            self._find(request_id).receive = receive
        else:
            self._refuse(request_id, receive, "it is not waited for", ReadFailure.PREFILL)

    def give_up(self, request_ids: Iterable[RequestId], reason: str) -> None:
        """Some requests are not wanted any more: they fail, and offers are declined."""
        for request_id in request_ids:
            self._faults.pop(request_id, None)
            if request_id not in self._at:
                continue
            waiting = self._find(request_id)
            if waiting.receive is not None:
                self._refuse(request_id, waiting.receive, reason, None)
                waiting.receive = replace(waiting.receive, local_block_ids=())

    def stood_still(self, for_s: float) -> None:
        """This worker could not look for so many seconds."""
        self._left.stood_still(for_s)
        for place in self._places.values():
            place.looked_s += for_s
            for waiting in place.waiting.values():
                waiting.watch.stood_still(for_s)

    def fail_place(self, peer: Peer, error: Exception) -> None:
        """An engine cannot be connected; where another one answers, new requests are that one's."""
        place = self._places.get(peer.address)
        if place is None:
            return
        self._let_go(place)
        found = error.found if isinstance(error, RemoteEngineChangedError) else ""
        for request_id, waiting in list(place.waiting.items()):
            if found and waiting.watch.state is None and found != peer.address.engine_id:
                self._drop(request_id)
                self._put(request_id, waiting, replace(peer.address, engine_id=found))
            else:
                self._fail(request_id, waiting, f"handshake failed: {one_line(error)}")

    def advance(self, now_s: float) -> None:
        """Look where a look is due, and take note of what was seen."""
        self.has_moved = False
        self._left.advance(now_s)
        for address, place in list(self._places.items()):
            try:
                self._advance(address, place, now_s)
            except Exception as error:
                logger.exception("Requests at %s are not waited for", quote(address.engine_id))
                self._let_go(place)
                for request_id, waiting in list(place.waiting.items()):
                    self._fail(request_id, waiting, f"unforeseen: {one_line(repr(error))}")

    def take_renewed(self) -> dict[RequestId, RemoteRequest]:
        """Requests that wait for blocks of an offer since the last call: its lease is to last."""
        renewed, self._renewed = self._renewed, {}
        return renewed

    def take_news(self) -> EarlyNews:
        """What the scheduler should hear since the last call."""
        news, self._news = self._news, EarlyNews()
        return news

    def _advance(self, address: RemoteEngineAddress, place: _Place, now_s: float) -> None:
        if now_s >= place.overdue_s:
            for request_id, waiting in list(place.waiting.items()):
                if (fault := waiting.watch.overdue(now_s)) is not None:
                    self._fail(request_id, waiting, fault)
            due_s = (each.watch.due_s for each in place.waiting.values())
            place.overdue_s = min(due_s, default=math.inf)
        if not place.waiting and place.look is None:
            del self._places[address]
            return
        if place.look is not None:
            self._take(address, place, now_s)
        elif now_s >= place.look_at_s or place.connection is None:
            self._look(address, place, now_s)

    def _look(self, address: RemoteEngineAddress, place: _Place, now_s: float) -> None:
        """Look at the buckets of requests at an engine, of those first that were not last."""
        peer = self._peers.get_or_connect(address, now_s)
        place.connection, place.pace = peer.connection, peer.pace
        if place.connection is None:
            return
        try:
            reader = place.connection.board()
        except TransferError:
            self._break_off(address, place, now_s)
            return
        if reader is None:
            why = "that engine does not say how far it is: set early_dispatch there, too"
            for request_id, waiting in list(place.waiting.items()):
                self._fail(request_id, waiting, why)
            return
        place.asked = list(islice(place.waiting, min(reader.num_free, _LOOK_REQUESTS)))
        if len(place.asked) < len(place.waiting):
            for request_id in place.asked:
                place.waiting[request_id] = place.waiting.pop(request_id)
        rows = [place.waiting[each].entry.bucket for each in place.asked]
        self._post(address, place, rows, now_s)

    def _take(self, address: RemoteEngineAddress, place: _Place, now_s: float) -> None:
        """Take note of what a look has found, if it is over."""
        assert place.connection is not None and place.look is not None
        if not place.connection.is_connected:
            self._reconnect(address, place, now_s)
            return
        try:
            rows = place.reader.take(place.look)
        except TransferError:
            self._break_off(address, place, now_s)
            return
        if rows is None:
            if now_s >= place.looked_s + LOOK_LIMIT_S:
                self._break_off(address, place, now_s)
            return
        place.look = None
        if place.sought:
            self._read_records(address, place, rows, now_s)
        else:
            self._read_buckets(address, place, rows, now_s)
        if place.look is None:
            left = [place.waiting[each] for each in place.asked if each in place.waiting]
            rests_s = [each.watch.rest_s for each in left]
            place.look_at_s = now_s + min(rests_s, default=0.0)

    def _read_buckets(
        self,
        address: RemoteEngineAddress,
        place: _Place,
        rows: npt.NDArray[np.uint64],
        now_s: float,
    ) -> None:
        """See how far requests are, and read the records of those that are offered."""
        room = place.reader.num_free
        sought: dict[RequestId, _Sought] = {}
        watched = [place.waiting.get(each) for each in place.asked]
        names = [each.entry.name if each else 0 for each in watched]
        for request_id, waiting, sighting in zip(
            place.asked, watched, look_up(rows, names), strict=True
        ):
            if waiting is None:
                continue
            waiting.has_waited |= sighting.state is not State.OFFERED
            if sighting.step_tokens and not waiting.step_tokens:
                waiting.step_tokens = sighting.step_tokens
                waiting.watch.takes_s = place.pace.of(sighting.step_tokens)
            fault = waiting.watch.see(sighting.state, now_s)
            if fault is not None:
                self._fail(request_id, waiting, fault)
                continue
            self._tell(request_id, waiting, sighting)
            if (found := _sought(waiting, sighting)) is not None:
                sought[request_id] = found
        # Those of offers first.
        for request_id, found in sorted(sought.items(), key=lambda each: each[1].num_computed > 0):
            if found.place.num_rows <= room:
                room -= found.place.num_rows
                place.sought[request_id] = found
        if place.sought:
            self.has_moved = True
            wanted = [row for each in place.sought.values() for row in each.place.rows]
            self._post(address, place, wanted, now_s)

    def _tell(self, request_id: RequestId, waiting: _Waiting, sighting: Sighting) -> None:
        """Have the scheduler know of a request that it may give blocks, or that waits no longer."""
        has_none = waiting.receive is None
        if sighting.num_computed and has_none and not waiting.is_begun:
            waiting.is_begun = True
            self._news.begun.add(request_id)
        if waiting.watch.may_have_blocks and not waiting.is_told and (has_none or waiting.is_begun):
            waiting.is_told = True
            self._news.admissible.add(request_id)

    def _read_records(
        self,
        address: RemoteEngineAddress,
        place: _Place,
        rows: npt.NDArray[np.uint64],
        now_s: float,
    ) -> None:
        """Hand on what is offered; what was changed while it was read is looked at again."""
        first = 0
        for request_id, (record_place, num_computed) in place.sought.items():
            landed = rows[first : first + record_place.num_rows]
            first += record_place.num_rows
            waiting = place.waiting.get(request_id)
            data = landed.tobytes()[: record_place.size_bytes]
            record = read_record(data, record_place.digest)
            if waiting is None or record is None:
                continue
            if num_computed:
                waiting.num_computed = num_computed
                if isinstance(record, Record) and waiting.receive is not None:
                    part = _found(waiting.receive, address, record)
                    part = replace(part, remote_tokens=record.num_tokens)
                    self.computed.append(Computed(request_id, waiting.receive, part))
                continue
            if isinstance(record, str):
                self._fail(request_id, waiting, record)
                continue
            self._drop(request_id)
            if record.first_token is not None:
                self._news.first_tokens[request_id] = record.first_token
            if waiting.has_waited:
                self._record_wait(now_s - waiting.watch.since_s)
            if waiting.watch.took_s is not None:
                place.pace.learn(waiting.step_tokens, waiting.watch.took_s)
            receive = waiting.receive
            if receive is None or any(receive.local_block_ids):
                self._renewed[request_id] = RemoteRequest(address, record.request_id)
            if receive is None:
                self._offered[request_id] = address, record
            else:
                self._hand_on(request_id, receive, address, record)
        place.sought = {}

    def _post(
        self, address: RemoteEngineAddress, place: _Place, rows: list[int], now_s: float
    ) -> None:
        if not rows:
            # There is no room, or nobody waits any more.
            place.look_at_s = now_s + _NO_ROOM_S
            return
        try:
            place.look, place.looked_s = place.reader.post(rows), now_s
        except TransferError:
            self._break_off(address, place, now_s)

    def _break_off(self, address: RemoteEngineAddress, place: _Place, now_s: float) -> None:
        """A look has failed: the engine is asked anew, if it is there, and if it is the same."""
        assert place.connection is not None
        self._peers.break_off(place.connection, now_s)
        self._reconnect(address, place, now_s)

    def _reconnect(self, address: RemoteEngineAddress, place: _Place, now_s: float) -> None:
        """Look on once there is another connection."""
        self._let_go(place)
        if place.waiting:
            self._peers.get_or_connect(address, now_s)

    def _let_go(self, place: _Place) -> None:
        """Nobody waits for a place's look any more, or looks over its connection."""
        if place.look is not None and place.connection is not None:
            self._left.add(place.connection, place.look, place.looked_s)
        place.look = place.connection = None
        place.sought = {}

    def _hand_on(
        self,
        request_id: RequestId,
        receive: Receive,
        address: RemoteEngineAddress,
        record: Record,
    ) -> None:
        """A request is one like any other from now on: what is to be read, and where, is known."""
        self.ready.append((request_id, _found(receive, address, record)))

    def _fail(self, request_id: RequestId, waiting: _Waiting, reason: str) -> None:
        self._drop(request_id)
        if waiting.receive is None:
            self._news.faults[request_id] = self._faults[request_id] = reason
        else:
            self._refuse(request_id, waiting.receive, reason, ReadFailure.PREFILL)

    def _refuse(
        self, request_id: RequestId, receive: Receive, reason: str, failure: ReadFailure | None
    ) -> None:
        if any(receive.local_block_ids):
            self.refused.append(Refusal(request_id, receive, reason, failure))

    def _find(self, request_id: RequestId) -> _Waiting:
        return self._places[self._at[request_id]].waiting[request_id]

    def _put(self, request_id: RequestId, waiting: _Waiting, address: RemoteEngineAddress) -> None:
        waiting.entry = board_entry(address.engine_id, waiting.name)
        place = self._places.setdefault(address, _Place())
        place.waiting[request_id] = waiting
        place.look_at_s = 0.0
        place.overdue_s = min(place.overdue_s, waiting.watch.due_s)
        self._at[request_id] = address

    def _drop(self, request_id: RequestId) -> None:
        del self._places[self._at.pop(request_id)].waiting[request_id]


def _sought(waiting: _Waiting, sighting: Sighting) -> _Sought | None:
    """Which record of a request is to be read: that of its offer, or of what is computed anew."""
    if sighting.offered is not None:
        return _Sought(sighting.offered, 0)
    receive = waiting.receive
    if sighting.computed is None or receive is None or not any(receive.local_block_ids):
        return None
    part_tokens = -(-receive.remote_tokens // _PARTS_OF_A_PROMPT)
    if sighting.num_computed < waiting.num_computed + part_tokens:
        return None
    return _Sought(sighting.computed, sighting.num_computed)


def _found(receive: Receive, address: RemoteEngineAddress, record: Record) -> Receive:
    """A request, with what its source says of it."""
    blocks = record.blocks()
    return replace(
        receive,
        source=address,
        remote_request_id=record.request_id,
        remote_block_ids=blocks,
        fingerprint=receive.fingerprint and with_blocks(receive.fingerprint, blocks),
        is_early=False,
        attempt=record.attempt,
    )

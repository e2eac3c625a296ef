# SPDX-License-Identifier: Apache-2.0
"""The table of a worker's peers: when to shake hands, when to retry, when to forget one.

    wanted -> asked (another thread) -> connected, worker by worker -> retired -> closed

Peers without pending work cost a poll nothing: the table keeps peers with pending work apart, and
records when it must next look at the rest.

The table belongs to the connector's thread, as do the lanes over which it connects peers. Results
from other threads arrive through futures.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from ...errors import TransferError
from ...protocol.ids import RequestId
from ...protocol.messages import RemoteEngineAddress
from ...protocol.tasks import Task, Tasks, suspended
from ...transport.connection import PeerConnection
from ...transport.lane import Lane, Lanes
from ...transport.limits import within_limit
from ...transport.remote import LoweredEngine

#: interval first retry: a peer whose handshake has failed may be asked again. Each failure doubles
#: the time. When a connection breaks for the first time, the peer is asked again at once.
FIRST_RETRY_S = 1.0
#: interval last retry: a peer that has failed many handshakes may be asked again.
LAST_RETRY_S = 30.0

#: interval suspicion: a peer whose connection broke leaves the lane of the suspected.
STEADY_S = 60.0
"""A peer whose reads have not failed for this long is no longer a suspect."""

FILES_PER_CONNECTION = 10
"""File descriptors of a connection with four UCX threads (nixl 1.5.1 over TCP). The bounds below
are lowered where so many are more than a share of this process's limit."""

MAX_CONNECTIONS = 32
"""Above this number, lanes unused for `IDLE_LANE_S` are renewed: each connection holds 2 file
descriptors, and 10 with four UCX threads (nixl 1.5.1 over TCP), which are freed only with the
agent. A renewed lane's peers reconnect when next requested, which takes NIXL 1 to 4 ms."""

#: interval idle lane: the agent of a lane that nothing was wanted of is closed, if there are more
#: than 32 connections.
IDLE_LANE_S = 10.0
"""Longer than the pauses between requests to an engine in use, so that none keeps reconnecting."""

MAX_PEERS = 512
"""Maximum peers in the table, not counting peers with work under way. Above it, the peer that was
requested least recently is forgotten."""

MAX_UNPROVEN = 32
"""Maximum peers without a successful read yet: clients may name any number of ports."""

MAX_DEAD_CONNECTIONS = 64
"""Maximum closed connections whose file descriptors open lanes still hold. Above it, the lane with
most of them is renewed, even if it is in use."""

_LOOK_AGAIN_S = 1.0
"""Delay before checking again whether a peer that is due to be forgotten has become idle."""

Dial = Callable[[RemoteEngineAddress], Future[LoweredEngine]]
"""Asks an engine for its layout and plans what to read from it; does not block."""

Connect = Callable[[Lane, LoweredEngine], PeerConnection]
"""Makes a connection over a lane; its workers are not connected yet."""


@dataclass(slots=True, eq=False)
class Turn:
    """A place in the queue of a peer.

    Attributes:
        task: What waits for its turn.
        request_id: The request to read; None where producers are only told something.
        connection: The connection to use; None before its turn.
        is_over: Whether its task waits no more.
    """

    task: Task
    request_id: RequestId | None
    connection: PeerConnection | None = None
    is_over: bool = False


@dataclass(slots=True, eq=False)
class Peer:
    """Another engine, from the first request for it.

    Attributes:
        address: Its address and engine id.
        last_wanted_s: When it was last requested with `get_or_connect`.
        wanted: True if it was requested since the last handshake began.
        broken: True if a read or a handshake has failed, or another engine is now at its address;
            it is then asked again on the next request.
        is_opening: True while it is being asked or connected.
        handshake: The pending answer; None while it is not being asked.
        lowered: Its lowered answer; None before it has answered, and once it is broken.
        connecting: The connection whose workers are being connected; None without one.
        connection: The connection to read with; None while it is not connected.
        retired: The previous connection, until a new one replaces it; None without one.
        began_s: When the last handshake began.
        waiting: Those that wait until it is connected, and for their turns.
        failures: Number of consecutive failed handshakes.
        breaks: Number of consecutive connections that broke before `STEADY_S` had passed.
        retry_at_s: When the next handshake may begin.
        suspect_until_s: Until when it counts as likely to break again. A broken peer is kept that
            long, unless the table is full.
        is_proven: True if a request was read from it and passed all checks.
    """

    address: RemoteEngineAddress
    last_wanted_s: float
    wanted: bool = True
    broken: bool = False
    is_opening: bool = False
    handshake: Future[LoweredEngine] | None = None
    lowered: LoweredEngine | None = None
    connecting: PeerConnection | None = None
    connection: PeerConnection | None = None
    retired: PeerConnection | None = None
    began_s: float = 0.0
    waiting: deque[Turn] = field(default_factory=deque)
    failures: int = 0
    breaks: int = 0
    retry_at_s: float = 0.0
    suspect_until_s: float = 0.0
    is_proven: bool = False

    @property
    def is_idle(self) -> bool:
        """True if no handshake, waiting request or read is under way."""
        if self.waiting or self.is_opening:
            return False
        return self.connection is None or self.connection.is_drained

    @property
    def has_news(self) -> bool:
        """True if it is to be connected, is being connected, or has requests waiting."""
        return bool(self.is_opening or self.waiting or (self.connection is None and self.wanted))

    async def turn(self, tasks: Tasks, request_id: RequestId | None = None) -> PeerConnection:
        """Have the current task wait until it is connected, and for its turn.

        Args:
            tasks: The tasks of this thread.
            request_id: The request to read; None where producers are only told something.

        Returns:
            The connection to use.
        """
        assert tasks.current is not None
        turn = Turn(tasks.current, request_id)
        self.waiting.append(turn)
        try:
            while turn.connection is None:
                await suspended()
            return turn.connection
        finally:
            turn.is_over = True

    def is_suspect(self, now_s: float) -> bool:
        """Return whether it broke recently."""
        return now_s < self.suspect_until_s

    def over_at_s(self, idle_limit_s: float) -> float:
        """Return when it may be forgotten if idle: unused for long, or broken and not requested."""
        if self.broken and not self.wanted:
            return max(self.retry_at_s, self.suspect_until_s)
        return self.last_wanted_s + idle_limit_s


class PeerTable:
    """All peers of a worker, by address and engine id.

    A request's address of an engine may be wrong: another address for the same id, or another id at
    the same address, is a separate peer until it has answered.

    Args:
        dial: Asks an engine for its layout.
        connect: Makes a connection over a lane.
        lanes: Lanes over which peers are connected.
        idle_limit_s: Seconds without a request after which a peer is forgotten; 0 or less for
            never.
        awaited: Returns the engines that hold blocks for waiting requests. `MAX_PEERS` and
            `MAX_UNPROVEN` do not have these forgotten.

    Attributes:
        broken: Connections that broke, over which nothing more is to be posted; the transfer engine
            takes them out.
        looking: Connections whose lease tables are looked up in; `ConsumerSide` advances them.
    """

    def __init__(
        self,
        dial: Dial,
        connect: Connect,
        lanes: Lanes,
        idle_limit_s: float,
        awaited: Callable[[], Collection[RemoteEngineAddress]] = tuple,
    ) -> None:
        self.lanes = lanes
        self._awaited = awaited
        self._dial = dial
        self._connect = connect
        self._idle_limit_s = idle_limit_s if idle_limit_s > 0 else math.inf
        self._peers: dict[RemoteEngineAddress, Peer] = {}
        # Peers with `has_news`, in the order in which they were added.
        self._active: dict[RemoteEngineAddress, Peer] = {}
        # No peer may be forgotten before this.
        self._sweep_at_s = math.inf
        # Draining connections of open lanes.
        self._retired: list[PeerConnection] = []
        self.broken: deque[PeerConnection] = deque()
        self.looking: dict[PeerConnection, None] = {}
        self._handshakes: list[tuple[RemoteEngineAddress, LoweredEngine, float]] = []
        self._news: list[tuple[Peer, Exception | None]] = []

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers.values())

    @property
    def retired(self) -> tuple[PeerConnection, ...]:
        """Draining connections, including those of retired lanes."""
        return (
            *self._retired,
            *(each for lane in self.lanes.draining for each in lane.connections),
        )

    @property
    def is_connecting(self) -> bool:
        """True if another poll would connect a further worker."""
        return any(peer.connecting is not None for peer in self._active.values())

    @property
    def next_due_s(self) -> float:
        """When the table must be polled next, even if nothing happens until then."""
        retries = (
            peer.retry_at_s
            for peer in self._active.values()
            if peer.connection is None and not peer.is_opening
        )
        waits_for_lane = any(
            peer.is_opening and peer.handshake is None and peer.connecting is None
            for peer in self._active.values()
        )
        lane_s = self.lanes.next_try_s if waits_for_lane else math.inf
        drained = [each.lifetime.retired_at_s or 0.0 for each in self._retired if each.is_drained]
        return min(*retries, *drained, lane_s, self._sweep_at_s, self.lanes.next_due_s, math.inf)

    def get_or_connect(self, address: RemoteEngineAddress, now_s: float) -> Peer:
        """Return the peer at an address, adding it if needed, and request a connection to it."""
        peer = self._peers.get(address)
        if peer is None:
            self._make_room(now_s)
            peer = self._peers[address] = Peer(address, now_s)
            self._sweep_by(now_s + self._idle_limit_s)
        peer.last_wanted_s = now_s
        peer.wanted = True
        self._active[address] = peer
        return peer

    def advance(self, now_s: float) -> list[tuple[Peer, Exception | None]]:
        """Advance handshakes, connect one worker of each opening peer, and forget unused peers.

        Returns:
            Connected peers with waiting requests, each with None, and peers with a failed
            handshake, each with the reason.
        """
        if now_s >= self._sweep_at_s:
            self._sweep(now_s)
        for peer in list(self._active.values()):
            try:
                self._advance(peer, now_s)
            except Exception as error:
                # Any error fails this peer's handshake, and nothing else.
                self._news.append((peer, error))
                self._fail_handshake(peer, now_s)
                continue
            if peer.connection is not None and peer.waiting:
                self._news.append((peer, None))
            if not peer.has_news:
                del self._active[peer.address]
        news, self._news = self._news, []
        return news

    def break_off(self, connection: PeerConnection, now_s: float) -> None:
        """Retire the lane of a connection whose read has failed or hangs; new reads use another.

        After a first break, the peer may be asked again at once: it may have lost a connection or
        restarted. A peer that keeps answering handshakes but cannot be read from is asked at
        growing intervals. The lane's other peers reconnect when next requested.
        """
        if connection.is_connected:
            self._give_up(connection, now_s)
            self._retire_lane(connection.lane, now_s)

    def distrust(self, connection: PeerConnection, now_s: float) -> None:
        """Retire a connection over which wrong bytes have arrived; its peer has to be asked anew.

        Its lane has done as it was told.
        """
        if connection.is_connected and (peer := self._give_up(connection, now_s)) is not None:
            peer.is_proven = False

    def take_handshakes(self) -> list[tuple[RemoteEngineAddress, LoweredEngine, float]]:
        """Return the peers connected since the last call, and each handshake's seconds."""
        handshakes, self._handshakes = self._handshakes, []
        return handshakes

    def take_drained(self) -> list[PeerConnection]:
        """Return the drained connections of open lanes, which can be closed without their lane."""
        drained = [each for each in self._retired if each.is_drained]
        self._retired = [each for each in self._retired if each not in drained]
        return drained

    def close(self, now_s: float) -> list[Lane]:
        """Forget all peers; return all lanes, for the caller to close."""
        for peer in self._peers.values():
            if peer.handshake is not None:
                peer.handshake.cancel()
        self._peers.clear()
        self._active.clear()
        self._retired.clear()
        return self.lanes.close(now_s)

    def _advance(self, peer: Peer, now_s: float) -> None:
        """Take the next step towards a connection with a peer.

        Raises:
            Exception: The peer's handshake has failed.
        """
        if not peer.is_opening and (
            peer.connection is None and peer.wanted and now_s >= peer.retry_at_s
        ):
            peer.is_opening, peer.wanted, peer.began_s = True, False, now_s
        if not peer.is_opening:
            return
        if peer.lowered is None and peer.handshake is None:
            peer.handshake = self._dial(peer.address)
        if peer.handshake is not None:
            if not peer.handshake.done():
                return
            handshake, peer.handshake = peer.handshake, None
            peer.lowered = handshake.result()
        assert peer.lowered is not None
        if peer.connecting is None:
            self._shed_dead(now_s)
            lane = self.lanes.pick(
                now_s, is_proven=peer.is_proven, is_suspect=peer.is_suspect(now_s)
            )
            if lane is None:
                return
            peer.connecting = self._connect(lane, peer.lowered)
        if peer.connecting.connect_next():
            peer.connection, peer.connecting = peer.connecting, None
            peer.is_opening = False
            self._handshakes.append((peer.address, peer.lowered, now_s - peer.began_s))
            self._note_connected(peer, now_s)

    def _note_connected(self, peer: Peer, now_s: float) -> None:
        peer.failures, peer.broken, peer.retired = 0, False, None
        if self._has_too_many_connections:
            self._sweep_by(now_s + IDLE_LANE_S)
        for other in self._peers.values():
            at_its_place = (other.address.host, other.address.port) == (
                peer.address.host,
                peer.address.port,
            )
            if at_its_place and other is not peer:
                # The engine has restarted under a new id.
                other.broken, other.lowered = True, None
                self._stop_connecting(other, now_s)
                if other.connection is not None:
                    self.broken.append(other.connection)
                self._retire(other, now_s)
                self._sweep_by(now_s)

    def _give_up(self, connection: PeerConnection, now_s: float) -> Peer | None:
        """Have nothing more begun over a connection; return its peer, unless it is forgotten."""
        its = (
            each for each in self._peers.values() if connection in (each.connection, each.retired)
        )
        peer = next(its, None)
        # This runs for each request of a broken connection; note the break once.
        if peer is not None and not peer.broken:
            self._note_break(peer, now_s)
        if connection not in self.broken:
            self.broken.append(connection)
        return peer

    def _fail_handshake(self, peer: Peer, now_s: float) -> None:
        peer.failures += 1
        peer.is_opening = False
        # Requests and renewals that requested the peer meanwhile fail with this handshake.
        peer.wanted = False
        peer.retry_at_s = now_s + _back_off_s(peer.failures)
        peer.broken, peer.lowered = True, None
        self._stop_connecting(peer, now_s)
        self._sweep_by(peer.retry_at_s)

    def _stop_connecting(self, peer: Peer, now_s: float) -> None:
        """Retire a connection that is still being made: its peer has changed or failed."""
        if (connecting := peer.connecting) is not None:
            connecting.lifetime.retire(now_s)
            self._retired.append(connecting)
            peer.connecting = None

    def _note_break(self, peer: Peer, now_s: float) -> None:
        """Have a peer asked again, and mark it as a suspect, after a failed read."""
        self._retire(peer, now_s)
        self._stop_connecting(peer, now_s)
        peer.broken, peer.lowered = True, None
        if not peer.is_suspect(now_s):
            peer.breaks = 0
        peer.retry_at_s = now_s + (_back_off_s(peer.breaks) if peer.breaks else 0.0)
        peer.suspect_until_s = peer.retry_at_s + STEADY_S
        peer.breaks += 1
        self._sweep_by(peer.suspect_until_s)

    def _retire_lane(self, lane: Lane, now_s: float) -> None:
        """Retire a lane and all its connections; does nothing if the lane is already retired."""
        if lane.is_retired:
            return
        for peer in self._peers.values():
            if peer.connection is not None and peer.connection.lane is lane:
                self._retire(peer, now_s)
            elif peer.connecting is not None and peer.connecting.lane is lane:
                peer.connecting = None
        for each in lane.connections:
            each.lifetime.retire(now_s)
        # Last: after this, a second call returns early, and would not retire the rest.
        self.lanes.retire(lane, now_s)
        self._retired = [each for each in self._retired if not each.lane.is_retired]

    def _retire(self, peer: Peer, now_s: float) -> None:
        """Retire a peer's connection, so that its reads in flight drain."""
        if peer.connection is not None:
            peer.connection.lifetime.retire(now_s)
            if not peer.connection.lane.is_retired:
                self._retired.append(peer.connection)
            peer.connection, peer.retired = None, peer.connection
            if peer.waiting:
                # These requests are read over the next connection.
                peer.wanted = True
                self._active[peer.address] = peer

    def _sweep(self, now_s: float) -> None:
        """Forget idle peers that are due, and set the time of the next sweep."""
        next_s = math.inf
        for peer in list(self._peers.values()):
            over_at_s = peer.over_at_s(self._idle_limit_s)
            if now_s < over_at_s:
                next_s = min(next_s, over_at_s)
            elif not peer.is_idle:
                next_s = min(next_s, now_s + _LOOK_AGAIN_S)
            else:
                self._forget(peer, now_s)
        self._sweep_at_s = next_s
        if self._has_too_many_connections:
            self._renew_lanes(now_s)

    def _make_room(self, now_s: float) -> None:
        """Forget a peer if the table is full."""
        unproven = [peer for peer in self._peers.values() if not peer.is_proven]
        if len(self._peers) >= within_limit(MAX_PEERS, 1 / 2, FILES_PER_CONNECTION):
            crowd = list(self._peers.values())
        elif len(unproven) >= within_limit(MAX_UNPROVEN, 1 / 8, FILES_PER_CONNECTION):
            crowd = unproven
        else:
            return
        awaited = self._awaited()
        idle = (
            peer
            for peer in crowd
            if peer.is_idle and not peer.has_news and peer.address not in awaited
        )

        def order(peer: Peer) -> tuple[bool, float]:
            # Keep a peer that has just failed until its retry delay is over.
            return now_s < max(peer.retry_at_s, peer.suspect_until_s), peer.last_wanted_s

        if (first := min(idle, key=order, default=None)) is not None:
            self._forget(first, now_s)

    def _forget(self, peer: Peer, now_s: float) -> None:
        """Remove an idle peer from the table."""
        self._retire(peer, now_s)
        del self._peers[peer.address]
        self._active.pop(peer.address, None)

    def _shed_dead(self, now_s: float) -> None:
        """Renew a lane if open lanes hold file descriptors for too many closed connections.

        Open connections do not count: renewing a lane for them would free nothing, as its peers
        would reconnect.
        """
        dead = {lane: lane.num_made - len(lane.connections) for lane in self.lanes.ready}
        if sum(dead.values()) > within_limit(MAX_DEAD_CONNECTIONS, 1 / 8, FILES_PER_CONNECTION):
            self._retire_lane(max(dead, key=dead.__getitem__), now_s)

    @property
    def _has_too_many_connections(self) -> bool:
        bound = within_limit(MAX_CONNECTIONS, 1 / 4, FILES_PER_CONNECTION)
        return sum(lane.num_made for lane in self.lanes.ready) > bound

    def _renew_lanes(self, now_s: float) -> None:
        """Free file descriptors: renew idle lanes, the one unused for longest first."""
        wanted_s: dict[Lane, float] = {}
        for peer in self._peers.values():
            for each in (peer.connection, peer.connecting):
                if each is not None:
                    wanted_s[each.lane] = max(wanted_s.get(each.lane, 0.0), peer.last_wanted_s)
        for lane in sorted(self.lanes.ready, key=lambda lane: wanted_s.get(lane, 0.0)):
            is_idle = lane.is_drained and now_s >= wanted_s.get(lane, 0.0) + IDLE_LANE_S
            if is_idle and lane.num_made and self._has_too_many_connections:
                self._retire_lane(lane, now_s)
        with suppress(TransferError):
            # A lane that cannot be made is tried again later.
            self.lanes.prepare(now_s)
        if self._has_too_many_connections:
            self._sweep_by(now_s + IDLE_LANE_S)

    def _sweep_by(self, at_s: float) -> None:
        """Have the table swept by this time."""
        self._sweep_at_s = min(self._sweep_at_s, at_s)


def _back_off_s(failures: int) -> float:
    """Return the delay after this many failures, at least 1."""
    # The limit on doublings avoids an overflow; `LAST_RETRY_S` is reached long before.
    return min(FIRST_RETRY_S * 2.0 ** min(failures - 1, 16), LAST_RETRY_S)

# SPDX-License-Identifier: Apache-2.0
"""The engines that a worker knows: when to shake hands, when to try again, when to forget.

    wanted -> asked (another thread) -> connected, worker by worker -> retired -> closed

A poll costs nothing for peers with which nothing is to be done: the table keeps those apart with
which something is, and knows when it has to look at the others.

The table belongs to the connector's thread, as do the lanes that it connects peers over. What other
threads find out comes back through futures.
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
from ...protocol.messages import Receive, RemoteEngineAddress
from ...protocol.watch import Pace
from ...transport.connection import PeerConnection
from ...transport.lane import Lane, Lanes
from ...transport.remote import LoweredEngine

FIRST_RETRY_S, LAST_RETRY_S = 1.0, 30.0
"""How long after a first failure the next handshake may begin, and after many."""

STEADY_S = 60.0
"""A peer whose reads have not failed for this long is no suspect any more."""

MAX_CONNECTIONS = 32
"""Beyond as many, lanes are renewed that nothing was wanted of for `IDLE_LANE_S`: each connection
holds 2 file descriptors, and 10 with four UCX threads (nixl 1.5.1 over TCP), which come back with
the agent alone. Its peers are connected anew when they are wanted, which takes NIXL 1 to 4 ms."""

IDLE_LANE_S = 10.0
"""Longer than engines that are in use are not wanted, so that none reconnects again and again."""

MAX_PEERS = 512
"""Engines that are known, but for those with which something is under way. Beyond as many, the one
that was not wanted for longest is forgotten."""

MAX_UNPROVEN = 32
"""As many of them have never given a good read: clients may name any number of ports."""

MAX_DEAD_CONNECTIONS = 64
"""Connections that are closed, and that open lanes still hold descriptors for. Beyond as many, the
lane with most of them is renewed, though it may be in use."""

_LOOK_AGAIN_S = 1.0
"""A peer that was not wanted for long, and that is read from all the same, is looked at again after
this."""

Ask = Callable[[RemoteEngineAddress], Future[LoweredEngine]]
"""Asks an engine for its layout, and plans what to read from it; blocks on nothing."""

Connect = Callable[[Lane, LoweredEngine], PeerConnection]
"""Makes a connection over a lane, none of whose workers are connected yet."""


@dataclass(slots=True, eq=False)
class Peer:
    """Another engine, from the first time that it is wanted.

    Attributes:
        address: Where it listens.
        last_wanted_s: When it was last asked for.
        wanted: It was asked for since the last handshake began.
        broken: A read or a handshake has failed, or another engine has its address: it is asked
            anew when it is wanted next.
        is_opening: It is being asked or connected.
        handshake: The question that is under way.
        lowered: What it has answered, as long as it is not broken.
        connecting: The connection whose workers are being connected.
        connection: What to read with, while it is connected.
        retired: The connection before, as long as none has taken its place.
        began_s: When the last handshake began.
        waiting: Requests to begin once it is connected.
        failures: Handshakes that failed one after another.
        breaks: Connections that broke one after another, none of which stayed whole for long.
        retry_at_s: When the next handshake may begin.
        suspect_until_s: Until then it is suspected of breaking again, and not forgotten.
        is_proven: A request was read from it, and what was read was what it had to be.
        pace: How fast it computes prompts that are waited for.
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
    waiting: deque[tuple[RequestId, Receive]] = field(default_factory=deque)
    failures: int = 0
    breaks: int = 0
    retry_at_s: float = 0.0
    suspect_until_s: float = 0.0
    is_proven: bool = False
    pace: Pace = field(default_factory=Pace)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way with it."""
        if self.waiting or self.is_opening:
            return False
        return self.connection is None or self.connection.is_drained

    @property
    def has_news(self) -> bool:
        """Whether it is to be connected, is being, or has requests waiting."""
        return bool(self.is_opening or self.waiting or (self.connection is None and self.wanted))

    def is_suspect(self, now_s: float) -> bool:
        """Whether it broke a short while ago."""
        return now_s < self.suspect_until_s

    def over_at_s(self, idle_limit_s: float) -> float:
        """When it may be forgotten, if it is idle: unused for long, or broken and not wanted."""
        if self.broken and not self.wanted:
            return max(self.retry_at_s, self.suspect_until_s)
        return self.last_wanted_s + idle_limit_s


class PeerTable:
    """All engines that a worker knows, by their address and id.

    What a request says of an engine may be wrong: another address for the same id, or another id at
    the same address, is a peer of its own until it has answered.

    Args:
        ask: Asks an engine.
        connect: Connects it over a lane.
        lanes: What peers are connected over.
        idle_limit_s: An engine that was not wanted for this long is forgotten; none ever is if this
            is not above 0.
        awaited: The engines that hold what requests wait for: they are not forgotten.

    Attributes:
        broken: The connections that broke, over which nothing more is to be posted. Whoever sees to
            that takes them out.
    """

    def __init__(
        self,
        ask: Ask,
        connect: Connect,
        lanes: Lanes,
        idle_limit_s: float,
        awaited: Callable[[], Collection[RemoteEngineAddress]] = tuple,
    ) -> None:
        self.lanes = lanes
        self._awaited = awaited
        self._ask = ask
        self._connect = connect
        self._idle_limit_s = idle_limit_s if idle_limit_s > 0 else math.inf
        self._peers: dict[RemoteEngineAddress, Peer] = {}
        # Those that have news, in the order in which they first had some.
        self._active: dict[RemoteEngineAddress, Peer] = {}
        # No peer is over before.
        self._sweep_at_s = math.inf
        # Those of open lanes that drain.
        self._retired: list[PeerConnection] = []
        self.broken: deque[PeerConnection] = deque()
        self._handshakes: list[tuple[RemoteEngineAddress, LoweredEngine, float]] = []
        self._news: list[tuple[Peer, Exception | None]] = []

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers.values())

    @property
    def retired(self) -> tuple[PeerConnection, ...]:
        """Connections that drain, those of retired lanes among them."""
        return (
            *self._retired,
            *(each for lane in self.lanes.draining for each in lane.connections),
        )

    @property
    def is_connecting(self) -> bool:
        """Whether a poll soon would connect another worker."""
        return any(peer.connecting is not None for peer in self._active.values())

    @property
    def next_due_s(self) -> float:
        """When the table is to be looked at next, though nothing happens until then."""
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
        """The engine at an address; from now on it is in use."""
        peer = self._peers.get(address)
        if peer is None:
            self._make_room(now_s)
            peer = self._peers[address] = Peer(address, now_s)
            self._sweep_by(now_s + self._idle_limit_s)
        peer.last_wanted_s = now_s
        peer.wanted = True
        self._active[address] = peer
        return peer

    def connected_at(self, address: RemoteEngineAddress) -> RemoteEngineAddress | None:
        """The engine that is connected at a host and port, whatever its id; None without one."""
        for known in (address, *self._peers):
            peer = self._peers.get(known)
            at_its_place = (known.host, known.port) == (address.host, address.port)
            if at_its_place and peer is not None and peer.connection is not None:
                return known
        return None

    def advance(self, now_s: float) -> list[tuple[Peer, Exception | None]]:
        """Begin and end handshakes, connect a worker of each peer, and forget peers that are gone.

        Returns:
            Peers for which requests wait that can begin now, each with None, and peers whose
            handshake has failed, each with the reason.
        """
        if now_s >= self._sweep_at_s:
            self._sweep(now_s)
        for peer in list(self._active.values()):
            try:
                self._advance(peer, now_s)
            except Exception as error:
                # Whatever it is, it is this peer's handshake that has failed, and nothing else.
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
        """A read has failed or hangs: its lane is retired, and new reads begin beside it.

        The peer may be asked again at once the first time, as it may have lost a connection or have
        restarted. One that answers handshakes and cannot be read from, again and again, is asked
        ever more rarely. The lane's other peers are connected anew when they are wanted next.
        """
        if not connection.is_connected:
            return
        its = (
            each for each in self._peers.values() if connection in (each.connection, each.retired)
        )
        peer = next(its, None)
        # Each request of a broken one comes by here.
        if peer is not None and not peer.broken:
            self._note_break(peer, now_s)
        if connection not in self.broken:
            self.broken.append(connection)
        self._retire_lane(connection.lane, now_s)

    def take_handshakes(self) -> list[tuple[RemoteEngineAddress, LoweredEngine, float]]:
        """What was connected since the last call, and how many seconds each took."""
        handshakes, self._handshakes = self._handshakes, []
        return handshakes

    def take_drained(self) -> list[PeerConnection]:
        """Retired connections of open lanes that can be closed by themselves."""
        drained = [each for each in self._retired if each.is_drained]
        self._retired = [each for each in self._retired if each not in drained]
        return drained

    def close(self, now_s: float) -> list[Lane]:
        """Forget all engines; returns all lanes, which are to be closed."""
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
            Exception: Its handshake has failed.
        """
        if not peer.is_opening and (
            peer.connection is None and peer.wanted and now_s >= peer.retry_at_s
        ):
            peer.is_opening, peer.wanted, peer.began_s = True, False, now_s
        if not peer.is_opening:
            return
        if peer.lowered is None and peer.handshake is None:
            peer.handshake = self._ask(peer.address)
        if peer.handshake is not None:
            if not peer.handshake.done():
                return
            handshake, peer.handshake = peer.handshake, None
            peer.lowered = handshake.result()
        assert peer.lowered is not None
        if peer.connecting is None:
            self._shed_dead(now_s)
            lane = self.lanes.pick(now_s, is_suspect=peer.is_suspect(now_s))
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
                # It has restarted under a new id.
                other.broken, other.lowered = True, None
                self._stop_connecting(other, now_s)
                if other.connection is not None:
                    self.broken.append(other.connection)
                self._retire(other, now_s)
                self._sweep_by(now_s)

    def _fail_handshake(self, peer: Peer, now_s: float) -> None:
        peer.failures += 1
        peer.is_opening = False
        # What asked meanwhile, as heartbeats do, asked for requests that fail with it.
        peer.wanted = False
        peer.retry_at_s = now_s + _back_off_s(peer.failures)
        peer.broken, peer.lowered = True, None
        self._stop_connecting(peer, now_s)
        self._sweep_by(peer.retry_at_s)

    def _stop_connecting(self, peer: Peer, now_s: float) -> None:
        """Give back what of a peer is connected already: it is not what it was."""
        if (connecting := peer.connecting) is not None:
            connecting.lifetime.retire(now_s)
            self._retired.append(connecting)
            peer.connecting = None

    def _note_break(self, peer: Peer, now_s: float) -> None:
        """A peer cannot be read from: ask it anew, and keep it from the others for a while."""
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
        """Begin nothing more over a lane; a second time changes nothing."""
        if not lane.is_open:
            return
        for peer in self._peers.values():
            if peer.connection is not None and peer.connection.lane is lane:
                self._retire(peer, now_s)
            elif peer.connecting is not None and peer.connecting.lane is lane:
                peer.connecting = None
        for each in lane.connections:
            each.lifetime.retire(now_s)
        # Last: what was left out before would never be retired.
        self.lanes.retire(lane, now_s)
        self._retired = [each for each in self._retired if each.lane.is_open]

    def _retire(self, peer: Peer, now_s: float) -> None:
        """Let what is in flight from a peer drain."""
        if peer.connection is not None:
            peer.connection.lifetime.retire(now_s)
            if peer.connection.lane.is_open:
                self._retired.append(peer.connection)
            peer.connection, peer.retired = None, peer.connection
            if peer.waiting:
                # They are read with the next one.
                peer.wanted = True
                self._active[peer.address] = peer

    def _sweep(self, now_s: float) -> None:
        """Forget peers that are over, and note when the next one may be."""
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
        """Forget an engine for one more, where too many are known."""
        unproven = [peer for peer in self._peers.values() if not peer.is_proven]
        if len(self._peers) >= MAX_PEERS:
            crowd = list(self._peers.values())
        elif len(unproven) >= MAX_UNPROVEN:
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
            # One that has just failed is remembered for as long as it is to be left alone.
            return now_s < max(peer.retry_at_s, peer.suspect_until_s), peer.last_wanted_s

        if (first := min(idle, key=order, default=None)) is not None:
            self._forget(first, now_s)

    def _forget(self, peer: Peer, now_s: float) -> None:
        """Know nothing more of an engine with which nothing is under way."""
        self._retire(peer, now_s)
        del self._peers[peer.address]
        self._active.pop(peer.address, None)

    def _shed_dead(self, now_s: float) -> None:
        """Renew a lane, where lanes hold descriptors for too many engines that are not read from.

        Only what is closed counts: to renew a lane for what is open would give nothing back, as its
        peers would be connected anew.
        """
        dead = {lane: lane.num_made - len(lane.connections) for lane in self.lanes.ready}
        if sum(dead.values()) > MAX_DEAD_CONNECTIONS:
            self._retire_lane(max(dead, key=dead.__getitem__), now_s)

    @property
    def _has_too_many_connections(self) -> bool:
        return sum(lane.num_made for lane in self.lanes.ready) > MAX_CONNECTIONS

    def _renew_lanes(self, now_s: float) -> None:
        """Give descriptors back: replace lanes that are not in use, that of the longest first."""
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
            # One that could not be made before is tried again later.
            self.lanes.prepare(now_s)
        if self._has_too_many_connections:
            self._sweep_by(now_s + IDLE_LANE_S)

    def _sweep_by(self, at_s: float) -> None:
        """A peer may be over from then on."""
        self._sweep_at_s = min(self._sweep_at_s, at_s)


def _back_off_s(failures: int) -> float:
    """How long to wait after so many failures, of which there is at least one."""
    # No engine is so patient that more doublings than these would matter.
    return min(FIRST_RETRY_S * 2.0 ** min(failures - 1, 16), LAST_RETRY_S)

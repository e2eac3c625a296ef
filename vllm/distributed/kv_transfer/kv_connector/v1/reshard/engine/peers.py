# SPDX-License-Identifier: Apache-2.0
"""The engines that a worker knows: when to shake hands, when to try again, when to forget.

A turn costs nothing for peers with which nothing is to be done: the table keeps those apart with
which something is, and knows when it has to look at the others.

The table belongs to the connector's thread. Generations are opened by other threads, which are
given values, return connections through futures, and touch nothing of the table.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from ..protocol.ledgers import RequestId
from ..protocol.messages import Receive, RemoteEngineAddress
from ..transport.connection import PeerConnection

FIRST_RETRY_S, LAST_RETRY_S = 1.0, 30.0
"""How long after a first failure the next handshake may begin, and after many."""

STEADY_S = 60.0
"""An engine whose reads have not failed for this long has no past."""

_LOOK_AGAIN_S = 1.0
"""An engine that nobody has wanted for long, and that is read from all the same, is looked at again
after this."""

Open = Callable[[RemoteEngineAddress], Future[PeerConnection]]
"""Shakes hands with an engine, and prepares everything for it; blocks on nothing."""


@dataclass(slots=True, eq=False)
class Peer:
    """Another engine, from the first time that it is wanted.

    Attributes:
        address: Where it listens.
        last_wanted_s: When somebody last asked for it.
        wanted: Somebody has asked for it since the last handshake began.
        broken: A read or a handshake has failed, or another engine has its address: it is connected
            anew for the next who wants it.
        connection: What to read with, while it is connected.
        handshake: The handshake that is under way.
        began_s: When the last handshake began.
        waiting: Requests to begin once it is connected.
        failures: Handshakes that failed one after another.
        breaks: Connections that failed one after another, none of which stayed whole for long.
        retry_at_s: When the next handshake may begin.
        remembered_until_s: Until then it is not forgotten: its past tells how long to wait.
    """

    address: RemoteEngineAddress
    last_wanted_s: float
    wanted: bool = True
    broken: bool = False
    connection: PeerConnection | None = None
    handshake: Future[PeerConnection] | None = None
    began_s: float = 0.0
    waiting: deque[tuple[RequestId, Receive]] = field(default_factory=deque)
    failures: int = 0
    breaks: int = 0
    retry_at_s: float = 0.0
    remembered_until_s: float = 0.0

    def take_waiting(self) -> list[tuple[RequestId, Receive]]:
        """The requests that waited; they do not any more."""
        waiting = list(self.waiting)
        self.waiting.clear()
        return waiting

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way with it."""
        if self.waiting or self.handshake is not None:
            return False
        connection = self.connection
        return connection is None or (connection.lifetime.is_drained and not connection.leases)

    @property
    def has_news(self) -> bool:
        """Whether it is to be connected, is being, or has requests waiting."""
        unconnected = self.connection is None and self.wanted
        return bool(unconnected or self.handshake is not None or self.waiting)

    def over_at_s(self, idle_limit_s: float) -> float:
        """From when on nobody misses it, if it is idle: for long, or gone and out of back-off."""
        if self.broken and not self.wanted:
            return max(self.retry_at_s, self.remembered_until_s)
        return self.last_wanted_s + idle_limit_s


class PeerTable:
    """All engines that a worker knows, by their address and id.

    What a request says of an engine may be wrong: another address for the same id, or another id at
    the same address, is a peer of its own until it has answered.

    Args:
        open_connection: Connects with an engine.
        idle_limit_s: An engine that was not wanted for this long is forgotten; none ever is if this
            is not above 0.
    """

    def __init__(self, open_connection: Open, idle_limit_s: float) -> None:
        self._open = open_connection
        self._idle_limit_s = idle_limit_s if idle_limit_s > 0 else math.inf
        self._peers: dict[RemoteEngineAddress, Peer] = {}
        # Those that have news, in the order in which they first had some.
        self._active: dict[RemoteEngineAddress, Peer] = {}
        # No peer is over before.
        self._sweep_at_s = math.inf
        self._retired: list[PeerConnection] = []
        self._just_retired: list[PeerConnection] = []
        self._handshakes_s: list[float] = []

    def __len__(self) -> int:
        return len(self._peers)

    @property
    def num_handshakes(self) -> int:
        """Handshakes that are under way."""
        return sum(peer.handshake is not None for peer in self._peers.values())

    @property
    def retired(self) -> tuple[PeerConnection, ...]:
        """Generations that drain, the oldest first."""
        return tuple(self._retired)

    @property
    def next_due_s(self) -> float:
        """When the table is to be looked at next, though nothing happens until then."""
        closings = (each.lifetime.close_at_s(wanted=len(each.leases) > 0) for each in self._retired)
        retries = (
            peer.retry_at_s
            for peer in self._active.values()
            if peer.connection is None and peer.handshake is None
        )
        return min(at_s for at_s in (*closings, *retries, self._sweep_at_s) if at_s is not None)

    def get_or_connect(self, address: RemoteEngineAddress, now_s: float) -> Peer:
        """The engine at an address; from now on it is in use."""
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = Peer(address, now_s)
            self._sweep_by(now_s + self._idle_limit_s)
        peer.last_wanted_s = now_s
        peer.wanted = True
        self._active[address] = peer
        return peer

    def advance(self, now_s: float) -> list[tuple[Peer, Exception | None]]:
        """Begin and end handshakes, and forget peers that are gone.

        Returns:
            Peers for which requests wait that can begin now, each with None, and peers whose
            handshake has failed, each with the reason.
        """
        if now_s >= self._sweep_at_s:
            self._sweep(now_s)
        news: list[tuple[Peer, Exception | None]] = []
        for peer in list(self._active.values()):
            if peer.handshake is not None and peer.handshake.done():
                error = self._end_handshake(peer, peer.handshake, now_s)
                if error is not None:
                    news.append((peer, error))
                    continue
            if peer.connection is None:
                if peer.wanted and peer.handshake is None and now_s >= peer.retry_at_s:
                    peer.wanted = False
                    peer.began_s = now_s
                    peer.handshake = self._open(peer.address)
            elif peer.waiting:
                news.append((peer, None))
            if not peer.has_news:
                del self._active[peer.address]
        return news

    def break_off(self, connection: PeerConnection, now_s: float) -> None:
        """A read has failed or hangs: its connection drains, and the next one is opened beside it.

        The first time at once, as the peer may have lost a connection or have restarted. An engine
        that answers handshakes and cannot be read from, again and again, is asked ever more rarely.
        """
        if not connection.lifetime.is_open:
            # What fails is of the past; another connection has taken its place. Each request of a
            # broken one comes by here.
            return
        peer = next((each for each in self._peers.values() if each.connection is connection), None)
        if peer is None:
            return
        self._retire(peer, now_s)
        peer.broken = True
        if now_s >= peer.remembered_until_s:
            peer.breaks = 0
        peer.retry_at_s = now_s + (_back_off_s(peer.breaks) if peer.breaks else 0.0)
        peer.remembered_until_s = peer.retry_at_s + STEADY_S
        peer.breaks += 1
        self._sweep_by(peer.remembered_until_s)

    def take_just_retired(self) -> list[PeerConnection]:
        """The connections that were retired since the last call."""
        retired, self._just_retired = self._just_retired, []
        return retired

    def take_handshakes_s(self) -> list[float]:
        """How long those handshakes took that have succeeded since the last call."""
        durations_s, self._handshakes_s = self._handshakes_s, []
        return durations_s

    def take_due(self, now_s: float) -> list[PeerConnection]:
        """The connections to be closed now, of which the table knows nothing any more."""
        due = [each for each in self._retired if _is_due(each, now_s)]
        self._retired = [each for each in self._retired if each not in due]
        return due

    def close(self, now_s: float) -> list[PeerConnection]:
        """Forget all engines; returns all connections, which are to be closed."""
        for peer in self._peers.values():
            self._retire(peer, now_s)
            if peer.handshake is not None and not peer.handshake.cancel():
                peer.handshake.add_done_callback(_close_unwanted)
        self._peers.clear()
        self._active.clear()
        retired, self._retired = self._retired, []
        return retired

    def _retire(self, peer: Peer, now_s: float) -> None:
        """Let what is in flight from a peer drain."""
        if peer.connection is not None:
            peer.connection.lifetime.retire(now_s)
            self._retired.append(peer.connection)
            self._just_retired.append(peer.connection)
            peer.connection = None
            if peer.waiting:
                # They are read with the next one.
                peer.wanted = True
                self._active[peer.address] = peer

    def _sweep(self, now_s: float) -> None:
        """Forget peers that are over, and note when the next one may be."""
        self._sweep_at_s = math.inf
        for peer in list(self._peers.values()):
            over_at_s = peer.over_at_s(self._idle_limit_s)
            if now_s < over_at_s:
                self._sweep_by(over_at_s)
            elif not peer.is_idle:
                self._sweep_by(now_s + _LOOK_AGAIN_S)
            else:
                self._retire(peer, now_s)
                del self._peers[peer.address]
                self._active.pop(peer.address, None)

    def _sweep_by(self, at_s: float) -> None:
        """A peer may be over from then on."""
        self._sweep_at_s = min(self._sweep_at_s, at_s)

    def _end_handshake(
        self, peer: Peer, handshake: Future[PeerConnection], now_s: float
    ) -> Exception | None:
        """Take a connection into use; returns why there is none, if so."""
        peer.handshake = None
        try:
            peer.connection = handshake.result()
        except Exception as error:
            # Whatever it is, it is this peer's handshake that has failed, and nothing else.
            peer.failures += 1
            # Who asked meanwhile, as heartbeats do, asked for requests that fail with it.
            peer.wanted = False
            peer.retry_at_s = now_s + _back_off_s(peer.failures)
            peer.broken = True
            self._sweep_by(peer.retry_at_s)
            return error
        self._handshakes_s.append(now_s - peer.began_s)
        peer.failures, peer.broken = 0, False
        for other in self._peers.values():
            at_its_place = (other.address.host, other.address.port) == (
                peer.address.host,
                peer.address.port,
            )
            if at_its_place and other is not peer:
                # It has restarted under a new id.
                other.broken = True
                self._retire(other, now_s)
                self._sweep_by(now_s)
        return None


def _is_due(connection: PeerConnection, now_s: float) -> bool:
    at_s = connection.lifetime.close_at_s(wanted=len(connection.leases) > 0)
    return at_s is not None and now_s >= at_s


def _close_unwanted(handshake: Future[PeerConnection]) -> None:
    """Close a connection that nobody waits for any more."""
    if not handshake.cancelled() and handshake.exception() is None:
        connection = handshake.result()
        connection.lifetime.retire(0.0)
        connection.close()


def _back_off_s(failures: int) -> float:
    """How long to wait after so many failures, of which there is at least one."""
    # No engine is so patient that more doublings than these would matter.
    return min(FIRST_RETRY_S * 2.0 ** min(failures - 1, 16), LAST_RETRY_S)

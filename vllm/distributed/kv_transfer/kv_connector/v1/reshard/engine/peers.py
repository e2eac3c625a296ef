# SPDX-License-Identifier: Apache-2.0
"""The engines that a worker knows: when to shake hands, when to try again, when to forget.

The table belongs to the engine's thread. Handshakes are fetched by threads of an executor, which
are given values, return values through futures, and touch nothing of the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

from ..protocol.ledgers import RequestId
from ..protocol.messages import Receive, RemoteEngineAddress
from ..protocol.metadata import WorkerDescription
from ..transport.remote import RemoteEngine

FIRST_RETRY_S, LAST_RETRY_S = 1.0, 30.0
"""How long after a first failure the next handshake may begin, and after many."""

STEADY_S = 60.0
"""An engine whose reads have not failed for this long has no past."""

Fetch = Callable[[RemoteEngineAddress], tuple[WorkerDescription, ...]]
Connect = Callable[[tuple[WorkerDescription, ...], float], RemoteEngine]


@dataclass(slots=True)
class Peer:
    """Another engine, from the first time that it is wanted.

    Attributes:
        address: Where it listens.
        last_wanted_s: When somebody last asked for it.
        wanted: Somebody has asked for it since the last handshake began.
        broken: A read or a handshake has failed, or another engine has its address: it is to be
            connected anew once nothing is in flight.
        engine: What was prepared for it, while it is connected.
        handshake: The handshake that is under way.
        began_s: When the last handshake began.
        waiting: Requests to begin once it is connected.
        in_flight: Requests being read from it.
        failures: Handshakes that failed one after another.
        breaks: Connections that failed one after another, none of which stayed whole for long.
        retry_at_s: When the next handshake may begin.
        remembered_until_s: Until then it is not forgotten: its past tells how long to wait.
    """

    address: RemoteEngineAddress
    last_wanted_s: float
    wanted: bool = True
    broken: bool = False
    engine: RemoteEngine | None = None
    handshake: Future[tuple[WorkerDescription, ...]] | None = None
    began_s: float = 0.0
    waiting: list[tuple[RequestId, Receive]] = field(default_factory=list)
    in_flight: int = 0
    failures: int = 0
    breaks: int = 0
    retry_at_s: float = 0.0
    remembered_until_s: float = 0.0

    def take_waiting(self) -> list[tuple[RequestId, Receive]]:
        """The requests that waited; they do not any more."""
        waiting, self.waiting = self.waiting, []
        return waiting

    def break_off(self, now_s: float) -> None:
        """A read has failed: it is to be connected anew once nothing is in flight.

        The first time at once, as it may have lost a connection or have restarted. An engine that
        answers handshakes and cannot be read from, again and again, is asked ever more rarely.
        """
        if self.broken:
            return
        self.broken = True
        if now_s >= self.remembered_until_s:
            self.breaks = 0
        self.retry_at_s = now_s + (_back_off_s(self.breaks) if self.breaks else 0.0)
        self.remembered_until_s = self.retry_at_s + STEADY_S
        self.breaks += 1

    def disconnect(self) -> None:
        """Give back what was prepared for it. Nothing may be in flight."""
        assert not self.in_flight
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def is_over(self, now_s: float, idle_limit_s: float) -> bool:
        """Whether nobody misses it: it is idle for long, or gone and out of its back-off."""
        if self.waiting or self.in_flight or self.handshake is not None:
            return False
        if self.broken and not self.wanted:
            return now_s >= max(self.retry_at_s, self.remembered_until_s)
        return now_s - self.last_wanted_s > idle_limit_s


class PeerTable:
    """All engines that a worker knows, by their address and id.

    What a request says of an engine may be wrong: another address for the same id, or another id at
    the same address, is a peer of its own until it has answered.

    Args:
        executor: Runs handshakes.
        fetch: Asks an engine for its workers; called in the executor's threads.
        connect: Prepares everything for an engine that has answered, given when it was asked.
        idle_limit_s: An engine that was not wanted for this long is forgotten; none ever is if this
            is not above 0.
    """

    def __init__(
        self, executor: Executor, fetch: Fetch, connect: Connect, idle_limit_s: float
    ) -> None:
        self._executor = executor
        self._fetch = fetch
        self._connect = connect
        self._idle_limit_s = idle_limit_s if idle_limit_s > 0 else math.inf
        self._peers: dict[RemoteEngineAddress, Peer] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def want(self, address: RemoteEngineAddress, now_s: float) -> Peer:
        """The engine at an address; from now on it is in use."""
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = Peer(address, now_s)
        peer.last_wanted_s = now_s
        peer.wanted = True
        return peer

    def advance(self, now_s: float) -> list[tuple[Peer, Exception | None]]:
        """Begin and end handshakes, and forget peers that are gone.

        Returns:
            Peers for which requests wait that can begin now, each with None, and peers whose
            handshake has failed, each with the reason.
        """
        news: list[tuple[Peer, Exception | None]] = []
        for peer in list(self._peers.values()):
            if peer.broken and not peer.in_flight:
                peer.disconnect()
            if peer.is_over(now_s, self._idle_limit_s):
                peer.disconnect()
                del self._peers[peer.address]
                continue
            if peer.handshake is not None and peer.handshake.done():
                error = self._end_handshake(peer, peer.handshake, now_s)
                if error is not None:
                    news.append((peer, error))
                    continue
            if peer.engine is None:
                if peer.wanted and peer.handshake is None and now_s >= peer.retry_at_s:
                    peer.wanted = False
                    peer.began_s = now_s
                    peer.handshake = self._executor.submit(self._fetch, peer.address)
            elif peer.waiting and not peer.broken:
                news.append((peer, None))
        return news

    def close(self) -> None:
        """Forget all engines. Nothing may be in flight."""
        for peer in self._peers.values():
            peer.disconnect()
        self._peers.clear()

    def _end_handshake(
        self, peer: Peer, handshake: Future[tuple[WorkerDescription, ...]], now_s: float
    ) -> Exception | None:
        """Connect with an engine that has answered; returns why that failed, if it did."""
        peer.handshake = None
        try:
            peer.engine = self._connect(handshake.result(), peer.began_s)
        except Exception as error:
            # Whatever it is, it is this peer's handshake that has failed, and nothing else.
            peer.failures += 1
            # Who asked meanwhile, as heartbeats do, asked for requests that fail with it.
            peer.wanted = False
            peer.retry_at_s = now_s + _back_off_s(peer.failures)
            peer.broken = True
            return error
        peer.failures, peer.broken = 0, False
        for other in self._peers.values():
            at_its_place = (other.address.host, other.address.port) == (
                peer.address.host,
                peer.address.port,
            )
            if at_its_place and other is not peer:
                # It has restarted under a new id.
                other.broken = True
        return None


def _back_off_s(failures: int) -> float:
    """How long to wait after so many failures, of which there is at least one."""
    # No engine is so patient that more doublings than these would matter.
    return min(FIRST_RETRY_S * 2.0 ** min(failures - 1, 16), LAST_RETRY_S)

# SPDX-License-Identifier: Apache-2.0
"""One connection of a worker with another engine, over one of its lanes.

A connection that fails is not mended. It is retired, and drains beside the next one: see
`lifetimes` and `lane`.
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import InDoubtError
from ..memory.leg import Indices
from ..protocol.lifetimes import Lifetime
from .agent import Prepared, Transfer, TransferState
from .board_reader import BoardReader
from .lane import Lane
from .lease_check import LeaseChecker
from .remote import LoweredEngine, RemoteEngine


class PeerConnection:
    """A connection with another engine. It belongs to the connector's thread.

    Args:
        lane: What to read with.
        lowered: What to read, and which workers to notify.
        hung_grace_s: How long reads that neither end nor fail are waited for.
        clock: Seconds that only grow.

    Attributes:
        lane: What it reads with.
        engine: What to read from it, and which workers to notify.
        lifetime: What is in flight, and when it may end.
        leases: Looks up whether what was read was still held.
    """

    def __init__(
        self, lane: Lane, lowered: LoweredEngine, hung_grace_s: float, clock: Callable[[], float]
    ) -> None:
        self.lane = lane
        self.engine = RemoteEngine(lane, lowered)
        self.lifetime = Lifetime(hung_grace_s)
        self.leases = LeaseChecker(lane.lookups, self, clock)
        self._clock = clock
        self._is_open = True
        lane.connections[self] = None
        lane.num_made += 1

    def connect_next(self) -> bool:
        """Connect one more worker of the engine; returns whether all are connected.

        Raises:
            TransferError: NIXL does not accept it.
        """
        return self.engine.connect_next()

    def read(
        self,
        local: Prepared,
        local_indices: Indices,
        remote: Prepared,
        remote_indices: Indices,
    ) -> Transfer:
        """Post a read; see `NixlAgent.read`.

        Raises:
            InDoubtError: It was refused, and may write all the same until the lane is closed.
            TransferError: It was refused.
        """
        try:
            transfer = self.lane.agent.read(local, local_indices, remote, remote_indices)
        except InDoubtError:
            self.lifetime.refuse(self._clock())
            raise
        self.lifetime.begin()
        return transfer

    def board(self) -> BoardReader | None:
        """What its board is read with; None where it has none.

        Raises:
            TransferError: There is no memory to read it into, or NIXL does not accept it.
        """
        board = self.engine.board()
        return None if board is None else BoardReader(self.lane.boards, self, board)

    def doubt(self) -> None:
        """A read may have been posted that is not known: it ends with the lane."""
        self.lifetime.refuse(self._clock())

    def poll(self, transfer: Transfer) -> TransferState:
        """Look at a posted read; one that has ended is counted once."""
        if transfer.ended_in is not None:
            return transfer.ended_in
        state = self.lane.agent.poll(transfer)
        if state is TransferState.IN_FLIGHT:
            return state
        if state is TransferState.DONE:
            self.lifetime.done()
        else:
            self.lifetime.fail(self._clock())
        transfer.ended_in = state
        return state

    def telemetry(self, transfer: Transfer) -> object:
        """What NIXL measured of a read that is done; None where it cannot tell."""
        return self.lane.agent.telemetry(transfer)

    def release(self, transfer: Transfer) -> None:
        """Give a read back that is done."""
        self.lane.agent.release(transfer)

    def notify(self, peer: str, message: bytes) -> None:
        """Send one of the engine's workers a message.

        Raises:
            TransferError: It cannot be reached.
        """
        self.lane.notify(peer, message, self._clock())

    @property
    def is_connected(self) -> bool:
        """Whether it was not closed."""
        return self._is_open

    @property
    def close_at_s(self) -> float | None:
        """When its lane need not stay for it any longer; None while it is open."""
        return self.lifetime.close_at_s(wanted=len(self.leases) > 0)

    @property
    def is_drained(self) -> bool:
        """Whether it can be closed by itself: nothing is read with it, or looked up."""
        return self.lifetime.is_drained and not self.leases

    def close(self) -> None:
        """End it once it is drained, or its lane closed: nothing of it writes any more."""
        if not self._is_open:
            return
        self._is_open = False
        del self.lane.connections[self]
        if self.lane.agent.is_open:
            assert self.is_drained, "what may still write ends with its lane"
            self.engine.disconnect()
        self.lifetime.close()

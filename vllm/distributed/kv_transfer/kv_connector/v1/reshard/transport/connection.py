# SPDX-License-Identifier: Apache-2.0
"""A worker's connection with another engine, over one of the worker's lanes.

A failed connection is not repaired. It is retired, and drains while the next one is in use: see
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
        lane: Lane to read over.
        lowered: The engine's legs, and the workers to notify.
        hung_grace_s: How long a retired connection waits for reads that neither complete nor fail.
        clock: Monotonic clock, in seconds.

    Attributes:
        lane: Lane that it reads over.
        engine: The engine, with its prepared legs and the workers to notify.
        lifetime: Counts of what is in flight, and when it may be closed.
        leases: Lease checks of blocks that were read over it.
    """

    def __init__(
        self, lane: Lane, lowered: LoweredEngine, hung_grace_s: float, clock: Callable[[], float]
    ) -> None:
        self.lane = lane
        self.engine = RemoteEngine(lane, lowered)
        self.lifetime = Lifetime(hung_grace_s)
        self.leases = LeaseChecker(lane.checks, self, clock)
        self._clock = clock
        self._is_open = True
        lane.connections[self] = None
        lane.num_made += 1

    def connect_next(self) -> bool:
        """Connect one more worker of the engine; return whether all are connected.

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
            InDoubtError: The read was refused, but may write until the lane is closed.
            TransferError: The read was refused.
        """
        try:
            transfer = self.lane.agent.read(local, local_indices, remote, remote_indices)
        except InDoubtError:
            self.lifetime.refuse(self._clock())
            raise
        self.lifetime.begin()
        return transfer

    def board(self) -> BoardReader | None:
        """Return a reader of the engine's board; None if it has no board.

        Raises:
            TransferError: No memory can be registered to read it into, or NIXL does not accept it.
        """
        board = self.engine.board()
        return None if board is None else BoardReader(self.lane.boards, self, board)

    def doubt(self) -> None:
        """Count a read in doubt: its post raised, so it may write until the lane is closed."""
        self.lifetime.refuse(self._clock())

    def poll(self, transfer: Transfer) -> TransferState:
        """Return a posted read's state; count its end once."""
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
        """Return NIXL's measurements of a completed read; None if it has none."""
        return self.lane.agent.telemetry(transfer)

    def release(self, transfer: Transfer) -> None:
        """Release a completed read."""
        self.lane.agent.release(transfer)

    def notify(self, peer: str, message: bytes) -> None:
        """Send a message to one of the engine's workers.

        Raises:
            TransferError: The worker cannot be reached.
        """
        self.lane.notify(peer, message, self._clock())

    @property
    def is_connected(self) -> bool:
        """True until it is closed."""
        return self._is_open

    @property
    def close_at_s(self) -> float | None:
        """When its lane may be closed as far as it is concerned; None until it is retired."""
        return self.lifetime.close_at_s(wanted=len(self.leases) > 0)

    @property
    def is_drained(self) -> bool:
        """True if it can be closed without its lane: no reads or checks are under way."""
        return self.lifetime.is_drained and not self.leases

    def close(self) -> None:
        """Close it. It must be drained or its lane closed, so that no read writes any more."""
        if not self._is_open:
            return
        self._is_open = False
        del self.lane.connections[self]
        if self.lane.agent.is_open:
            assert self.is_drained, "what may still write ends with its lane"
            self.engine.disconnect()
        self.lifetime.close()

# SPDX-License-Identifier: Apache-2.0
"""One connection of a worker with another engine: an agent of its own, and what is read with it.

A connection that fails is not mended. It is retired, and drains beside the next one: see
`lifetimes`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import InDoubtError
from ..memory.lowering import Indices
from ..protocol.lifetimes import Lifetime
from .agent import NixlAgent, Prepared, Transfer, TransferState
from .lease_check import LeaseChecker

if TYPE_CHECKING:
    from .remote import RemoteEngine

LookupKey = tuple[str, int]
"""A request, and which of those that had this name."""

TALK_S = 0.25
"""How long an agent without threads is looked after once it has sent a message: a first one waits
for its connection."""


class PeerConnection:
    """A connection with another engine.

    A thread that opens connections makes it; from then on it belongs to the connector's thread.

    Args:
        agent: Nobody else's.
        engine: What was prepared with it.
        hung_grace_s: How long reads that neither end nor fail are waited for.
        clock: Seconds that only grow.

    Attributes:
        engine: What to read from it, and whom to notify.
        lifetime: What is in flight, and when it may end.
        leases: Looks up whether what was read was still held.
        talks_until_s: Until then something that was sent may be on its way.
    """

    def __init__(
        self,
        agent: NixlAgent,
        engine: RemoteEngine,
        hung_grace_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.engine = engine
        self.lifetime = Lifetime(hung_grace_s)
        self._agent = agent
        self._clock = clock
        self._connected = True
        self.talks_until_s = 0.0
        self.leases: LeaseChecker[LookupKey] = LeaseChecker(agent, self, clock)

    def read(
        self,
        local: Prepared,
        local_indices: Indices,
        remote: Prepared,
        remote_indices: Indices,
    ) -> Transfer:
        """Post a read; see `NixlAgent.read`.

        Raises:
            InDoubtError: It was refused, and may write all the same until this is closed.
            TransferError: It was refused.
        """
        try:
            transfer = self._agent.read(local, local_indices, remote, remote_indices)
        except InDoubtError:
            self.lifetime.refuse(self._clock())
            raise
        self.lifetime.begin()
        return transfer

    def poll(self, transfer: Transfer) -> TransferState:
        """Look at a posted read that was in flight when it was last looked at."""
        state = self._agent.poll(transfer)
        if state is TransferState.DONE:
            self.lifetime.done()
        elif state is TransferState.FAILED:
            self.lifetime.fail(self._clock())
        return state

    def telemetry(self, transfer: Transfer) -> object:
        """What NIXL measured of a read that is done; None where it cannot tell."""
        return self._agent.telemetry(transfer)

    def release(self, transfer: Transfer) -> None:
        """Give a read back that is done."""
        self._agent.release(transfer)

    def notify(self, peer: str, message: bytes) -> None:
        """Send one of the engine's workers a message.

        Raises:
            TransferError: It cannot be reached.
        """
        self._agent.notify(peer, message)
        self.talks_until_s = self._clock() + TALK_S

    def advance(self) -> None:
        """Let NIXL get on with what is no read, such as messages and what they are sent over."""
        self._agent.take_notifications()

    @property
    def is_connected(self) -> bool:
        """Whether it was not closed."""
        return self._connected

    def close(self) -> None:
        """End it: nothing that was read with it writes any more."""
        self._connected = False
        self._agent.close()
        self.lifetime.close()

# SPDX-License-Identifier: Apache-2.0
"""The requests of which all was read, and whose leases are being looked up.

All of this belongs to the connector's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from ...transport.connection import PeerConnection
from ...transport.lease_check import LeaseCheckFailure, Verdict
from ..connecting.peers import PeerTable
from ..queues import taken_once_done
from .readings import Reading


class LeaseChecks:
    """The lease checks of a worker, at all engines that it reads from.

    Args:
        peers: Those engines.
    """

    def __init__(self, peers: PeerTable) -> None:
        self._peers = peers
        # The connections with which leases are being looked up.
        self._looking: dict[PeerConnection, None] = {}
        # Each with the connection that it is about; None where that has ended.
        self._verdicts: deque[tuple[PeerConnection | None, Verdict]] = deque()

    def __bool__(self) -> bool:
        """Whether something is being looked up."""
        return bool(self._looking)

    def begin(self, reading: Reading) -> None:
        """Have a request looked up in each table of its; there will be a verdict for each."""
        receive, connection = reading.receive, reading.connection
        assert receive.fingerprint is not None and connection is not None
        if reading.lease_tables:
            self._looking[connection] = None
        for table in reading.lease_tables:
            connection.leases.check_later(
                reading.key,
                receive.remote_request_id,
                receive.fingerprint,
                table,
                reading.due_at_s,
            )

    def advance(self, now_s: float) -> Iterator[Verdict]:
        """Look leases up, and say what was found: see `verdicts`."""
        for connection in list(self._looking):
            self._verdicts += ((connection, each) for each in connection.leases.advance())
            yield from self.verdicts(now_s)
            if not connection.leases:
                del self._looking[connection]

    def give_up(self, connection: PeerConnection) -> None:
        """A connection ends: what was to be looked up with it has failed. See `verdicts`."""
        self._looking.pop(connection, None)
        self._verdicts += ((None, each) for each in connection.leases.give_up())

    def verdicts(self, now_s: float) -> Iterator[Verdict]:
        """What was found. A connection with which a lookup has failed is broken off."""
        for connection, verdict in taken_once_done(self._verdicts):
            if connection is not None and verdict.failure is LeaseCheckFailure.PEER:
                # Also where its request has failed meanwhile: nothing else would tell.
                self._peers.break_off(connection, now_s)
            yield verdict

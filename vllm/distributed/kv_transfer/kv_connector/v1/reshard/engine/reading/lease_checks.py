# SPDX-License-Identifier: Apache-2.0
"""Lease checks of requests whose blocks have all been read.

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
        peers: The engines that it reads from.
    """

    def __init__(self, peers: PeerTable) -> None:
        self._peers = peers
        # Connections with checks under way.
        self._looking: dict[PeerConnection, None] = {}
        # Each with the connection of its check; None once that has ended.
        self._verdicts: deque[tuple[PeerConnection | None, Verdict]] = deque()

    def __bool__(self) -> bool:
        """True while a check is under way."""
        return bool(self._looking)

    def begin(self, reading: Reading) -> None:
        """Queue a check of a request in each of its lease tables; each yields one verdict."""
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
        """Advance the checks, and yield their verdicts as `verdicts` does."""
        for connection in list(self._looking):
            self._verdicts += ((connection, each) for each in connection.leases.advance())
            yield from self.verdicts(now_s)
            if not connection.leases:
                del self._looking[connection]

    def give_up(self, connection: PeerConnection) -> None:
        """Fail the checks of a connection that ends; `verdicts` yields the failures."""
        self._looking.pop(connection, None)
        self._verdicts += ((None, each) for each in connection.leases.give_up())

    def verdicts(self, now_s: float) -> Iterator[Verdict]:
        """Yield the verdicts so far, and break off connections whose checks failed."""
        for connection, verdict in taken_once_done(self._verdicts):
            if connection is not None and verdict.failure is LeaseCheckFailure.PEER:
                # Even if its request has failed meanwhile: nothing else reports the broken peer.
                self._peers.break_off(connection, now_s)
            yield verdict

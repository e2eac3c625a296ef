# SPDX-License-Identifier: Apache-2.0
"""Lease checks of requests whose blocks have all been read.

All of this belongs to the connector's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from ...transport.connection import PeerConnection
from ...transport.lease_check import CheckResult, LeaseCheckFailure
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
        self._results: deque[tuple[PeerConnection | None, CheckResult]] = deque()

    def __bool__(self) -> bool:
        """True while a check is under way."""
        return bool(self._looking)

    def begin(self, reading: Reading) -> None:
        """Queue a check of a request in each of its lease tables; each yields one result."""
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

    def advance(self, now_s: float) -> Iterator[CheckResult]:
        """Advance the checks, and yield their results as `results` does."""
        for connection in list(self._looking):
            self._results += ((connection, each) for each in connection.leases.advance())
            yield from self.results(now_s)
            if not connection.leases:
                del self._looking[connection]

    def give_up(self, connection: PeerConnection) -> None:
        """Fail the checks of a connection that ends; `results` yields the failures."""
        self._looking.pop(connection, None)
        self._results += ((None, each) for each in connection.leases.give_up())

    def results(self, now_s: float) -> Iterator[CheckResult]:
        """Yield the results so far, and break off connections whose checks failed."""
        for connection, result in taken_once_done(self._results):
            if connection is not None and result.failure is LeaseCheckFailure.PEER:
                # Even if its request has failed meanwhile: nothing else reports the broken peer.
                self._peers.break_off(connection, now_s)
            yield result

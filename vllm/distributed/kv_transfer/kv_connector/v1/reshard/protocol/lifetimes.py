# SPDX-License-Identifier: Apache-2.0
"""How long a connection stays open, and when its reads can no longer write to memory.

When something goes wrong with a peer, its connection is retired: it takes no new request, and a new
connection opens beside it. Its reads and lease checks in flight are waited for.

    open  ---- retire --->  retired  ---- everything is done -------------------->  drained
                               |     ---- a read has failed, and a grace is over ->    ^
                               |     ---- nothing failed, nothing moves: hung ---------+

A drained connection whose reads are all done is closed by itself. Any other one is closed together
with its lane's agent: see `transport.lane`. It is not closed at once, because a live source that
has not answered yet may abort when its reader disconnects. It has to be closed, because reads from
a source that is gone or hung never complete: only the end of the agent guarantees that they no
longer write. `transport.agent` has the measurements.

Callers pass the time, in seconds of any monotonic clock. A lifetime is owned by the thread that
drives it, the connector's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: deadline grace: the agent of a retired lane is closed, if one of its reads has failed, too much
#: memory is in doubt, or more than four lanes drain. A look at leases whose first request is due by
#: then counts as hung: its requests fail, and its lane is retired.
PEER_GRACE_S = 10.0
"""How long to wait for a connection's other reads after one has failed. If the connection is lost,
they fail within a fraction of a second. UCX aborts a live worker whose reader disconnects over TCP,
so a slow peer gets this long to recover."""


@dataclass(slots=True)
class Lifetime:
    """Counts of a connection's requests, reads in flight and reads in doubt.

    Attributes:
        hung_grace_s: How long to wait for a retired connection if none of its reads has failed.
        requests: Requests that are being read over it and have not failed.
        in_flight: Reads that were posted and have neither completed nor failed.
        in_doubt: Failed reads, which may write until the lane is closed.
        retired_at_s: When it was retired; None before.
    """

    hung_grace_s: float
    requests: int = 0
    in_flight: int = 0
    in_doubt: int = 0
    retired_at_s: float | None = None
    _failed_at_s: float | None = field(default=None)

    @property
    def is_retired(self) -> bool:
        """True if no further reads may be posted to it."""
        return self.retired_at_s is not None

    @property
    def is_drained(self) -> bool:
        """True if none of its reads can write any more, now or later."""
        return not (self.requests or self.in_flight or self.in_doubt)

    def begin_request(self) -> None:
        """Count a request that is read over it."""
        self.requests += 1

    def end_request(self) -> None:
        """Count a request off: it was received or has failed."""
        self.requests = max(self.requests - 1, 0)

    def begin(self) -> None:
        """Count a posted read."""
        self.in_flight += 1

    def done(self) -> None:
        """Count a completed read, which can no longer write."""
        assert self.in_flight > 0
        self.in_flight -= 1

    def fail(self, now_s: float) -> None:
        """Count a read in flight as failed: it may still write."""
        assert self.in_flight > 0
        self.refuse(now_s)
        self.in_flight -= 1

    def refuse(self, now_s: float) -> None:
        """Count a read whose post failed after it had begun: it may still write."""
        self.in_doubt += 1
        if self._failed_at_s is None:
            self._failed_at_s = now_s

    def retire(self, now_s: float) -> None:
        """Retire the connection: it takes no more reads. A second call changes nothing."""
        if self.retired_at_s is None:
            self.retired_at_s = now_s

    def close_at_s(self, *, wanted: bool = False) -> float | None:
        """Return when to stop waiting for it, perhaps in the past; None until it is retired.

        Reads that complete by then are done with; the others are drained by closing the lane.

        Args:
            wanted: True if it is still needed for a lease check, even with nothing in flight.
        """
        if self.retired_at_s is None:
            return None
        if not (self.requests or self.in_flight or wanted):
            return self.retired_at_s
        hung_at_s = self.retired_at_s + self.hung_grace_s
        if self._failed_at_s is None:
            return hung_at_s
        return min(hung_at_s, max(self._failed_at_s, self.retired_at_s) + PEER_GRACE_S)

    def close(self) -> None:
        """Reset all counts: it is drained or its agent is gone, so none of its reads can write."""
        self.requests = self.in_flight = self.in_doubt = 0

# SPDX-License-Identifier: Apache-2.0
"""How long a connection must stay, and what its end says of memory.

When something goes wrong with a peer, its connection is retired: no request is begun with it, and
the next one opens beside it. What it has begun is waited for, and looked up.

    open  ---- retire --->  retired  ---- everything is done -------------------->  drained
                               |     ---- a read has failed, and a grace is over ->    ^
                               |     ---- nothing failed, nothing moves: hung ---------+

A drained connection whose reads are all done is closed by itself. Any other one is closed with the
agent of its lane: see `transport.lane`. Why not at once: a source that is alive and has not
answered yet may end itself over a reader that goes away. Why at all: a source that is gone or hung
never lets reads be done, and then the end of the agent is the only thing after which nothing writes
any more. `transport.agent` tells what was measured.

Time is passed in, in seconds of any monotonic clock. A lifetime belongs to the thread that drives
it, the connector's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

PEER_GRACE_S = 10.0
"""How long the other reads of a connection are waited for after one has failed. Where a connection
is lost, they fail as well, within a fraction of a second; and UCX aborts a live worker whose reader
disconnects over TCP, so a slow peer gets as long to come back."""


@dataclass(slots=True)
class Lifetime:
    """Counts what a connection is used for, what it has in flight, and what is in doubt.

    Attributes:
        hung_grace_s: How long a retired connection of which no read has failed is waited for.
        requests: Requests that are being read with it and have not failed.
        in_flight: Reads that were posted, and have neither been done nor failed.
        in_doubt: Reads that have failed: they may write until the lane is closed.
        retired_at_s: When it was retired; None while it is open.
    """

    hung_grace_s: float
    requests: int = 0
    in_flight: int = 0
    in_doubt: int = 0
    retired_at_s: float | None = None
    _failed_at_s: float | None = field(default=None)

    @property
    def is_open(self) -> bool:
        """Whether something may be read with it."""
        return self.retired_at_s is None

    @property
    def is_drained(self) -> bool:
        """Whether nothing that is read with it can write any more, now or later."""
        return not (self.requests or self.in_flight or self.in_doubt)

    def begin_request(self) -> None:
        """A request is read with it."""
        self.requests += 1

    def end_request(self) -> None:
        """A request was received, or has failed."""
        self.requests = max(self.requests - 1, 0)

    def begin(self) -> None:
        """A read was posted."""
        self.in_flight += 1

    def done(self) -> None:
        """A read is done: it writes no more."""
        assert self.in_flight > 0
        self.in_flight -= 1

    def fail(self, now_s: float) -> None:
        """A read in flight has failed: it may go on to write."""
        assert self.in_flight > 0
        self.refuse(now_s)
        self.in_flight -= 1

    def refuse(self, now_s: float) -> None:
        """A read was refused when it was posted, but after it had begun."""
        self.in_doubt += 1
        if self._failed_at_s is None:
            self._failed_at_s = now_s

    def retire(self, now_s: float) -> None:
        """Nothing more is read with it; a second time changes nothing."""
        if self.retired_at_s is None:
            self.retired_at_s = now_s

    def close_at_s(self, *, wanted: bool = False) -> float | None:
        """From when on it is not waited for, perhaps in the past; None while it is open.

        All of its reads that are done by then need no more of it, and for all others the end of its
        lane is what makes them drained.

        Args:
            wanted: Something is still to be looked up with it, though nothing be in flight.
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
        """It is drained, or its agent is gone: nothing of it writes any more."""
        self.requests = self.in_flight = self.in_doubt = 0

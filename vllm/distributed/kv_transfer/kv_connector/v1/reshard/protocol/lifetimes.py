# SPDX-License-Identifier: Apache-2.0
"""How long an agent that reads must live, and what its end says of memory.

A worker reads from each peer with an agent of its own, a *connection*. When something goes wrong
with the peer, the connection is retired: no request is begun with it, and the next one opens the
next connection beside it. What it has begun is waited for, and looked up.

    open  ---- retire --->  retired  ---- everything is done -------------------->  closed
                               |     ---- a read has failed, and a grace is over ->    ^
                               |     ---- nothing failed, nothing moves: hung ---------+

Why not at once: a source that is alive and has not answered yet may end itself over a reader that
goes away. Why at all: a source that is gone or hung never lets reads be done, and then the end of
the agent is the only thing after which nobody writes any more. `agent` tells what was measured.

Time is passed in, in seconds of any monotonic clock. A lifetime belongs to the thread that drives
it, the connector's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

DEAD_GRACE_S = 5.0
"""How long the other reads of a connection are waited for after one has failed: where a connection
is lost, they fail as well, within a fraction of a second."""


@dataclass(slots=True)
class Lifetime:
    """Counts what a connection has in flight and in doubt.

    Attributes:
        hung_grace_s: How long a retired connection of which no read has failed is waited for.
        in_flight: Reads that were posted, and have neither been done nor failed.
        in_doubt: Reads that have failed: they may write until the connection is closed.
        retired_at_s: When it was retired; None while it is open.
    """

    hung_grace_s: float
    in_flight: int = 0
    in_doubt: int = 0
    retired_at_s: float | None = None
    _failed_at_s: float | None = field(default=None)
    _forced: bool = False

    @property
    def is_open(self) -> bool:
        """Whether something may be read with it."""
        return self.retired_at_s is None

    @property
    def is_drained(self) -> bool:
        """Whether nothing that was read with it can write any more."""
        return not self.in_flight and not self.in_doubt

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
        self.in_flight -= 1
        self.refuse(now_s)

    def refuse(self, now_s: float) -> None:
        """A read was refused when it was posted, but after it had begun."""
        self.in_doubt += 1
        if self._failed_at_s is None:
            self._failed_at_s = now_s

    def retire(self, now_s: float) -> None:
        """Nothing more is read with it; a second time changes nothing."""
        if self.retired_at_s is None:
            self.retired_at_s = now_s

    def force(self, now_s: float) -> None:
        """Retire it, and wait for nothing any more: too much memory is in doubt."""
        self.retire(now_s)
        self._forced = True

    def close_at_s(self, *, wanted: bool = False) -> float | None:
        """When it is to be closed, perhaps in the past; None while it is open.

        All of its reads that are done by then need no more of it, and for all others its end is
        what makes them quiet.

        Args:
            wanted: Something is still to be looked up with it, though nothing be in flight.
        """
        if self.retired_at_s is None:
            return None
        if self._forced or not (self.in_flight or wanted):
            return self.retired_at_s
        hung_at_s = self.retired_at_s + self.hung_grace_s
        if self._failed_at_s is None:
            return hung_at_s
        return min(hung_at_s, max(self._failed_at_s, self.retired_at_s) + DEAD_GRACE_S)

    def close(self) -> None:
        """The agent is gone: nothing of it writes any more."""
        assert self.retired_at_s is not None, "a connection is retired before it is closed"
        self.in_flight = self.in_doubt = 0

# SPDX-License-Identifier: Apache-2.0
"""A reader's wait for a request that another engine computes, without sockets or clocks.

    read a board ->  nothing yet  ->  known  ->  last chunk  ->  offered
                          |             |             |
                          +-------------+-------------+---->  a fault ends the wait

Callers pass the time, in seconds of any monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from .board import State

#: limit known: a request sent to both engines fails, as the other one does not know it, or cannot
#: be looked at.
KNOWN_WITHIN_S = 10.0
"""A request that is not on the producer's board after so long was not sent there, or under another
name. An engine whose board cannot be read for so long is gone."""

#: limit offer: a request sent to both engines fails, as it was not offered.
OFFERED_WITHIN_S = 600.0
"""How long a prompt may take to be scheduled and computed."""

#: limit earlier name: a request sent to both engines fails, if the first look found that it will
#: not be offered. Before, an earlier request may have had its name.
BELIEVED_AFTER_S = 0.5
"""A fault found earlier, before any other state, is ignored: it may be of an earlier request with
the same name, which the producer removes from the board when it receives the new one."""

#: limit last chunk: a request sent to both engines fails, as its last chunk was not computed.
COMPUTED_WITHIN_S = 300.0
"""How long a step may take: vLLM's default of `VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS`."""

_SHORTEST_REST_S, _LONGEST_REST_S = 1e-3, 10e-3
_REST_PER_WAIT = 0.02
"""Rest between looks, as a share of the time that the state has lasted, within the bounds above. A
change is seen at most that share late, or the shortest rest if that is more."""


@dataclass(slots=True)
class Watch:
    """A request that a reader waits for.

    Attributes:
        since_s: Start of the wait.
        changed_s: When its state was last seen to change.
        heard_s: When its producer's board was last read.
        state: Last state seen, other than a fault; None before the first.
    """

    since_s: float
    changed_s: float = 0.0
    heard_s: float = 0.0
    state: State | None = None

    def __post_init__(self) -> None:
        self.changed_s = self.heard_s = self.since_s

    @property
    def may_have_blocks(self) -> bool:
        """True if the producer needs no more blocks to offer it, so it may take blocks here.

        Otherwise the engines could deadlock: this one waits for the offer, and the producer for
        blocks of other offers, whose readers wait for the blocks that this request holds here.
        """
        return self.state is State.LAST_CHUNK or self.state is State.OFFERED

    @property
    def rest_s(self) -> float:
        """Rest before the next look, by the time that the state has lasted."""
        rest_s = _REST_PER_WAIT * (self.heard_s - self.changed_s)
        return min(max(rest_s, _SHORTEST_REST_S), _LONGEST_REST_S)

    def stood_still(self, for_s: float) -> None:
        """Extend all deadlines by a time in which the reader could not look."""
        self.since_s += for_s
        self.changed_s += for_s
        self.heard_s += for_s

    def see(self, state: State | None, now_s: float) -> str | None:
        """Record the state found on the board; None if the request is not there.

        Returns:
            The fault that ends the wait; None if it goes on.
        """
        self.heard_s = now_s
        if state is None:
            return None if self.state is None else "it is not known there any more"
        if state.fault is not None:
            is_its = self.state is not None or now_s >= self.since_s + BELIEVED_AFTER_S
            return state.fault if is_its else None
        if state is not self.state:
            self.state, self.changed_s = state, now_s
        return None

    def overdue(self, now_s: float) -> str | None:
        """Return which deadline ends the wait, in words; None if it goes on."""
        if now_s >= self.heard_s + KNOWN_WITHIN_S:
            return f"its engine could not be looked at for {KNOWN_WITHIN_S:g} s"
        if self.state is None and now_s >= self.since_s + KNOWN_WITHIN_S:
            return (
                f"it was not known there within {KNOWN_WITHIN_S:g} s: send the request to both "
                "engines, under one X-Request-Id, and set early_dispatch on both"
            )
        if self.state is State.LAST_CHUNK and now_s >= self.changed_s + COMPUTED_WITHIN_S:
            return f"its last chunk was not computed there within {COMPUTED_WITHIN_S:g} s"
        if now_s >= self.since_s + OFFERED_WITHIN_S:
            return f"it was not offered there within {OFFERED_WITHIN_S:g} s"
        return None

    @property
    def due_s(self) -> float:
        """Earliest time at which `overdue` may return a fault."""
        next_by_s = self.since_s + OFFERED_WITHIN_S
        if self.state is None:
            next_by_s = self.since_s + KNOWN_WITHIN_S
        elif self.state is State.LAST_CHUNK:
            next_by_s = min(next_by_s, self.changed_s + COMPUTED_WITHIN_S)
        return min(self.heard_s + KNOWN_WITHIN_S, next_by_s)

# SPDX-License-Identifier: Apache-2.0
"""How a reader waits for a request that another engine computes, without sockets or clocks.

    see a board  ->  nothing yet  ->  known  ->  last chunk  ->  offered
                          |             |             |
                          +-------------+-------------+---->  a fault: it waits no longer

Time is passed in, in seconds of any clock that only grows.
"""

from __future__ import annotations

from dataclasses import dataclass

from .board import State

KNOWN_WITHIN_S = 10.0
"""A request that its producer does not know by then was not sent there, or under another name. An
engine that cannot be looked at for as long is gone."""

OFFERED_WITHIN_S = 600.0
"""So long a prompt may wait for its turn and be computed."""

BELIEVED_AFTER_S = 0.5
"""What is found at the first look may be of an earlier request with the same name, which the
producer takes down when it hears of the new one: it is no fault before this."""

COMPUTED_WITHIN_S = 300.0
"""So long a step may take, as vLLM has it: `VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS`."""

_SHORTEST_REST_S, _LONGEST_REST_S = 1e-3, 10e-3
_REST_PER_WAIT = 0.02
"""Looks are as rare as it matters little: what is seen late is so by a fiftieth of the wait."""

_REST_PER_DISTANCE = 0.05
"""Around the time at which an offer is expected they are frequent, and rare far from it."""


class Pace:
    """How long a producer takes for a token of a step, as the last steps have shown.

    It tells when looks are worth their while, and nothing else: how far back tokens attend, for
    one, makes it wrong.
    """

    def __init__(self) -> None:
        self._token_s: float | None = None

    def learn(self, num_tokens: int, took_s: float) -> None:
        """A step of so many tokens took so long until its prompts were offered."""
        token_s = took_s / max(num_tokens, 1)
        before_s = token_s if self._token_s is None else self._token_s
        self._token_s = (before_s + token_s) / 2

    def of(self, num_tokens: int) -> float | None:
        """How long a step may take; None before the first."""
        return None if self._token_s is None else self._token_s * num_tokens


@dataclass(slots=True)
class Watch:
    """A request that is waited for.

    Attributes:
        since_s: Since when.
        changed_s: When it was last seen to have gone on.
        heard_s: When its producer could last be looked at.
        state: The last state that was seen and may lead to an offer; None before the first.
        takes_s: How long its last chunk may take; None where it is not known.
        took_s: How long that took, once it is offered; None where its begin was not seen.
    """

    since_s: float
    changed_s: float = 0.0
    heard_s: float = 0.0
    state: State | None = None
    takes_s: float | None = None
    took_s: float | None = None

    def __post_init__(self) -> None:
        self.changed_s = self.heard_s = self.since_s

    @property
    def may_have_blocks(self) -> bool:
        """Whether it will be offered without waiting for blocks there.

        Else each engine could wait for the other: this one for an offer, and that one for room,
        which other offers take up that wait for the blocks that this request has here.
        """
        return self.state is State.LAST_CHUNK or self.state is State.OFFERED

    @property
    def rest_s(self) -> float:
        """How long to rest between two looks: by what was waited so far, or is still to wait."""
        waited_s = self.heard_s - self.changed_s
        rest_s = _REST_PER_WAIT * waited_s
        if self.state is State.LAST_CHUNK and self.takes_s is not None:
            rest_s = _REST_PER_DISTANCE * abs(self.takes_s - waited_s)
        return min(max(rest_s, _SHORTEST_REST_S), _LONGEST_REST_S)

    def stood_still(self, for_s: float) -> None:
        """The reader could not look for so many seconds."""
        self.since_s += for_s
        self.changed_s += for_s
        self.heard_s += for_s

    def see(self, state: State | None, now_s: float) -> str | None:
        """Take note of what a board says.

        Returns:
            Why the request is waited for no longer; None where it is.
        """
        self.heard_s = now_s
        if state is None:
            return None if self.state is None else "it is not known there any more"
        if state.fault is not None:
            is_its = self.state is not None or now_s >= self.since_s + BELIEVED_AFTER_S
            return state.fault if is_its else None
        if state is not self.state:
            if (self.state, state) == (State.LAST_CHUNK, State.OFFERED):
                self.took_s = now_s - self.changed_s
            self.state, self.changed_s = state, now_s
        return None

    def overdue(self, now_s: float) -> str | None:
        """Why the request is waited for no longer though nothing new is known; None where it is."""
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
        """When `overdue` may first have something to say."""
        next_by_s = self.since_s + OFFERED_WITHIN_S
        if self.state is None:
            next_by_s = self.since_s + KNOWN_WITHIN_S
        elif self.state is State.LAST_CHUNK:
            next_by_s = min(next_by_s, self.changed_s + COMPUTED_WITHIN_S)
        return min(self.heard_s + KNOWN_WITHIN_S, next_by_s)

# SPDX-License-Identifier: Apache-2.0
"""Strikes a prefill engine while decode engines wait for its prompts, in a state that was seen.

A fault at a random moment meets a request that is known, computed or offered, and it cannot be told
which. So the engine is brought into the state, and kept there until it is struck:

    known       its seats are taken by requests that write long answers; others queue
    computing   most of its pool is held for reads that do not come; no prompt comes to its end:
                each is preempted, and waits until there are blocks for all of it
    offered     workers of the decode engines are stopped before, so that none reads the offer

There is no load meanwhile: states are what they are planned to be, and limits are those of the
engines, with a margin for the machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import TypeAlias

from .clients import Clients, EarlyAsk, Params, Terms, coordinates_of
from .faults import EARLY, Blow, Fault, PromptState, Role
from .fleet import MOST_AT_ONCE, POOL_BLOCKS, Fleet, FleetSettings
from .history import PoolReading, Recorder, Strike
from .stage import Wait
from .workload import Ask, Manner, Turn

TOLD_WITHIN_S = 1.0
"""So soon a decode engine hears that an engine has ended which knew its request."""

MISSED_WITHIN_S = 10.0
"""So soon it misses one that does not answer, or did not know of the request."""

HUNG_WITHIN_S = FleetSettings.read_timeout_s
"""So soon a read fails of what an engine offered that stands still."""

MACHINE_MARGIN_S = 5.0
"""So much longer it may take on two cores, and until a decode engine that computes what it cannot
read has done so. It is less than lies between two of these limits."""

_HEARD_S = 1.0
"""By then a decode engine has heard of a request, even on two cores."""

_SEEN_WITHIN_S = 60.0

_BLOCK_TOKENS = 128
_STRUCK = "when P was struck"
_GONE = "while P was gone"
_BACK = "once P was back"


AskAll: TypeAlias = Callable[[], list[EarlyAsk]]


class UnseenError(Exception):
    """An engine could not be brought into a state."""


class EarlyNemesis:
    """Strikes a prefill engine that decode engines wait for.

    Args:
        fleet: the engines that it strikes.
        clients: ask for it.
        recorder: where strikes are noted down.
        turns: what there is to ask for.
        seed: other salts for another number.
        deadline_s: how long requests may take that are not struck.
        wait: how it waits.
    """

    def __init__(
        self,
        fleet: Fleet,
        clients: Clients,
        recorder: Recorder,
        turns: Sequence[Turn],
        *,
        seed: int,
        deadline_s: float,
        wait: Wait,
    ) -> None:
        self._fleet = fleet
        self._clients = clients
        self._recorder = recorder
        self._longest = max(range(len(turns)), key=lambda index: turns[index].prompt_tokens)
        prompt_blocks = -(-turns[self._longest].prompt_tokens // _BLOCK_TOKENS)
        # One block is the null block. What is left is less than a prompt, and more than a chunk.
        self._num_held = (POOL_BLOCKS[Role.PREFILL] - 1) // prompt_blocks
        self._rng = random.Random(f"early {seed}")
        self._deadline_s = deadline_s
        self._wait = wait

    def strike(self, fault: Fault) -> str:
        """Bring an engine into a state, strike it there, and heal it; returns what was seen.

        Raises:
            UnseenError: it did not come into the state.
            PrefillError: it failed before it was struck.
            PDStackError: it does not come back.
        """
        self._clients.pause()
        try:
            return self._strike(fault)
        finally:
            self._clients.resume()

    def _strike(self, fault: Fault) -> str:
        blow, state = EARLY[fault.kind]
        target = fault.target
        self._wait(_SEEN_WITHIN_S, lambda: not self._clients.in_flight)
        self._see(target, "at rest", lambda pool: pool.is_whole)
        coordinates = self._connect(target)
        with ExitStack() as until_healed:
            with ExitStack() as until_struck:
                terms = Terms(self._deadline_s, label=_STRUCK)
                ask = partial(self._ask, target, coordinates, terms)
                asked, seen = self._bring(state, fault, ask, until_struck)
                _check_unanswered(asked, state)
                at_s = self._recorder.now_s()
                if blow is Blow.STOP:
                    until_healed.enter_context(self._fleet.stopped(target))
                else:
                    self._fleet.kill(target)
            if state is PromptState.OFFERED:
                # Decode engines go on, and read, only now.
                at_s = self._recorder.now_s()
            self._expect(_STRUCK, at_s, _ends_within_s(blow, state))
            if blow is not Blow.RESTART:
                self._wait_for(asked)
            if blow is Blow.KILL:
                self._expect(_GONE, self._recorder.now_s(), MISSED_WITHIN_S)
                terms = Terms(self._deadline_s, strict=True, label=_GONE)
                self._wait_for(self._ask(target, coordinates, terms))
                self._clients.resume()
                self._wait(fault.hold_s)
                self._clients.pause()
        if blow is not Blow.STOP:
            self._fleet.restart(target)
            self._wait_for(asked)
            # Routers name the engine that was there before until they have heard of another one.
            terms = Terms(self._deadline_s, strict=True, must_answer=True, label=_BACK)
            self._wait_for(self._ask(target, coordinates, terms))
        return seen

    def _connect(self, target: str) -> Params:
        """Have each decode engine read from an engine; returns what routers learn of that."""
        params: Params = {}
        asked = []
        for name in self._fleet.names(Role.DECODE):
            ask = self._new_ask()
            params = self._prefill(target, ask)
            server = self._fleet.server(name)
            asked.append(self._clients.ask(server, ask, Terms(self._deadline_s), params))
        self._wait(self._deadline_s, lambda: all(each.done() for each in asked))
        return coordinates_of(params)

    def _bring(
        self, state: PromptState, fault: Fault, ask: AskAll, stack: ExitStack
    ) -> tuple[list[EarlyAsk], str]:
        """Bring an engine into a state; returns the requests that are in it, and what was seen.

        Args:
            ask: asks decode engines, and this one with each.
            stack: ends what keeps it there.
        """
        if state is PromptState.KNOWN:
            return self._let_queue(fault.target, ask, stack)
        if state is PromptState.COMPUTING:
            return self._let_compute(fault.target, ask)
        return self._let_offer(fault, ask, stack)

    def _let_queue(self, target: str, ask: AskAll, stack: ExitStack) -> tuple[list[EarlyAsk], str]:
        stack.enter_context(self._clients.occupied(self._fleet.server(target), MOST_AT_ONCE))
        self._see(target, "full", lambda pool: pool.running >= MOST_AT_ONCE)
        asked = ask()
        pool = self._see(target, "known", lambda pool: pool.waiting >= len(asked))
        self._wait(_HEARD_S)
        return asked, f"{pool.running:.0f} requests ran and {pool.waiting:.0f} waited"

    def _let_compute(self, target: str, ask: AskAll) -> tuple[list[EarlyAsk], str]:
        held = [self._new_ask() for _ in range(self._num_held)]
        with ThreadPoolExecutor(len(held)) as executor:
            list(executor.map(lambda each: self._prefill(target, each), held))
        before = self._see(target, "holding", lambda pool: pool.held_blocks > 0, pokes=True)
        prefetched_bytes = self._prefetched_bytes()
        asked = ask()
        # More blocks are in use for a moment only: a request that is preempted gives its own back,
        # and is not scheduled again before there is room for them and one more. What was read of
        # them stays read. Of preemptions metrics tell with the first token: after the strike.
        after = self._see(
            target,
            "computing",
            lambda pool: pool.usage > before.usage or self._prefetched_bytes() > prefetched_bytes,
        )
        self._wait(_HEARD_S)
        meanwhile_bytes = self._prefetched_bytes() - prefetched_bytes
        return asked, (
            f"{before.usage:.0%} of the pool were held, {after.usage:.0%} in use; decode engines "
            f"had prefetched {meanwhile_bytes / 1024:.0f} KiB"
        )

    def _let_offer(self, fault: Fault, ask: AskAll, stack: ExitStack) -> tuple[list[EarlyAsk], str]:
        stopped = [
            stack.enter_context(self._fleet.stopped(name, fault.worker))
            for name in self._fleet.names(Role.DECODE)
        ]
        asked = ask()
        self._wait(_SEEN_WITHIN_S, lambda: all(each.prefill.done() for each in asked))
        pool = self._see(fault.target, "offering", lambda pool: pool.held_blocks > 0, pokes=True)
        return asked, f"{pool.held_blocks:.0f} blocks were held; stopped: {', '.join(stopped)}"

    def _ask(self, target: str, coordinates: Params, terms: Terms) -> list[EarlyAsk]:
        """Ask each decode engine, and the prefill engine with each."""
        prefill = self._fleet.server(target)
        return [
            self._clients.ask_early(
                prefill, self._fleet.server(name), self._new_ask(), terms, coordinates
            )
            for name in self._fleet.names(Role.DECODE)
        ]

    def _prefill(self, target: str, ask: Ask) -> Params:
        return self._clients.prefill(self._fleet.server(target), ask, self._deadline_s)

    def _see(
        self,
        name: str,
        what: str,
        is_so: Callable[[PoolReading], bool],
        *,
        pokes: bool = False,
    ) -> PoolReading:
        """Wait until an engine's metrics say something; returns them.

        Args:
            pokes: it would not compute a step by itself, of which metrics tell.
        """
        seen: list[PoolReading] = []

        def looks_so() -> bool:
            if pokes:
                self._clients.poke(self._fleet.server(name))
            reading = self._fleet.read_pool(name)
            if reading is not None and is_so(reading):
                seen.append(reading)
            return bool(seen)

        self._wait(_SEEN_WITHIN_S, looks_so)
        if not seen:
            raise UnseenError(f"{name} was not {what} within {_SEEN_WITHIN_S:g} s")
        return seen[0]

    def _prefetched_bytes(self) -> float:
        """What decode engines have prefetched since they were started."""
        readings = map(self._fleet.read_pool, self._fleet.names(Role.DECODE))
        return sum(each.prefetched_bytes for each in readings if each is not None)

    def _expect(self, label: str, at_s: float, within_s: float) -> None:
        """Note down by when requests have to have ended."""
        limit_s = within_s + MACHINE_MARGIN_S
        self._recorder.history.strikes.append(Strike(self._recorder.round, label, at_s, limit_s))

    def _wait_for(self, asked: Sequence[EarlyAsk]) -> None:
        self._wait(self._deadline_s, lambda: all(each.decode.done() for each in asked))

    def _new_ask(self) -> Ask:
        """Return a request with the longest prompt, of which no engine has a block."""
        return Ask(Manner.EARLY, self._longest, salt=f"{self._rng.getrandbits(64):016x}")


def _ends_within_s(blow: Blow, state: PromptState) -> float:
    """Return how soon a request ends whose engine was struck."""
    if blow is not Blow.STOP:
        return MISSED_WITHIN_S if state is PromptState.OFFERED else TOLD_WITHIN_S
    return HUNG_WITHIN_S if state is PromptState.OFFERED else MISSED_WITHIN_S


def _check_unanswered(asked: Sequence[EarlyAsk], state: PromptState) -> None:
    """See that nothing has gone on since an engine was seen in a state.

    Raises:
        UnseenError: it has.
    """
    for each in asked:
        is_through = each.prefill.done() and state is not PromptState.OFFERED
        if is_through or each.decode.done():
            raise UnseenError(f"a request was {state} no more")

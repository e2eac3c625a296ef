# SPDX-License-Identifier: Apache-2.0
"""Carries out what was planned, heals it, and notes down when and what it was."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial

from tools.pdstack.registry import FORGOTTEN_AFTER_S

from .clients import Clients, Params, PrefillError, Terms
from .early import EarlyNemesis, UnseenError
from .faults import EARLY, FRAMES, KILLS, MEDDLING, Fault, FaultKind, Role
from .fleet import KILLED_AFTER_S, Fleet
from .forgery import Forgery, forge
from .frames import Meddling, MeddlingChannel
from .history import FaultSpan, Recorder, Request
from .schedule import FAILED_READ_LIMIT_S, HELD_READ_LIMIT_S, Round
from .stage import Wait
from .workload import Ask, Manner

_MEDDLINGS = {
    FaultKind.DROP_FRAMES: (Meddling.DROP_REQUESTS, Meddling.DROP_REPLIES),
    FaultKind.DUPLICATE_FRAMES: (Meddling.DUPLICATE_REQUESTS, Meddling.DUPLICATE_REPLIES),
}

ON_THE_WAY_S = 15.0
"""How long a request may be on its way to an engine that the router sends none any more."""

_FORGETTING_S = 5.0
"""How long it may take on a slow machine to close what is forgotten."""

_OF_ANOTHER = "parameters of another request"


class Nemesis:
    """Strikes one fault after the other.

    Args:
        fleet: whom it strikes.
        clients: through whom it asks what no client would.
        num_turns: how many turns there are to ask for.
        recorder: where faults are noted down.
        seed: other details for another number.
        deadline_s: how long its own requests may take.
        forgotten_after_s: after how long an engine forgets another one that nobody asks for.
        early: strikes what waits for prompts.
        wait: how it waits.
    """

    def __init__(
        self,
        fleet: Fleet,
        clients: Clients,
        num_turns: int,
        recorder: Recorder,
        *,
        seed: int,
        deadline_s: float,
        forgotten_after_s: float,
        early: EarlyNemesis,
        wait: Wait,
    ) -> None:
        self._fleet = fleet
        self._clients = clients
        self._num_turns = num_turns
        self._recorder = recorder
        self._seed = seed
        self._deadline_s = deadline_s
        self._forgotten_after_s = forgotten_after_s
        self._early = early
        self._wait = wait

    def strike(self, planned: Round) -> None:
        """Do what a round has planned, and heal it.

        Raises:
            PDStackError: an engine does not come back.
        """
        rng = random.Random(f"nemesis {self._seed} {planned.number}")
        fault, began_s = planned.fault, self._recorder.now_s()
        detail = "broken off"
        try:
            detail = self._strike(fault, rng)
        except (PrefillError, UnseenError) as error:
            # Whether the engine serves again is found out in the lull.
            detail = str(error)
        finally:
            self._recorder.history.faults.append(
                FaultSpan(
                    round=planned.number,
                    kind=fault.kind,
                    target=fault.target,
                    began_s=began_s,
                    healed_s=self._recorder.now_s(),
                    detail=detail,
                )
            )

    def _strike(self, fault: Fault, rng: random.Random) -> str:
        """Strike and heal; returns what exactly was done."""
        kind = fault.kind
        if kind is FaultKind.ROLL:
            return self._roll()
        if kind in KILLS or kind is FaultKind.KILL_ROUTER:
            return self._kill(fault)
        if kind is FaultKind.STOP_PREFILL_WORKER:
            return self._stop_while_read(fault, rng)
        if kind in EARLY:
            return self._early.strike(fault)
        if kind in FRAMES:
            return self._meddle_with_frames(fault, rng)
        if kind in MEDDLING:
            return self._meddle_with_params(fault, rng)
        worker = fault.worker if kind is FaultKind.STOP_DECODE_WORKER else None
        with self._fleet.stopped(fault.target, worker) as stopped:
            self._wait(fault.hold_s)
        return stopped

    def _kill(self, fault: Fault) -> str:
        self._fleet.kill(fault.target)
        self._wait(fault.hold_s)
        # On two cores, an engine that starts under load takes minutes.
        self._clients.pause()
        self._fleet.restart(fault.target, fault.placement)
        self._clients.resume()
        return "" if fault.placement is None else f"now {fault.placement}"

    def _roll(self) -> str:
        """Let each engine be followed by another one, while all requests have to be answered."""
        took_s = []
        with self._clients.demanding():
            for name in self._fleet.names():
                self._fleet.take_out(name)
                self._wait(FORGOTTEN_AFTER_S + ON_THE_WAY_S)
                asked_s = self._recorder.now_s()
                self._fleet.ask_to_end(name)
                self._wait(KILLED_AFTER_S, partial(self._fleet.has_ended, name))
                took_s.append(f"{name} {self._recorder.now_s() - asked_s:.0f} s")
                self._fleet.bury(name)
                self._fleet.restart(name)
        return f"ended after {', '.join(took_s)}"

    def _stop_while_read(self, fault: Fault, rng: random.Random) -> str:
        """Stop a worker from which others are about to read what they were promised."""
        reads = [
            (name, ask, self._prefill(fault.target, ask))
            for name in self._fleet.names(Role.DECODE)
            for ask in [self._new_ask(Manner.HELD_READ, rng)]
        ]
        with self._fleet.stopped(fault.target, fault.worker) as stopped:
            asked = []
            for name, ask, params in reads:
                limit_s = HELD_READ_LIMIT_S if self._fleet.computes(name) else FAILED_READ_LIMIT_S
                terms = Terms(limit_s, strict=True)
                asked.append(self._clients.ask(self._fleet.server(name), ask, terms, params))
            self._wait(fault.hold_s, lambda: _all_done(asked))
        return stopped

    def _meddle_with_frames(self, fault: Fault, rng: random.Random) -> str:
        """Let handshakes go through a channel that loses messages, or brings them twice."""
        asked = []
        with ExitStack() as channels:
            for meddling in _MEDDLINGS[fault.kind]:
                for name in self._fleet.names(Role.DECODE):
                    ask = self._new_ask(Manner.MEDDLED, rng)
                    params = self._prefill(fault.target, ask)
                    channel = MeddlingChannel(params["remote_port"], meddling)
                    channels.enter_context(channel)
                    terms = Terms(
                        self._deadline_s, must_answer=not meddling.loses, label=str(meddling)
                    )
                    changed = {**params, "remote_port": channel.port}
                    server = self._fleet.server(name)
                    asked.append(self._clients.ask(server, ask, terms, changed))
            self._wait(self._deadline_s, lambda: _all_done(asked))
        if not all(meddling.loses for meddling in _MEDDLINGS[fault.kind]):
            # To the engines each channel was an engine, whose connection takes descriptors.
            self._wait(self._forgotten_after_s + _FORGETTING_S)
        return ", ".join(map(str, _MEDDLINGS[fault.kind]))

    def _meddle_with_params(self, fault: Fault, rng: random.Random) -> str:
        """Send requests with parameters of others, or with some that nobody returned."""
        asked = []
        decode = self._fleet.names(Role.DECODE)
        if fault.kind is FaultKind.MIXED_PARAMS:
            ways: Sequence[Forgery | None] = (None,) * len(decode)
        else:
            ways = fault.forgeries
        for number, forgery in enumerate(ways):
            ask, other = (self._new_ask(Manner.MEDDLED, rng) for _ in range(2))
            params, others = (self._prefill(fault.target, each) for each in (ask, other))
            changed = others if forgery is None else forge(params, forgery, others)
            label = _OF_ANOTHER if forgery is None else str(forgery)
            server = self._fleet.server(decode[number % len(decode)])
            terms = Terms(self._deadline_s, label=label)
            asked.append(self._clients.ask(server, ask, terms, changed))
        self._wait(self._deadline_s, lambda: _all_done(asked))
        return ", ".join(map(str, fault.forgeries)) or _OF_ANOTHER

    def _new_ask(self, manner: Manner, rng: random.Random) -> Ask:
        """Return a request of which no engine has a block."""
        return Ask(manner, rng.randrange(self._num_turns), salt=f"{rng.getrandbits(64):016x}")

    def _prefill(self, name: str, ask: Ask) -> Params:
        return self._clients.prefill(self._fleet.server(name), ask, self._deadline_s)


def _all_done(asked: Sequence[Future[Request]]) -> bool:
    return all(future.done() for future in asked)

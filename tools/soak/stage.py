# SPDX-License-Identifier: Apache-2.0
"""What happens around a fault: time that passes, a lull in which all comes back, probes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

from .clients import Clients, PrefillError, Terms, coordinates_of
from .faults import ROUTER, Role
from .fleet import Fleet
from .history import Lull, Recorder, Request
from .workload import Ask, Manner

_TICK_S = 0.2
_LOOK_EVERY_S = 1.0
_ROUTER_LIMIT_S = 60.0
"""How long the router may take to send requests to an engine again."""


class Wait(Protocol):
    """Lets time pass, and looks after the engines meanwhile."""

    def __call__(self, limit_s: float, until: Callable[[], bool] = lambda: False) -> None:
        """Return after a time, or once something is so."""


class EndedError(Exception):
    """An engine has ended of its own accord, and nothing is to go on."""


class Stage:
    """Engines and clients between two faults.

    Args:
        num_turns: how many turns there are to ask for.
        deadline_s: how long a request may take.
        lull_s: how long it may take until every block is free.
        keep_going: whether the end of an engine is only noted down.
        rng: chooses what is asked.
    """

    def __init__(
        self,
        fleet: Fleet,
        clients: Clients,
        recorder: Recorder,
        *,
        num_turns: int,
        deadline_s: float,
        lull_s: float,
        keep_going: bool,
        rng: random.Random,
    ) -> None:
        self._fleet = fleet
        self._clients = clients
        self._recorder = recorder
        self._num_turns = num_turns
        self._patience_s = Terms(deadline_s).patience_s
        # Nothing is stopped in a lull.
        self._terms = Terms(deadline_s, strict=True, must_answer=True)
        self._lull_s = lull_s
        self._keep_going = keep_going
        self._rng = rng
        self._looked_at_s = 0.0

    def wait(self, limit_s: float, until: Callable[[], bool] = lambda: False) -> None:
        """Return after a time, or once something is so.

        Raises:
            EndedError: an engine has ended of its own accord, and nothing is to go on.
        """
        deadline = time.monotonic() + limit_s
        while not until() and time.monotonic() < deadline:
            now = time.monotonic()
            if now - self._looked_at_s >= _LOOK_EVERY_S:
                self._looked_at_s = now
                if self._fleet.look() and not self._keep_going:
                    raise EndedError
            time.sleep(_TICK_S)

    def lull(self) -> None:
        """Stop the load, wait until every pool is whole, and see that every pair answers.

        Raises:
            EndedError: as `wait`.
        """
        self._clients.pause()
        self.wait(self._patience_s, lambda: not self._clients.in_flight)
        self.revive()
        began_s = self._recorder.now_s()
        self.wait(self._lull_s, self._all_whole)
        self._recorder.history.lulls.append(
            Lull(self._recorder.round, began_s, self._recorder.now_s(), tuple(self._fleet.names()))
        )
        probes = [
            probe
            for prefill in self._fleet.names(Role.PREFILL)
            for decode in self._fleet.names(Role.DECODE)
            for probe in self._probe(prefill, decode)
        ]
        for probe in probes:
            # It has a deadline of its own.
            probe.result()
        self._probe_router()
        self._fleet.measure_footprints()

    def revive(self) -> None:
        """Start those that have ended of their own accord.

        Raises:
            PDStackError: one of them cannot be started.
        """
        self._fleet.look()
        for name in self._fleet.missing():
            self._fleet.restart(name)

    def _all_whole(self) -> bool:
        """Whether no block of any engine is in use."""
        names = self._fleet.names()
        with ThreadPoolExecutor(len(names)) as pool:
            list(pool.map(self._clients.poke, map(self._fleet.server, names)))
        readings = self._fleet.read_pools()
        return all(name in readings and readings[name].is_whole for name in names)

    def _probe(self, prefill: str, decode: str) -> list[Future[Request]]:
        """Let a pair of engines answer something of which neither has a block.

        Where it can be asked at once, it is so, too.

        Returns:
            What will come of it; nothing where the prompt could not be computed.
        """
        ask = self._new_ask()
        sent_s = self._recorder.now_s()
        try:
            params = self._clients.prefill(self._fleet.server(prefill), ask, self._terms.deadline_s)
        except PrefillError as error:
            self._note_failed_prefill(ask, prefill, sent_s, error)
            return []
        servers = self._fleet.server(prefill), self._fleet.server(decode)
        probes = [self._clients.ask(servers[1], ask, self._terms, params)]
        if self._fleet.is_early(prefill):
            terms = replace(self._terms, label="early")
            coordinates = coordinates_of(params)
            early = self._clients.ask_early(*servers, self._new_ask(), terms, coordinates)
            probes.append(early.decode)
        return probes

    def _probe_router(self) -> None:
        """See that the router sends requests to the engines, once it knows that they are back."""
        deadline_s = self._recorder.now_s() + _ROUTER_LIMIT_S
        router = self._fleet.server(ROUTER)
        while True:
            is_last = self._recorder.now_s() >= deadline_s
            terms = self._terms if is_last else Terms(self._terms.deadline_s, strict=True)
            probe = self._clients.ask(router, self._new_ask(), terms).result()
            if is_last or probe.answered:
                return
            self.wait(1.0)

    def _new_ask(self) -> Ask:
        salt = f"{self._rng.getrandbits(64):016x}"
        return Ask(Manner.PROBE, self._rng.randrange(self._num_turns), salt=salt)

    def _note_failed_prefill(
        self, ask: Ask, prefill: str, sent_s: float, error: PrefillError
    ) -> None:
        self._recorder.history.requests.append(
            Request(
                round=self._recorder.round,
                manner=ask.manner,
                asked=prefill,
                turn=ask.turn,
                num_answers=1,
                sent_s=sent_s,
                ended_s=self._recorder.now_s(),
                deadline_s=self._terms.deadline_s,
                error=str(error),
                must_answer=True,
                label="prefill",
            )
        )

# SPDX-License-Identifier: Apache-2.0
"""A soak from its first engine to its last lull: rounds of load and faults, each judged at once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.pdstack.engine import EngineSpec, ServedModel
from tools.pdstack.errors import PDStackError
from tools.pdstack.stack import PDStack, Server
from tools.pdstack.tiny_models import write_tiny_llama

from . import checker, references, schedule, workload
from .checker import Bounds, Violation
from .clients import Clients
from .early import EarlyNemesis
from .faults import ROUTER, FaultKind
from .fleet import MAX_MODEL_TOKENS, Fleet, FleetSettings
from .history import Recorder
from .nemesis import Nemesis
from .observer import Observer
from .schedule import Round
from .stage import EndedError, Stage
from .workload import Turn

_FIRST_ROUND_S = 8.0
LULL_SLACK_S = 30.0
"""How much later than leases and reads end, a slow machine may give blocks back."""


@dataclass(frozen=True)
class SoakSettings:
    """What a soak is.

    Attributes:
        seed: other conversations, requests and faults for another number.
        duration_s: no round begins later than this, but for the first one with a fault.
        kinds: the faults that there are.
        num_clients: clients of the load.
        num_conversations: how many there are to choose from.
        deadline_s: how long a request may take while nothing is stopped.
        keep_going: whether the soak goes on after a violation.
        startup_timeout_s: how long an engine may take to become ready.
        fleet: how engines are configured.
        bounds: by how much an engine may grow.
    """

    seed: int
    duration_s: float = 600.0
    kinds: tuple[FaultKind, ...] = tuple(FaultKind)
    num_clients: int = 6
    num_conversations: int = 16
    deadline_s: float = 60.0
    keep_going: bool = False
    startup_timeout_s: float = 600.0
    fleet: FleetSettings = field(default_factory=FleetSettings)
    bounds: Bounds = field(default_factory=Bounds)

    @property
    def lull_s(self) -> float:
        """How long it may take until every block is free."""
        return self.fleet.lease_s + self.fleet.read_timeout_s + LULL_SLACK_S


class Soak:
    """One soak.

    Args:
        settings: what it is.
        run_dir: where the model and the logs go.
        on_wait: as `PDStack`'s.
        say: told what is going on.

    Attributes:
        recorder: what has been seen.
        violations: what was found not to hold, the first one first.
    """

    def __init__(
        self,
        settings: SoakSettings,
        run_dir: Path,
        *,
        on_wait: Callable[[Sequence[Server]], None] = lambda _: None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._on_wait = on_wait
        self._say = say
        self.recorder = Recorder()
        self.violations: list[Violation] = []

    def run(self) -> None:
        """Start engines, go through rounds until the time is over, and end everything.

        Raises:
            PDStackError: engines cannot be started at all.
        """
        model = write_tiny_llama(self._run_dir / "model")
        turns = self._reference_turns(model)
        self._say(f"{len(turns)} turns are answered by one engine")
        fleet = Fleet(
            model,
            self._run_dir,
            schedule.SEATS,
            self._settings.fleet,
            self.recorder,
            startup_timeout_s=self._settings.startup_timeout_s,
            on_wait=self._on_wait,
        )
        try:
            fleet.start()
            # Nothing has been noted down yet: the history begins with the first round.
            self.recorder.restart_clock()
            with (
                Clients(model.name, turns, self.recorder, self._settings.deadline_s) as clients,
                Observer(fleet.read_pools),
            ):
                self._go_through_rounds(fleet, clients, turns)
        finally:
            fleet.close()

    def _reference_turns(self, model: ServedModel) -> tuple[Turn, ...]:
        """Let an engine by itself answer everything that will be asked."""
        settings = self._settings
        planned = workload.conversations(settings.seed, settings.num_conversations)
        with PDStack(
            model,
            self._run_dir,
            startup_timeout_s=settings.startup_timeout_s,
            on_wait=self._on_wait,
        ) as stack:
            spec = EngineSpec("reference", kv_transfer=None, max_model_len=MAX_MODEL_TOKENS)
            (engine,) = stack.start_engines(spec)
            return references.answer_all(engine.url, model.name, planned)

    def _go_through_rounds(self, fleet: Fleet, clients: Clients, turns: Sequence[Turn]) -> None:
        settings = self._settings
        stage = Stage(
            fleet,
            clients,
            self.recorder,
            num_turns=len(turns),
            deadline_s=settings.deadline_s,
            lull_s=settings.lull_s,
            keep_going=settings.keep_going,
            rng=random.Random(f"probes {settings.seed}"),
        )
        nemesis = Nemesis(
            fleet,
            clients,
            len(turns),
            self.recorder,
            seed=settings.seed,
            deadline_s=settings.deadline_s,
            forgotten_after_s=settings.fleet.engine_ttl_s,
            early=EarlyNemesis(
                fleet,
                clients,
                self.recorder,
                turns,
                seed=settings.seed,
                deadline_s=settings.deadline_s,
                wait=stage.wait,
            ),
            wait=stage.wait,
        )
        clients.start_load(lambda: fleet.server(ROUTER), settings.seed, settings.num_clients)
        planned = schedule.plan(settings.seed, settings.kinds, schedule.SEATS)
        for number in itertools.count():
            self.recorder.round = number
            # In a first one without a fault: what does not hold there is not the nemesis' doing.
            self._go_through(next(planned) if number else None, stage, nemesis, clients)
            if self._judge(turns) and not settings.keep_going:
                return
            # However slow the machine is, something has gone wrong in the end.
            if number and self.recorder.now_s() >= settings.duration_s:
                self._find(checker.check_whole(self.recorder.history))
                return

    def _go_through(
        self, planned: Round | None, stage: Stage, nemesis: Nemesis, clients: Clients
    ) -> None:
        what = "no fault" if planned is None else f"{planned.fault.kind} {planned.fault.target}"
        self._tell(f"round {self.recorder.round}: {what}")
        try:
            # Those whom a round before could not start.
            stage.revive()
            clients.resume()
            if planned is None:
                stage.wait(_FIRST_ROUND_S)
            else:
                stage.wait(planned.lead_s)
                nemesis.strike(planned)
                stage.wait(planned.tail_s)
            stage.lull()
        except EndedError:
            # It is in the history, and the checker tells.
            return
        except PDStackError as error:
            self._tell(str(error))

    def _judge(self, turns: Sequence[Turn]) -> bool:
        """Check all that has been seen, tell what is new, and return whether anything is wrong."""
        answers = [turn.answer for turn in turns]
        self._find(checker.check(self.recorder.history, answers, self._settings.bounds))
        return bool(self.violations)

    def _find(self, violations: Sequence[Violation]) -> None:
        """Note down what must not be, and tell what is new."""
        known = set(self.violations)
        new = [each for each in violations if each not in known]
        self.violations += new
        for each in new:
            self._tell(f"VIOLATED: {each.invariant}: {each.subject}: {each.what}")

    def _tell(self, what: str) -> None:
        self._say(f"{self.recorder.now_s():6.0f} s  {what}")

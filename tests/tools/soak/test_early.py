# SPDX-License-Identifier: Apache-2.0
"""A prefill engine is struck while it is seen in a state, and requests that wait have a limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.tools.soak.histories import pool, request
from tools.soak.clients import EarlyAsk, Server
from tools.soak.early import (
    MACHINE_MARGIN_S,
    MISSED_WITHIN_S,
    TOLD_WITHIN_S,
    EarlyNemesis,
    UnseenError,
)
from tools.soak.faults import EARLY, Blow, Fault, FaultKind, PromptState, Role
from tools.soak.fleet import MOST_AT_ONCE, FleetSettings
from tools.soak.history import PoolReading, Recorder
from tools.soak.workload import Turn

TURNS = (Turn((("user", "x" * 300),), 8, "a"), Turn((("user", "x" * 900),), 8, "b"))
P = "prefill-1"
DECODE = ("decode-1", "decode-2")
KINDS = pytest.mark.parametrize("kind", EARLY, ids=str)


class Fakes:
    """Engines and clients in one: an engine is as full as what it was asked for makes it."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.done: list[Any] = []
        self.asked: list[tuple[EarlyAsk, Any, Any, dict[str, Any]]] = []
        self.in_flight = 0
        self.num_long = self.num_held = 0
        self.goes_on = False

    def names(self, role: Role) -> tuple[str, ...]:
        """Those of the decode engines."""
        assert role is Role.DECODE
        return DECODE

    def server(self, name: str) -> Server:
        """Where nothing listens."""
        return Server(name, f"http://{name}")

    def read_pool(self, name: str) -> PoolReading:
        """What an engine has at the moment."""
        if name != P:
            return pool(engine=name)
        num_waiting = len([each for each, *_ in self.asked if not each.prefill.done()])
        is_short = bool(self.num_held and num_waiting)
        has_offers = self.num_held or any(each.prefill.done() for each, *_ in self.asked)
        return pool(
            engine=name,
            running=float(self.num_long),
            waiting=float(num_waiting if self.num_long else 0),
            held_blocks=8.0 * bool(has_offers),
            usage=0.75 * bool(self.num_held) + 0.1 * is_short,
        )

    @contextmanager
    def stopped(self, name: str, worker: int | None = None) -> Iterator[str]:
        """Note down the beginning and the end."""
        self.done.append(("stop", name))
        yield name
        self.done.append(("continue", name))

    def kill(self, name: str) -> None:
        """Requests that wait for it end, once time passes."""
        self.done.append(("kill", name))

    def restart(self, name: str) -> None:
        """It has nothing any more."""
        self.done.append(("restart", name))

    def pause(self) -> None:
        """Note it down."""
        self.done.append("pause")

    def resume(self) -> None:
        """Note it down."""
        self.done.append("resume")

    def poke(self, server: Server) -> None:
        """Nothing is to be done for metrics."""

    @contextmanager
    def occupied(self, server: Server, count: int) -> Iterator[None]:
        """Its seats are taken."""
        self.num_long = count
        yield
        self.num_long = 0

    def prefill(self, server: Server, ask: Any, limit_s: float) -> dict[str, Any]:
        """Hold blocks, which are read only where it is asked for them."""
        self.num_held += 1
        return {
            "do_remote_prefill": True,
            "remote_engine_id": "first",
            "remote_host": "127.0.0.1",
            "remote_port": 9,
            "remote_block_ids": [[1]],
        }

    def ask(self, server: Server, ask: Any, terms: Any, params: Any) -> Future[Any]:
        """Read what was prefilled."""
        self.num_held -= 1
        return ended()

    def ask_early(
        self, prefill: Server, decode: Server, ask: Any, terms: Any, coordinates: dict[str, Any]
    ) -> EarlyAsk:
        """Answer once nothing keeps it from that, and at once where the engine was restarted."""
        assert prefill.name == P
        is_kept = bool(self.num_long or self.num_held)
        is_unread = ("stop", decode.name) in self.done
        early = EarlyAsk(Future(), Future())
        if not is_kept or self.goes_on:
            early.prefill.set_result(True)
        if (not is_kept and not is_unread) or self.goes_on or terms.must_answer:
            early.decode.set_result(request())
        self.done.append(("ask", decode.name))
        self.asked.append((early, ask, terms, coordinates))
        return early

    def wait(self, limit_s: float, until: Callable[[], bool] = lambda: False) -> None:
        """Let no time pass; but requests that wait for a struck engine end."""
        if (("kill", P) in self.done or ("stop", P) in self.done) and not until():
            for early, *_ in self.asked:
                if not early.decode.done():
                    early.decode.set_result(request(status=500))
        until()


def ended() -> Future[Any]:
    """A request that is answered."""
    future: Future[Any] = Future()
    future.set_result(request())
    return future


class Scene:
    """A nemesis among fakes."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.fakes = Fakes(self.recorder)
        self.nemesis = EarlyNemesis(
            self.fakes,
            self.fakes,
            self.recorder,
            TURNS,
            seed=1,
            deadline_s=30.0,
            wait=self.fakes.wait,
        )

    def strike(self, kind: FaultKind) -> str:
        """Strike once; returns what was seen."""
        return self.nemesis.strike(Fault(kind, P, 7.0))

    def steps(self, *words: str) -> list[Any]:
        """What was done to engines, as far as the words tell."""
        return [each for each in self.fakes.done if each[0] in words]


@pytest.fixture
def scene() -> Scene:
    """A nemesis among fakes."""
    return Scene()


@KINDS
def test_engine_is_struck_in_its_state_and_comes_back(scene, kind):
    """Each decode engine waits for it then, and is asked again once it is back at its address."""
    blow, state = EARLY[kind]
    seen = scene.strike(kind)
    assert seen
    struck = scene.fakes.asked[: len(DECODE)]
    assert [terms.label for _, _, terms, _ in struck] == ["when P was struck"] * len(DECODE)
    blows = [("stop", P), ("continue", P)] if blow is Blow.STOP else [("kill", P), ("restart", P)]
    assert [each for each in scene.fakes.done if each in blows] == blows
    back = [each for each in scene.fakes.asked if each[2].must_answer]
    assert len(back) == (0 if blow is Blow.STOP else len(DECODE))
    # With the longest prompt, and what routers still know of the engine before.
    for _, ask, _, coordinates in scene.fakes.asked:
        assert ask.turn == 1 and coordinates["remote_engine_id"] == "first"
        assert "remote_block_ids" not in coordinates
    assert (scene.fakes.done[0], scene.fakes.done[-1]) == ("pause", "resume")
    assert scene.fakes.num_long == 0
    assert (state is PromptState.OFFERED) is (("stop", DECODE[0]) in scene.fakes.done)


@KINDS
def test_requests_that_wait_have_a_limit(scene, kind):
    """A second where who knew it is gone, ten where it is silent, and a read's where it offered."""
    blow, state = EARLY[kind]
    scene.strike(kind)
    first, *others = scene.recorder.history.strikes
    within_s = {
        (False, False): TOLD_WITHIN_S,
        (True, True): FleetSettings.read_timeout_s,
    }.get((blow is Blow.STOP, state is PromptState.OFFERED), MISSED_WITHIN_S)
    assert (first.label, first.limit_s) == ("when P was struck", within_s + MACHINE_MARGIN_S)
    # One that asks while it is gone has ten.
    limits_s = [MISSED_WITHIN_S + MACHINE_MARGIN_S] if blow is Blow.KILL else []
    assert [each.limit_s for each in others] == limits_s


def test_the_two_limits_can_be_told_apart():
    """However slow the machine may be."""
    assert TOLD_WITHIN_S + MACHINE_MARGIN_S < MISSED_WITHIN_S


def test_decode_engines_go_on_once_the_engine_is_struck(scene):
    """Or they would see the offers before."""
    scene.strike(FaultKind.EARLY_KILL_OFFERED)
    steps = scene.steps("stop", "kill", "continue", "restart")
    assert steps[: len(DECODE)] == [("stop", name) for name in DECODE]
    assert steps[len(DECODE)] == ("kill", P)
    assert sorted(steps[len(DECODE) + 1 : -1]) == [("continue", name) for name in DECODE]


def test_engine_that_goes_on_is_not_struck(scene):
    """What was answered meanwhile was in no state any more."""
    scene.fakes.goes_on = True
    with pytest.raises(UnseenError):
        scene.strike(FaultKind.EARLY_KILL_COMPUTING)
    assert scene.recorder.history.strikes == [] and scene.steps("kill") == []
    assert scene.fakes.done[-1] == "resume"


def test_engine_whose_requests_were_preempted_at_once_is_seen_by_what_was_read(scene, monkeypatch):
    """Blocks that they had are not in use any more, for as long as there is no room for all."""
    reading = scene.fakes.read_pool

    def preempts(name: str) -> PoolReading:
        if name == P:
            told = reading(name)
            return replace(told, usage=min(told.usage, 0.75))
        has_read = bool(scene.fakes.asked) and name == DECODE[1]
        return pool(engine=name, prefetched_bytes=4096.0 + 1024 * has_read)

    monkeypatch.setattr(scene.fakes, "read_pool", preempts)
    seen = scene.strike(FaultKind.EARLY_STOP_COMPUTING)
    assert seen == "75% of the pool were held, 75% in use; decode engines had prefetched 1 KiB"


def test_state_that_is_not_reached_is_told(scene, monkeypatch):
    """Nothing is struck at a random moment instead."""
    reading = scene.fakes.read_pool

    def never_full(name: str) -> PoolReading:
        told = reading(name)
        return replace(told, running=min(told.running, MOST_AT_ONCE - 1.0))

    monkeypatch.setattr(scene.fakes, "read_pool", never_full)
    with pytest.raises(UnseenError, match="prefill-1 was not full within"):
        scene.strike(FaultKind.EARLY_STOP_KNOWN)
    assert scene.recorder.history.strikes == [] and scene.steps("stop") == []

# SPDX-License-Identifier: Apache-2.0
"""In a lull everything is asked for, and who does not answer is noted down."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.tools.soak.histories import pool
from tools.soak.checker import Invariant, check
from tools.soak.clients import Clients, Server
from tools.soak.faults import Role
from tools.soak.history import Recorder
from tools.soak.stage import EndedError, Stage
from tools.soak.workload import Turn


class FakeFleet:
    """A prefill and a decode engine, which are the same server, and a router that is, too."""

    def __init__(self, server: Server, recorder: Recorder) -> None:
        self.server_of: dict[str, Server] = {}
        self.usage = 0.0
        self.ended: list[str] = []
        self.restarted: list[str] = []
        self._server = server
        self._recorder = recorder

    def names(self, role: Role | None = None) -> list[str]:
        """One of each role."""
        return [f"{each}-1" for each in Role if role in (None, each)]

    def server(self, name: str) -> Server:
        """The same for all, unless a test has another one."""
        return self.server_of.get(name, Server(name, self._server.url))

    def is_early(self, name: str) -> bool:
        """The prefill engine is."""
        return name == "prefill-1"

    def look(self) -> list[str]:
        """Those that a test has let end."""
        return self.ended

    def missing(self) -> list[str]:
        """The same."""
        return self.ended

    def restart(self, name: str) -> None:
        """Note it down."""
        self.restarted.append(name)

    def read_pools(self) -> dict[str, Any]:
        """All have the usage that a test wants."""
        at_s = self._recorder.now_s()
        readings = {name: pool(at_s=at_s, engine=name, usage=self.usage) for name in self.names()}
        self._recorder.history.pools += readings.values()
        return readings

    def measure_footprints(self) -> None:
        """Nothing is of interest."""


class Scene:
    """A stage with fakes."""

    def __init__(self, engine: Server, answer: str, keep_going: bool) -> None:
        self.recorder = Recorder()
        turn = Turn((("user", "question"),), len(answer), answer)
        self.clients = Clients("model", (turn,), self.recorder, deadline_s=30.0)
        self.fleet = FakeFleet(engine, self.recorder)
        self.answers = [answer]
        self.stage = Stage(
            self.fleet,
            self.clients,
            self.recorder,
            num_turns=1,
            deadline_s=30.0,
            lull_s=1.0,
            keep_going=keep_going,
            rng=random.Random(1),
        )

    def violated(self) -> set[Invariant]:
        """What the checker finds."""
        return {each.invariant for each in check(self.recorder.history, self.answers)}


@pytest.fixture
def scene(engine: Server, request: pytest.FixtureRequest) -> Iterator[Scene]:
    """A stage with fakes; its parameter says whether it keeps going."""
    from tests.tools.soak.fake_server import answer_to

    answer = answer_to({"messages": [{"content": "question"}], "max_tokens": 12})
    scene = Scene(engine, answer, getattr(request, "param", False))
    yield scene
    scene.clients.close()


def test_lull_in_which_all_comes_back(scene):
    """Each pair and the router answer, and nothing is violated."""
    scene.stage.lull()
    requests = scene.recorder.history.requests
    asked = [(each.asked, each.must_answer, each.label) for each in requests]
    # One after the other, and both at once.
    assert sorted(asked[:2]) == [("decode-1", True, ""), ("decode-1", True, "early")]
    assert asked[2:] == [("router", False, "")]
    assert scene.violated() == set()


def test_blocks_that_stay_are_waited_for_and_told(scene):
    """The lull has an end, and its last readings tell."""
    scene.fleet.usage = 0.5
    scene.stage.lull()
    (lull,) = scene.recorder.history.lulls
    assert lull.ended_s - lull.began_s >= 1.0
    assert scene.violated() == {Invariant.POOLS}


@pytest.mark.parametrize("name", ["prefill-1", "decode-1"])
def test_engine_that_does_not_answer_is_told(scene, name):
    """Whichever of a pair it is."""
    scene.fleet.server_of[name] = Server(name, "http://127.0.0.1:9")
    scene.stage.lull()
    assert scene.violated() == {Invariant.SERVICE}


def test_end_of_an_engine_ends_the_wait(scene):
    """Nothing goes on with an engine less."""
    scene.fleet.ended = ["decode-1"]
    with pytest.raises(EndedError):
        scene.stage.wait(60.0)


@pytest.mark.parametrize("scene", [True], indirect=True)
def test_ended_engine_is_started_again_where_the_soak_goes_on(scene):
    """The next round has all engines."""
    scene.fleet.ended = ["decode-1"]
    scene.stage.wait(0.1)
    scene.stage.revive()
    assert scene.fleet.restarted == ["decode-1"]

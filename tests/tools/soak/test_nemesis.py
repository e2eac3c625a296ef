# SPDX-License-Identifier: Apache-2.0
"""The nemesis does what is planned, heals it whatever happens, and notes down what it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest

from tests.tools.soak.histories import request
from tools.pdstack.errors import PDStackError
from tools.pdstack.layout import Layout
from tools.pdstack.registry import FORGOTTEN_AFTER_S
from tools.soak.clients import PrefillError, Server
from tools.soak.early import UnseenError
from tools.soak.faults import FLEET, Fault, FaultKind, Placement, Role
from tools.soak.fleet import KILLED_AFTER_S
from tools.soak.forgery import Forgery
from tools.soak.history import Recorder
from tools.soak.nemesis import ON_THE_WAY_S, Nemesis
from tools.soak.schedule import FAILED_READ_LIMIT_S, HELD_READ_LIMIT_S, Round


class FakeFleet:
    """Four engines that note down what is done to them."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    def names(self, role: Role | None = None) -> list[str]:
        """Two of each role."""
        roles = list(Role) if role is None else [role]
        return [f"{each}-{number}" for each in roles for number in (1, 2)]

    def computes(self, name: str) -> bool:
        """The second one does."""
        return name == "decode-2"

    def server(self, name: str) -> Server:
        """Where nobody listens."""
        return Server(name, f"http://{name}")

    @contextmanager
    def stopped(self, name: str, worker: int | None = None) -> Iterator[str]:
        """Note down the beginning and the end."""
        self.done.append(("stop", name, worker))
        try:
            yield "a process"
        finally:
            self.done.append(("continue", name, worker))

    def kill(self, name: str) -> None:
        """Note it down."""
        self.done.append(("kill", name))

    def take_out(self, name: str) -> None:
        """Note it down."""
        self.done.append(("take out", name))

    def ask_to_end(self, name: str) -> None:
        """Note it down."""
        self.done.append(("ask to end", name))

    def has_ended(self, name: str) -> bool:
        """It has, once it was asked to."""
        return ("ask to end", name) in self.done

    def bury(self, name: str) -> None:
        """Note it down."""
        self.done.append(("bury", name))

    def restart(self, name: str, placement: Placement | None = None) -> None:
        """Note it down."""
        self.done.append(("restart", name, placement))


class FakeClients:
    """Clients that are answered at once, and note down what they ask."""

    def __init__(self, done: list[Any]) -> None:
        self.done = done
        self.asked: list[tuple[str, Any, Any, dict[str, Any]]] = []
        self.prefill_error: Exception | None = None

    def pause(self) -> None:
        """Note it down."""
        self.done.append("pause")

    def resume(self) -> None:
        """Note it down."""
        self.done.append("resume")

    @contextmanager
    def demanding(self) -> Iterator[None]:
        """Note down the beginning and the end."""
        self.done.append("all have to be answered")
        yield
        self.done.append("some may fail")

    def prefill(self, server: Server, ask: Any, limit_s: float) -> dict[str, Any]:
        """Return parameters that tell whose they are."""
        if self.prefill_error is not None:
            raise self.prefill_error
        self.done.append(("prefill", server.name))
        return {
            "remote_request_id": ask.salt,
            "remote_block_ids": [[1, 2]],
            "remote_host": "127.0.0.1",
            "remote_port": 9,
        }

    def ask(self, server: Server, ask: Any, terms: Any, params: Any) -> Future[Any]:
        """Answer at once."""
        self.done.append(("ask", server.name))
        self.asked.append((server.name, ask, terms, params))
        future: Future[Any] = Future()
        future.set_result(request())
        return future


class Scene:
    """A nemesis among fakes."""

    def __init__(self) -> None:
        self.fleet, self.recorder = FakeFleet(), Recorder()
        self.clients = FakeClients(self.fleet.done)
        self.wait_error: Exception | None = None
        self.unseen: UnseenError | None = None
        self.nemesis = Nemesis(
            self.fleet,
            self.clients,
            5,
            self.recorder,
            seed=1,
            deadline_s=30.0,
            forgotten_after_s=60.0,
            early=self,
            wait=self.wait,
        )

    def wait(self, limit_s: float, until: Callable[[], bool] = lambda: False) -> None:
        """Let no time pass."""
        self.fleet.done.append(("wait", limit_s, until()))
        if self.wait_error is not None:
            raise self.wait_error

    def strike_once(self, kind: FaultKind, target: str, **fields: Any) -> list[Any]:
        """Strike once; returns what was done, without asking for the blocks of requests."""
        self.nemesis.strike(Round(1, Fault(kind, target, 7.0, **fields), 0.0, 0.0))
        return self.fleet.done

    def strike(self, fault: Fault) -> str:
        """Stand in for what strikes engines that are waited for."""
        if self.unseen is not None:
            raise self.unseen
        return f"{fault.target} was seen"


@pytest.fixture
def scene() -> Scene:
    """A nemesis among fakes."""
    return Scene()


@pytest.mark.parametrize(
    ("kind", "worker"),
    [
        (FaultKind.STOP_DECODE, None),
        (FaultKind.STOP_PREFILL, None),
        (FaultKind.STOP_DECODE_WORKER, 3),
    ],
)
def test_stopped_processes_go_on(scene, kind, worker):
    """A whole engine is stopped, or one worker of it, for as long as was planned."""
    assert scene.strike_once(kind, "engine", worker=3) == [
        ("stop", "engine", worker),
        ("wait", 7.0, False),
        ("continue", "engine", worker),
    ]
    (span,) = scene.recorder.history.faults
    assert (span.kind, span.target, span.detail) == (kind, "engine", "a process")
    assert span.began_s <= span.healed_s


def test_stopped_processes_go_on_whatever_happens(scene):
    """Also where another engine ends meanwhile; the fault is noted down as broken off."""
    scene.wait_error = PDStackError("another engine has ended")
    with pytest.raises(PDStackError):
        scene.strike_once(FaultKind.STOP_DECODE, "engine")
    assert scene.fleet.done[-1] == ("continue", "engine", None)
    assert [span.detail for span in scene.recorder.history.faults] == ["broken off"]


@pytest.mark.parametrize("kind", [FaultKind.KILL_PREFILL, FaultKind.KILL_ROUTER])
def test_killed_servers_are_started_again(scene, kind):
    """After as long as was planned under load, as they were before, and without any load."""
    assert scene.strike_once(kind, "server") == [
        ("kill", "server"),
        ("wait", 7.0, False),
        "pause",
        ("restart", "server", None),
        "resume",
    ]


def test_each_engine_is_followed_while_all_requests_have_to_be_answered(scene):
    """It is taken out, has the time for what is on its way, and ends by itself, under load."""
    done = scene.strike_once(FaultKind.ROLL, FLEET)
    assert (done[0], done[-1]) == ("all have to be answered", "some may fail")
    names = [f"{role}-{number}" for role in Role for number in (1, 2)]
    assert done[1:-1] == [
        step
        for name in names
        for step in (
            ("take out", name),
            ("wait", FORGOTTEN_AFTER_S + ON_THE_WAY_S, False),
            ("ask to end", name),
            ("wait", KILLED_AFTER_S, True),
            ("bury", name),
            ("restart", name, None),
        )
    ]
    (span,) = scene.recorder.history.faults
    assert span.detail.startswith("ended after prefill-1 0 s, ")


def test_engine_comes_back_with_another_layout(scene):
    """The layout is the one that was planned, and is told."""
    placement = Placement(Layout(2, 1))
    done = scene.strike_once(FaultKind.RELAYOUT_DECODE, "decode-1", placement=placement)
    assert ("restart", "decode-1", placement) in done
    assert scene.recorder.history.faults[0].detail == "now tp2pp1"


def test_reads_are_asked_for_while_their_source_is_stopped(scene):
    """Their blocks were promised before; their deadlines do not wait for the worker."""
    done = scene.strike_once(FaultKind.STOP_PREFILL_WORKER, "prefill-1", worker=1)
    assert [each[0] for each in done] == [
        *("prefill", "prefill", "stop", "ask", "ask", "wait", "continue")
    ]
    assert done[-2] == ("wait", 7.0, True)
    for name, ask, terms, params in scene.clients.asked:
        limits_s = {"decode-1": FAILED_READ_LIMIT_S, "decode-2": HELD_READ_LIMIT_S}
        assert (terms.strict, terms.deadline_s) == (True, limits_s[name])
        assert params["remote_request_id"] == ask.salt


def test_parameters_are_mixed_up(scene):
    """Every request has the parameters of another one, and may fail."""
    scene.strike_once(FaultKind.MIXED_PARAMS, "prefill-2")
    assert len(scene.clients.asked) == 2
    for _, ask, terms, params in scene.clients.asked:
        assert params["remote_request_id"] != ask.salt
        assert not terms.must_answer


def test_parameters_are_forged(scene):
    """One request for each forgery, at the decode engines in turn."""
    forgeries = (Forgery.UNKNOWN_REQUEST, Forgery.REVERSED_BLOCKS, Forgery.MISSING_ADDRESS)
    scene.strike_once(FaultKind.FORGED_PARAMS, "prefill-1", forgeries=forgeries)
    names, _, terms, params = zip(*scene.clients.asked, strict=True)
    assert names == ("decode-1", "decode-2", "decode-1")
    assert [each.label for each in terms] == [str(forgery) for forgery in forgeries]
    assert params[0]["remote_request_id"] == "nobody's"
    assert params[1]["remote_block_ids"] == [[2, 1]]
    assert "remote_port" not in params[2]


@pytest.mark.parametrize("kind", [FaultKind.DROP_FRAMES, FaultKind.DUPLICATE_FRAMES])
def test_handshakes_go_through_a_channel_that_meddles(scene, kind):
    """Each decode engine meets each way; where messages only come twice, it must be answered."""
    scene.strike_once(kind, "prefill-1")
    assert len(scene.clients.asked) == 4
    assert len({params["remote_port"] for *_, params in scene.clients.asked} | {9}) == 5
    for _, _, terms, _ in scene.clients.asked:
        assert terms.must_answer is (kind is FaultKind.DUPLICATE_FRAMES)
    waits_s = [each[1] for each in scene.fleet.done if each[0] == "wait"]
    # Connections with channels that were read through are closed before engines are measured.
    assert any(wait_s > 60.0 for wait_s in waits_s) is (kind is FaultKind.DUPLICATE_FRAMES)


def test_engine_that_does_not_prefill_is_told(scene):
    """Nothing is raised: the lull finds out whether it serves again."""
    scene.clients.prefill_error = PrefillError("prefill-1 did not prefill: why")
    scene.strike_once(FaultKind.MIXED_PARAMS, "prefill-1")
    assert "prefill-1 did not prefill" in scene.recorder.history.faults[0].detail


def test_engine_that_is_waited_for_is_struck_apart(scene):
    """What was seen is told; so is that nothing was, and the soak goes on."""
    scene.strike_once(FaultKind.EARLY_KILL_KNOWN, "prefill-1")
    scene.unseen = UnseenError("prefill-1 was not full")
    scene.strike_once(FaultKind.EARLY_KILL_KNOWN, "prefill-1")
    details = [span.detail for span in scene.recorder.history.faults]
    assert details == ["prefill-1 was seen", "prefill-1 was not full"]

# SPDX-License-Identifier: Apache-2.0
"""In which order an engine is taken out, ended and followed, and what a roll comes to."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest

from tests.tools.pdstack.fake_engines import WORDS, fake_engine
from tools.pdstack import cli, roll, roll_cli
from tools.pdstack.accuracy import Completion
from tools.pdstack.engine import UPSTREAM, EngineSpec, ServedModel
from tools.pdstack.errors import PDStackError
from tools.pdstack.layout import Layout
from tools.pdstack.load import Sample
from tools.pdstack.registry import FORGOTTEN_AFTER_S, Registry, Role
from tools.pdstack.roll import SHUTDOWN_TIMEOUT_S, Address, Fleet, Rolling
from tools.pdstack.roll_cli import Rolled, RollSettings
from tools.pdstack.stack import PDStack

SETTLE_S = 10.0
SCRIPTS = Path("next/bin")


class Stage:
    """A stack and a registry that note down what is done, on a clock of their own.

    Attributes:
        events: what has happened, in order.
        ends_after_s: how long an engine takes to end.
        status: what it ends with.
    """

    def __init__(self, model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[Any] = []
        self.specs: list[EngineSpec] = []
        self.ends_after_s = 2.0
        self.status = 0
        self._now_s = 0.0
        # The module's own: threads of the load go by the machine's.
        clock = SimpleNamespace(monotonic=lambda: self._now_s, sleep=self._sleep)
        monkeypatch.setattr(roll, "time", clock)
        monkeypatch.setattr(roll, "version", lambda engine: engine.spec.scripts or "first")
        self.stack = create_autospec(PDStack, instance=True)
        self.stack.model = model
        self.stack.start_engines.side_effect = self._start
        self.stack.stop.side_effect = lambda engine: self.events.append(("gone", engine.name))
        self.registry = create_autospec(Registry, instance=True)
        self.registry.router_args = ("--there",)
        self.registry.admit.side_effect = lambda url, role: self.events.append(("in", url))
        self.registry.take_out.side_effect = lambda url: self.events.append(("out", url))

    def _sleep(self, seconds: float) -> None:
        self._now_s += seconds

    def _start(self, *specs: EngineSpec) -> list[SimpleNamespace]:
        self.specs += specs
        self.events += [("started", spec.name) for spec in specs]
        return [self._engine(spec) for spec in specs]

    def _engine(self, spec: EngineSpec) -> SimpleNamespace:
        asked: list[float] = []

        def request_stop() -> None:
            asked.append(self._now_s)
            self.events.append(("SIGTERM", spec.name, round(self._now_s, 3)))

        class Child:
            @property
            def exit_status(_self) -> int | None:
                ended = asked and self._now_s >= asked[0] + self.ends_after_s
                return self.status if ended else None

        child = Child()
        child.request_stop = request_stop  # type: ignore[attr-defined]
        url = f"http://h:{spec.port}"
        return SimpleNamespace(name=spec.name, url=url, port=spec.port, spec=spec, child=child)


@pytest.fixture
def stage(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """Nothing has happened yet."""
    return Stage(model, monkeypatch)


def _rolling(stage: Stage) -> Rolling:
    fleet = Fleet([Layout(1, 2)], [Layout(2, 1)], settle_s=SETTLE_S)
    rolling = Rolling(stage.stack, fleet, stage.registry)
    rolling.start()
    return rolling


def test_all_are_admitted_before_the_router_is_started(stage: Stage) -> None:
    """It hears of them, and its command line names none."""
    _rolling(stage)
    prefill, decode = stage.specs
    assert stage.events[2:] == [
        ("in", f"http://h:{prefill.port}"),
        ("in", f"http://h:{decode.port}"),
    ]
    roles = [call.args[1] for call in stage.registry.admit.call_args_list]
    assert roles == [Role.PREFILL, Role.DECODE]
    (prefills, decodes, spec) = stage.stack.start_router.call_args.args
    assert (prefills, decodes, spec.extra_args) == ([], [], ("--there",))
    assert [each.kv_transfer.role for each in stage.specs] == ["kv_producer", "kv_consumer"]
    for each in stage.specs:
        assert ("--shutdown-timeout", str(SHUTDOWN_TIMEOUT_S)) == each.extra_args[2:4]
        assert each.grace_s > SHUTDOWN_TIMEOUT_S


def test_at_the_same_address_one_has_ended_before_the_next_starts(stage: Stage) -> None:
    """It is taken out first, and what is on its way to it has the time to come."""
    rolling = _rolling(stage)
    first = stage.specs[0]
    del stage.events[:]
    found = rolling.roll(Address.SAME, SCRIPTS)
    url = f"http://h:{first.port}"
    out_for_s = FORGOTTEN_AFTER_S + SETTLE_S
    assert stage.events[:5] == [
        ("out", url),
        ("SIGTERM", "prefill-1.1", pytest.approx(out_for_s, abs=0.5)),
        ("gone", "prefill-1.1"),
        ("started", "prefill-1.2"),
        ("in", url),
    ]
    follower = stage.specs[2]
    assert (follower.port, follower.side_channel_port) == (first.port, first.side_channel_port)
    assert follower.scripts == SCRIPTS and follower.layout == first.layout
    assert [each.name for each in found] == ["prefill-1", "decode-1"]
    assert [(each.before, each.after) for each in found] == [("first", SCRIPTS)] * 2
    assert all(each.ended_after_s == pytest.approx(2.0, abs=0.5) for each in found)


def test_fleet_of_upstreams_connector_is_followed_by_ours(stage: Stage) -> None:
    """Requests between the two kinds are computed meanwhile, at either end of the roll."""
    fleet = Fleet([Layout()], [Layout()], settle_s=SETTLE_S, from_stock=True)
    rolling = Rolling(stage.stack, fleet, stage.registry)
    rolling.start()
    rolling.roll(Address.OTHER, None)
    transfers = [each.kv_transfer for each in stage.specs]
    assert [each.module_path for each in transfers] == [UPSTREAM.module_path] * 2 + [None] * 2
    assert {each.load_failure_policy for each in transfers} == {"recompute"}


def test_at_another_address_the_next_serves_before_one_is_taken_out(stage: Stage) -> None:
    """There is never one less."""
    rolling = _rolling(stage)
    first = stage.specs[0]
    del stage.events[:]
    rolling.roll(Address.OTHER, None)
    follower = stage.specs[2]
    assert follower.port != first.port
    assert [each[:2] for each in stage.events[:4]] == [
        ("started", "prefill-1.2"),
        ("in", f"http://h:{follower.port}"),
        ("out", f"http://h:{first.port}"),
        ("SIGTERM", "prefill-1.1"),
    ]


@pytest.mark.parametrize(
    ("ends_after_s", "status", "how"),
    [(2.0, 137, "was ended by SIGKILL"), (2.0, 1, "exit status 1"), (1000.0, 0, "was killed")],
)
def test_an_engine_that_does_not_end_by_itself_ends_the_roll(
    stage: Stage, ends_after_s: float, status: int, how: str
) -> None:
    """What it held for others may be lost, so that it is told of."""
    rolling = _rolling(stage)
    stage.ends_after_s, stage.status = ends_after_s, status
    with pytest.raises(PDStackError, match=how):
        rolling.roll(Address.SAME, None)
    assert stage.events[-1][0] == "gone"


def test_a_fleet_is_rolled_forth_and_back(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time to the installation that it is not at, under a load that is compared."""
    monkeypatch.setattr(roll_cli.accuracy, "vocabulary_size", lambda _: 100)
    with fake_engine() as engine:
        stage.stack.start_router.return_value.url = engine.url
        monkeypatch.setattr(roll_cli.accuracy, "complete_all", _right)
        settings = RollSettings(
            Fleet([Layout(1, 1)], [Layout(1, 1)]), None, Address.OTHER, SCRIPTS, 2, 0.5, 3
        )
        rolled = roll_cli.roll_under_load(stage.stack, settings)
    assert [each.after for each in rolled.replacements] == [
        *([SCRIPTS] * 2 + ["first"] * 2 + [SCRIPTS] * 2)
    ]
    assert rolled.wrong == []


def test_an_interruption_leaves_no_client_and_no_registry(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it comes; engines and router are the stack's to end."""
    monkeypatch.setattr(roll_cli.accuracy, "vocabulary_size", lambda _: 100)
    monkeypatch.setattr(roll_cli.accuracy, "complete_all", _right)
    stage.stack.check.side_effect = KeyboardInterrupt
    with fake_engine() as engine, pytest.raises(KeyboardInterrupt):
        stage.stack.start_router.return_value.url = engine.url
        roll_cli.roll_under_load(stage.stack, RollSettings())
    assert {"load", "registry"}.isdisjoint(each.name for each in threading.enumerate())


def _right(url: str, model: str, prompts: list[list[int]]) -> list[Completion]:
    return [Completion(WORDS, (), 0.1) for _ in prompts]


GOOD = [Sample(phase, 0.0, 1.0, 0.5) for phase in ("before", "during", "after")]


@pytest.mark.parametrize(
    ("samples", "passed"),
    [
        (GOOD, True),
        ([*GOOD, Sample("during", 0.0, 1.0, None, "gone")], False),
        ([*GOOD, Sample("after", 0.0, 1.0, 0.5, differs=True)], False),
        (GOOD[:2], False),
    ],
)
def test_a_roll_passes_without_a_fault(samples: list[Sample], passed: bool) -> None:
    """One failed request, one other answer, or a phase in which nobody asked, and it does not."""
    rolled = Rolled(samples, [])
    assert rolled.passed is passed
    told = rolled.to_json(RollSettings())
    assert len(told["wrong"]) == len([each for each in samples if each.failure or each.differs])
    assert sum(each["requests"] for each in told["phases"]) == len(samples)


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["--clients", "0"], "--clients has to be positive"),
        (["--calm", "0"], "--calm has to be positive"),
        (["--times", "0"], "--times has to be positive"),
        (["--prefill", "tp1pp1"], "there have to be two of each role"),
        (["--next", "nowhere"], "vllm is not installed in"),
        (["--decode", "3"], "3"),
        (["--from", "stock", *["--prefill", "tp1pp2"] * 2], "serves no pipeline stages"),
    ],
)
def test_what_cannot_work_is_refused(
    args: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is started."""
    assert cli.main(["roll", *args]) == 2
    assert complaint in " ".join(capsys.readouterr().err.split())

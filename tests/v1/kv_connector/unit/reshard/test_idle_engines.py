# SPDX-License-Identifier: Apache-2.0
"""Engines that wait for transfers alone rest, in the loop of vLLM's own engine core.

There is no model: see `early_pairs`. The core's rest is made so long here that news which
do not wake it never come.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.engine import EngineCoreRequestType, FinishReason
from vllm.v1.engine.core import EngineCoreProc

from tests.bases import requires_base
from tests.v1.kv_connector.unit.reshard.early_pairs import (
    DECODED,
    LAYOUTS,
    PREFILLED,
    begin_last_chunk,
    compute,
    coordinates,
    cut_prompts,
    parked,
)
from tests.v1.kv_connector.unit.reshard.engine.workers import wait_until
from tests.v1.kv_connector.unit.reshard.serving import Whole, until
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.scheduling import idling

pytestmark = requires_base("0.32.0", "0.33.0", reason="its engine core has no hook for that")

REST_S = 60.0
WAKEUP = (EngineCoreRequestType.WAKEUP, None)


@pytest.fixture(autouse=True)
def long_rest(monkeypatch):
    """No rest ends by itself while a test runs."""
    monkeypatch.setattr(idling, "LONGEST_REST_S", REST_S)


class Inputs(queue.Queue):
    """What an engine core is sent.

    Attributes:
        num_rests: How often it was waited for.
        num_missed: How many rests have ended by themselves.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_rests = 0
        self.num_missed = 0
        self.on_rest: Callable[[], object] = lambda: None

    def get(self, block: bool = True, timeout: float | None = None):
        """Wait for something."""
        assert timeout == REST_S
        self.num_rests += 1
        self.on_rest()
        try:
            return super().get(block, timeout)
        except queue.Empty:
            self.num_missed += 1
            raise


class Core:
    """The loop of vLLM's engine core around an engine.

    Args:
        whole: The engine.
        most_steps: How many steps are under way at once, as with stages.

    Attributes:
        inputs: What it is sent.
    """

    def __init__(self, whole: Whole, most_steps: int = 1) -> None:
        self.input_queue = self.inputs = Inputs()
        self.output_queue: queue.Queue = queue.Queue()
        self.scheduler = whole.serving.scheduler
        self._whole, self._most_steps = whole, most_steps
        self._under_way: deque = deque()
        connector = self.scheduler.get_kv_connector()
        connector.bind_engine_wakeup(lambda: self.inputs.put_nowait(WAKEUP))

    def step_fn(self) -> tuple[dict, bool]:
        """Take a step; returns what it makes for clients, and whether it computes."""
        scheduled = self._whole.serving.begin()
        self._under_way.append((scheduled, self._whole.work(scheduled)))
        if len(self._under_way) == self._most_steps:
            ended, heard = self._under_way.popleft()
            self._whole.serving.end(ended, heard=heard)
        return {}, scheduled.total_num_scheduled_tokens > 0

    def post_step(self, model_executed: bool) -> None:
        """Nothing follows it."""

    def _handle_client_request(self, *request) -> None:
        EngineCoreProc._handle_client_request(self, *request)

    def go_round(self) -> None:
        """Take a step, and wait as vLLM's core does."""
        EngineCoreProc._process_engine_step(self)

    def go_round_until(self, condition: Callable[[], bool]) -> None:
        """Take steps until something is so; no rest ends by itself."""
        wait_until(lambda: condition() or self.go_round())
        assert self.inputs.num_missed == 0

    def rest(self) -> None:
        """Take steps until the core rests, and wake it then."""
        self.inputs.on_rest = lambda: self.inputs.put_nowait(WAKEUP)
        num_rests = self.inputs.num_rests
        self.go_round_until(lambda: self.inputs.num_rests > num_rests)
        self.inputs.on_rest = lambda: None


@LAYOUTS
def test_early_request_wakes_its_engine_each_time_that_there_is_news(pair, prefill, decode):
    """When its last chunk is computed, when it is offered, and when all ranks have read it."""
    p, d = pair(prefill, decode)
    core = Core(d)
    d.serving.add(DECODED, coordinates(p), max_tokens=2)
    core.rest()
    assert parked(d)
    cut_prompts(p)
    p.serving.add(PREFILLED, {"do_remote_decode": True})
    end = begin_last_chunk(p)
    core.go_round_until(lambda: not parked(d))
    core.rest()
    end()
    # What a step has computed is told with the next one.
    p.step()
    core.go_round_until(lambda: DECODED in d.serving.finished)
    assert d.serving.finished == {DECODED: FinishReason.LENGTH}
    until(p.serving.is_through, p)


def test_request_that_fails_wakes_its_engine(pair):
    """It does not wait for a rest to end."""
    p, d = pair(policy="fail")
    core = Core(d)
    p.serving.add(PREFILLED, {"do_remote_decode": True}, max_tokens=8)
    d.serving.add(DECODED, coordinates(p))
    core.rest()
    p.serving.abort(PREFILLED)
    p.step()
    core.go_round_until(lambda: DECODED in d.serving.finished)
    assert d.serving.finished == {DECODED: FinishReason.ERROR}


@pytest.mark.parametrize("most_steps", [1, 2])
def test_blocks_that_are_read_wake_their_engine(pair, most_steps):
    """Also where a step that is under way has taken the news along."""
    p, d = pair()
    core = Core(d, most_steps)
    p.serving.add(PREFILLED, {"do_remote_decode": True})
    compute(p)
    p.step()
    d.serving.add(DECODED, p.serving.handed_over[PREFILLED], max_tokens=2)
    core.go_round_until(lambda: DECODED in d.serving.finished)
    assert d.serving.finished == {DECODED: FinishReason.LENGTH}


def test_engine_that_holds_blocks_rests(pair):
    """Its workers hear of readers themselves."""
    p, _ = pair()
    core = Core(p)
    p.serving.add(PREFILLED, {"do_remote_decode": True})
    core.go_round_until(lambda: PREFILLED in p.serving.finished)
    core.rest()
    assert not p.serving.is_through()


def test_client_ends_a_rest(pair):
    """What it says is taken up at once, whether it asks or leaves."""
    p, d = pair()
    core = Core(d)
    d.serving.add(DECODED, coordinates(p))
    core.rest()
    left: list[str] = []
    core.abort_requests = left.extend
    core.inputs.on_rest = lambda: core.inputs.put((EngineCoreRequestType.ABORT, [DECODED]))
    core.go_round_until(lambda: bool(left))
    assert left == [DECODED]


@pytest.mark.parametrize(
    "options",
    [
        ("parallel_config", "data_parallel_size", 2),
        ("parallel_config", "prefill_context_parallel_size", 2),
        ("ec_transfer_config", "ec_connector", "ECExampleConnector"),
    ],
    ids=["data parallel", "prefill context parallel", "encoder caches"],
)
def test_engines_whose_steps_others_wait_for_do_not_rest(pair, options, monkeypatch):
    """They take steps as vLLM has it, and never wait for their inputs."""
    p, _ = pair()
    config = p.serving.scheduler.vllm_config
    part, option, value = options
    if getattr(config, part) is None:
        monkeypatch.setattr(config, part, SimpleNamespace())
    monkeypatch.setattr(getattr(config, part), option, value, raising=False)
    core = Core(p)
    p.serving.add(PREFILLED, {"do_remote_decode": True})
    for _ in range(50):
        core.go_round()
    assert PREFILLED in p.serving.finished and core.inputs.num_rests == 0


def test_connectors_of_several_rest_for_as_long_as_all_may():
    """And each may end it."""
    woken: list[Callable[[], None]] = []
    several = SimpleNamespace(
        _connectors=[
            SimpleNamespace(
                get_idle_timeout=lambda running, waiting, each=each: each and each * waiting,
                bind_engine_wakeup=woken.append,
            )
            for each in (3.0, 2.0)
        ]
    )
    assert MultiConnector.get_idle_timeout(several, 0, 4) == 8.0
    several._connectors[0].get_idle_timeout = lambda running, waiting: None
    assert MultiConnector.get_idle_timeout(several, 0, 4) is None
    MultiConnector.bind_engine_wakeup(several, print)
    assert woken == [print, print]

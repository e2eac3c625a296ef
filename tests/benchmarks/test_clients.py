# SPDX-License-Identifier: Apache-2.0
"""Clients that wait for their answers: what they ask, whom in turn, and what is counted."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import clients
from benchmarks.clients import LOADS, Pair, measure_clients
from benchmarks.end_to_end import bench_command
from benchmarks.errors import BenchmarkError
from benchmarks.results import Metric
from benchmarks.targets import judge
from benchmarks.turns import Plan
from tools.pdstack.engine import ServedModel
from tools.pdstack.errors import PDStackError

OURS, AT_REST = "ours", "upstream at rest"


class Child:
    """The processes of an engine, each of which has taken some CPU time."""

    def __init__(self, *taken_s: float) -> None:
        self.taken_s = list(taken_s)

    def processes(self) -> list[SimpleNamespace]:
        """Return what psutil tells."""
        times = [SimpleNamespace(user=each / 2, system=each / 2) for each in self.taken_s]
        return [SimpleNamespace(cpu_times=lambda times=times: times) for times in times]


def pair_of(*children: Child) -> Pair:
    """A pair whose engines have such processes, and whose stack is named by its router."""
    engines = tuple(SimpleNamespace(child=each) for each in children)
    return Pair(SimpleNamespace(), engines, SimpleNamespace())


@pytest.fixture
def asked(monkeypatch) -> list[tuple[str, str, int]]:
    """Each client that is run, by connector, load and seed; ours costs 1 ms of CPU a request."""
    runs = []
    started = {}

    def start(variant, model, plan, acquired):
        started[variant] = pair_of(Child(1.0, 2.0), Child(3.0))
        return started[variant]

    def run(stack, router, model, load, seed):
        (variant,) = (name for name, pair in started.items() if pair.stack is stack)
        runs.append((variant, load.name, seed))
        cost_s = 1e-3 if variant == OURS else 2e-3
        started[variant].engines[1].child.taken_s[0] += cost_s * load.num_requests
        return {Metric.REQUESTS_PER_S: 3.0 if variant == OURS else 4.0}

    monkeypatch.setattr(clients, "write_tiny_llama", lambda _: None)
    monkeypatch.setattr(clients, "_start", start)
    monkeypatch.setattr(clients, "run_client", run)
    return runs


def test_pairs_are_asked_by_turns(asked, tmp_path):
    """In the other order every other round, with the same prompts, that nobody was asked before."""
    one, twelve = (load.name for load in LOADS)
    results = list(measure_clients(2, Plan([], 1, tmp_path, print)))
    assert [result.case for result in results] == [one, twelve]
    assert [variant for variant, _, _ in asked[2:]] == 2 * [OURS, AT_REST] + 2 * [AT_REST, OURS]
    assert [load for _, load, _ in asked[2:]] == 2 * [one, one, twelve, twelve]
    seeds = [seed for _, _, seed in asked]
    assert seeds[::2] == seeds[1::2] and len(set(seeds)) == 5


def test_cpu_time_of_all_processes_is_counted(asked, tmp_path):
    """Of both engines, for each request; both targets are judged by it and by the speed."""
    results = list(measure_clients(1, Plan([], 1, tmp_path, print), lambda name: "12" in name))
    (result,) = results
    cpu_s = result.samples[OURS][Metric.ENGINES_CPU_S]
    assert cpu_s == [pytest.approx(1e-3)]
    speed, cpu = judge(results)
    assert not speed.met and speed.measured.median == pytest.approx(0.75)
    assert cpu.met and cpu.measured.median == pytest.approx(0.5)


def test_nothing_is_started_for_no_case(asked, tmp_path):
    """Where no case is wanted."""
    assert list(measure_clients(1, Plan([], 1, tmp_path, print), lambda _: False)) == []
    assert not asked


def test_server_that_fails_is_an_error(asked, monkeypatch, tmp_path):
    """Of the benchmark's, so that what was measured before it is kept."""

    def fail(*_):
        raise PDStackError("decode ended")

    monkeypatch.setattr(clients, "run_client", fail)
    with pytest.raises(BenchmarkError, match="decode ended"):
        list(measure_clients(1, Plan([], 1, tmp_path, print)))


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_client_asks_as_fast_as_it_is_answered(load):
    """So many at a time, and no slower than that."""
    model = ServedModel(Path("models/tiny"), "tiny")
    command = bench_command("vllm", "http://127.0.0.1:1", model, load, 7, Path("logs"), "bench-7")
    options = dict(pairwise(command))
    assert options["--max-concurrency"] == str(load.clients)
    assert float(options["--request-rate"]) == math.inf

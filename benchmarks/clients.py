# SPDX-License-Identifier: Apache-2.0
"""Clients that wait for their answers: requests a second, and what they cost both engines in CPU.

A tiny model computes next to nothing, so that what connectors and their engines do for a request
weighs as much as it can. Pairs of engines with each connector are up at the same time and are
asked by turns, in the other order every other round: what the machine does meanwhile befalls both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from tools.pdstack.engine import EngineSpec, ServedModel
from tools.pdstack.errors import PDStackError
from tools.pdstack.stack import Engine, PDStack, Router
from tools.pdstack.tiny_models import write_tiny_llama

from .end_to_end import COMPARED, Load, run_client
from .errors import BenchmarkError
from .results import Metric, Part, Result
from .turns import Plan

_MODEL_LEN = 1024


def _load(clients: int, num_requests: int) -> Load:
    return Load(math.inf, num_requests, input_tokens=300, output_tokens=24, clients=clients)


LOADS = (_load(1, 60), _load(12, 240))
"""What clients ask for: some 20 s each on two cores."""
_WARM_UP = _load(12, 48)


@dataclass(frozen=True)
class Pair:
    """Two engines with one connector, and the router before them."""

    stack: PDStack
    engines: tuple[Engine, Engine]
    router: Router

    def cpu_s(self) -> float:
        """CPU time that all processes of both engines have taken."""
        times = [each.cpu_times() for engine in self.engines for each in engine.child.processes()]
        return float(sum(each.user + each.system for each in times))


def measure_clients(
    rounds: int, plan: Plan, wanted: Callable[[str], bool] = lambda _: True
) -> Iterator[Result]:
    """Measure all loads by turns, so many times each.

    Args:
        rounds: How often.
        plan: Where logs go, and who is told of progress.
        wanted: Whether to measure a case, by its name.

    Yields:
        Results that are still to be filled.

    Raises:
        BenchmarkError: A server or a client failed.
    """
    cases = [(load, Result(Part.CLIENTS, load.name)) for load in LOADS if wanted(load.name)]
    yield from (result for _, result in cases)
    if not cases:
        return
    try:
        model = write_tiny_llama(plan.directory / "llama")
        with ExitStack() as acquired:
            pairs = {}
            for variant in COMPARED:
                plan.say(f"clients: starting {variant}")
                pairs[variant] = _start(variant, model, plan, acquired)
            _ask(cases, pairs, model, rounds, plan)
    except PDStackError as error:
        raise BenchmarkError(str(error)) from error


def _start(variant: str, model: ServedModel, plan: Plan, acquired: ExitStack) -> Pair:
    directory = plan.directory / f"clients-{variant.replace(' ', '-')}"
    directory.mkdir()
    stack = acquired.enter_context(PDStack(model, directory))
    prefill, decode = stack.start_engines(
        *(
            EngineSpec(name, kv_transfer=COMPARED[variant], max_model_len=_MODEL_LEN)
            for name in ("prefill", "decode")
        )
    )
    return Pair(stack, (prefill, decode), stack.start_router([prefill], [decode]))


def _ask(
    cases: Sequence[tuple[Load, Result]],
    pairs: Mapping[str, Pair],
    model: ServedModel,
    rounds: int,
    plan: Plan,
) -> None:
    """Ask pairs by turns; each time the prompts are others, the same for all pairs."""
    seeds = itertools.count()
    seed = next(seeds)
    for variant, pair in pairs.items():
        plan.say(f"clients: {variant}, warming up")
        run_client(pair.stack, pair.router, model, _WARM_UP, seed)
    for number in range(rounds):
        for load, result in cases:
            seed = next(seeds)
            for variant in list(pairs)[:: -1 if number % 2 else 1]:
                plan.say(f"clients: {variant}, {load.name}, round {number + 1} of {rounds}")
                pair = pairs[variant]
                before_s = pair.cpu_s()
                measured = run_client(pair.stack, pair.router, model, load, seed)
                cpu_s = (pair.cpu_s() - before_s) / load.num_requests
                result.add(variant, {**measured, Metric.ENGINES_CPU_S: cpu_s})

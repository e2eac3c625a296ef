# SPDX-License-Identifier: Apache-2.0
"""`vllm bench serve` through the router, with each connector, and against one engine.

Engines need cores that two pairs of them do not have on a small machine, so that pairs are started
one after another, and each is measured several times while it is warm.

The two engines of a pair share memory, as vLLM's engines on one machine do. Where two connectors
leave the cores to others, they are compared once more with a link between the engines, as between
two machines; router and clients are where the decode engine is. Ours is measured as well with
requests that go to both engines at once, and with answers that begin with the prefill engine's
token.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from tools.pdstack.engine import (
    UPSTREAM,
    UPSTREAM_AT_REST,
    EngineSpec,
    KVTransfer,
    ServedModel,
    find_script,
    server_env,
    why_no_first_tokens,
)
from tools.pdstack.errors import NetworkError, PDStackError
from tools.pdstack.hosts import visiting
from tools.pdstack.model import cache_dir, prepare_default_model
from tools.pdstack.process import ChildProcess
from tools.pdstack.stack import PDStack, Server

from . import specs
from .errors import BenchmarkError
from .network import HERE, Link, Site, sites
from .results import Metric, Part, Result
from .turns import Plan

SINGLE = "one engine"
LINKS = (Link(10, 0.1), Link(10))
"""What lies between two machines. The first that this machine can have is taken."""


def _with(**options: bool) -> KVTransfer:
    """Our connector with options."""
    ours = KVTransfer()
    return replace(ours, extra_config={**ours.extra_config, **options})


COMPARED = {
    specs.OURS.name: _with(seed_first_token=False),
    specs.UPSTREAM_AT_REST.name: UPSTREAM_AT_REST,
}
"""Connectors that leave the cores to others. Both compute each answer's first token."""

_ALL: Mapping[str, KVTransfer | None] = {
    **COMPARED,
    specs.EARLY.name: _with(early_dispatch=True, seed_first_token=False),
    specs.EARLY_SEEDED.name: _with(early_dispatch=True, seed_first_token=True),
    specs.UPSTREAM.name: UPSTREAM,
    SINGLE: None,
}
_ENGINES = "prefill", "decode"
_LIMIT_S = 600.0
_POLL_S = 0.3


@dataclass(frozen=True)
class Load:
    """What clients ask for.

    Attributes:
        rate: Requests a second, as a Poisson process.
        num_requests: How many.
        input_tokens: Of each prompt, random.
        output_tokens: Of each answer.
        clients: How many there are, each of which waits for its answer; None for no limit.
    """

    rate: float
    num_requests: int = 8
    input_tokens: int = 512
    output_tokens: int = 32
    clients: int | None = None

    @property
    def name(self) -> str:
        """What it is called in tables."""
        asked = f"{self.rate:g} requests/s"
        if self.clients is not None:
            asked = "1 client" if self.clients == 1 else f"{self.clients} clients"
        return f"{self.input_tokens}+{self.output_tokens} tokens, {asked}"

    def result(self, link: Link | None) -> Result:
        """What is still to be filled, with such a link between the engines."""
        case = self.name if link is None else f"{self.name}, {link}"
        return Result(Part.END_TO_END, case, {"rate": self.rate})


_Case: TypeAlias = tuple[Load, Result]


def measure_end_to_end(
    loads: Sequence[Load], rounds: int, plan: Plan, wanted: Callable[[str], bool] = lambda _: True
) -> Iterator[Result]:
    """Measure all loads with all stacks, so many times each.

    Args:
        loads: What clients ask for.
        rounds: How often.
        plan: Where logs go, and who is told of progress.
        wanted: Whether to measure a case, by its name.

    Yields:
        Results that are still to be filled: what comes after them takes many minutes, and is worth
        something also where it is interrupted.

    Raises:
        BenchmarkError: A server or a client failed.
    """
    given, refused = _links()
    cases = {
        link: [(load, result) for load in loads if wanted((result := load.result(link)).case)]
        for link in (*refused, *given)
    }
    for link, reason in refused.items():
        for _, result in cases[link]:
            result.missing.update(dict.fromkeys(COMPARED, reason))
    yield from (result for alike in cases.values() for _, result in alike)
    try:
        bench = _Bench(prepare_default_model(cache_dir(), plan.directory), rounds, plan)
        for link in given:
            stacks = dict(_ALL if link is None else COMPARED)
            if specs.EARLY_SEEDED.name in stacks and (why := why_no_first_tokens()):
                del stacks[specs.EARLY_SEEDED.name]
                for _, result in cases[link]:
                    result.give_up(specs.EARLY_SEEDED.name, why)
            for variant, connector in stacks.items() if cases[link] else ():
                bench.measure(variant, connector, link, cases[link])
    except PDStackError as error:
        raise BenchmarkError(str(error)) from error


def _links() -> tuple[list[Link | None], dict[Link | None, str]]:
    """No link and the first that this machine can have, and why it cannot have those before."""
    refused: dict[Link | None, str] = {}
    for link in LINKS:
        try:
            with sites(link):
                return [None, link], refused
        except NetworkError as error:
            refused[link] = str(error)
    return [None], refused


@dataclass(frozen=True)
class _Bench:
    """What all stacks are measured with.

    Attributes:
        model: What they serve.
        rounds: How often.
        plan: Where logs go, and who is told of progress.
    """

    model: ServedModel
    rounds: int
    plan: Plan

    def measure(
        self, variant: str, connector: KVTransfer | None, link: Link | None, cases: Sequence[_Case]
    ) -> None:
        """Start a stack, warm it up, and put it under each load in every round.

        Every time the prompts are others, the same for all stacks: none is in a prefix cache.
        """
        name = variant if link is None else f"{variant}, {link}"
        directory = self.plan.directory / "-".join(name.replace("/", " ").split())
        directory.mkdir()
        self.plan.say(f"end to end: starting {name}")
        with ExitStack() as acquired:
            ends = (HERE, HERE) if link is None else acquired.enter_context(sites(link))
            acquired.enter_context(visiting(ends[1].namespace))
            stack = acquired.enter_context(PDStack(self.model, directory))
            server = _start(stack, connector, ends)
            seeds = itertools.count()
            self.plan.say(f"end to end: {name}, warming up")
            run_client(stack, server, self.model, cases[-1][0], next(seeds))
            for number in range(self.rounds):
                for load, result in cases:
                    round_ = f"round {number + 1} of {self.rounds}"
                    self.plan.say(f"end to end: {name}, {load.name}, {round_}")
                    measured = run_client(stack, server, self.model, load, next(seeds))
                    result.add(variant, measured)


def run_client(
    stack: PDStack, server: Server, model: ServedModel, load: Load, seed: int
) -> dict[Metric, float]:
    """Run `vllm bench serve`.

    Args:
        stack: What is asked, which is watched meanwhile.
        server: Which of its servers is asked.
        model: What it serves.
        load: What is asked for.
        seed: Of the prompts; each has a log of its own in the stack's directory.

    Raises:
        BenchmarkError: It did not end, or not all requests were answered.
        PDStackError: A server or the client failed.
    """
    name, directory = f"bench-{seed}", stack.run_dir
    vllm = find_script("vllm")
    command = bench_command(vllm, server.url, model, load, seed, directory, name)
    client = ChildProcess(name, command, server_env(os.environ), directory)
    try:
        deadline_s = time.monotonic() + _LIMIT_S
        while client.exit_status is None:
            stack.check()
            if time.monotonic() > deadline_s:
                raise BenchmarkError(f"{name} did not end in {_LIMIT_S:.0f} s")
            time.sleep(_POLL_S)
        if client.exit_status != 0:
            client.check()
    finally:
        client.stop()
    path = directory / f"{name}.json"
    return read_result(json.loads(path.read_text(encoding="utf-8")), load)


def _start(stack: PDStack, connector: KVTransfer | None, ends: tuple[Site, Site]) -> Server:
    """Start what clients ask: a router before two engines, or one engine."""
    if connector is None:
        (single,) = stack.start_engines(EngineSpec("single", kv_transfer=None))
        return single
    prefill, decode = stack.start_engines(
        *(engine_spec(name, connector, site) for name, site in zip(_ENGINES, ends, strict=True))
    )
    return stack.start_router([prefill], [decode])


def engine_spec(name: str, connector: KVTransfer, site: Site) -> EngineSpec:
    """An engine at a site."""
    ucx = {"UCX_TLS": site.transports, "UCX_NET_DEVICES": site.device}
    env = {variable: value for variable, value in ucx.items() if value is not None}
    return EngineSpec(
        name, kv_transfer=connector, host=site.host, namespace=site.namespace, env=env
    )


def bench_command(
    vllm: str, url: str, model: ServedModel, load: Load, seed: int, directory: Path, name: str
) -> list[str]:
    """The command of a client, which writes `name`.json; each seed has prompts of its own."""
    return [
        *(vllm, "bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions"),
        *("--base-url", url, "--model", model.name, "--tokenizer", str(model.directory)),
        *("--dataset-name", "random", "--random-input-len", str(load.input_tokens)),
        *("--random-output-len", str(load.output_tokens), "--ignore-eos", "--temperature", "0"),
        *("--num-prompts", str(load.num_requests), "--request-rate", f"{load.rate:g}"),
        *(() if load.clients is None else ("--max-concurrency", str(load.clients))),
        # The client's own warm-up asks for one of the prompts that it measures.
        *("--num-warmups", "0", "--seed", str(seed), "--disable-tqdm"),
        *("--save-result", "--result-dir", str(directory), "--result-filename", f"{name}.json"),
    ]


def read_result(result: Mapping[str, Any], load: Load) -> dict[Metric, float]:
    """Read what a client has written.

    Raises:
        BenchmarkError: Not all requests were answered.
    """
    if result["completed"] != load.num_requests:
        raise BenchmarkError(
            f"only {result['completed']} of {load.num_requests} requests were answered"
        )
    return {
        Metric.TTFT_S: result["median_ttft_ms"] / 1e3,
        Metric.ITL_S: result["median_itl_ms"] / 1e3,
        Metric.ITL_P99_S: result["p99_itl_ms"] / 1e3,
        Metric.TOKENS_PER_S: result["output_throughput"],
        Metric.REQUESTS_PER_S: result["request_throughput"],
    }

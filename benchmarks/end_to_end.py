# SPDX-License-Identifier: Apache-2.0
"""`vllm bench serve` through the router, with each connector, and against one engine.

Engines need cores that two pairs of them do not have on a small machine, so that pairs are started
one after another, and each is measured several times while it is warm.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.pdstack.engine import (
    UPSTREAM,
    UPSTREAM_AT_REST,
    EngineSpec,
    KVTransfer,
    ServedModel,
    find_script,
    server_env,
)
from tools.pdstack.errors import PDStackError
from tools.pdstack.model import cache_dir, prepare_default_model
from tools.pdstack.process import ChildProcess
from tools.pdstack.stack import PDStack, Server

from . import specs
from .errors import BenchmarkError
from .results import Metric, Part, Result
from .turns import Plan

SINGLE = "one engine"
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
    """

    rate: float
    num_requests: int = 8
    input_tokens: int = 512
    output_tokens: int = 32

    @property
    def name(self) -> str:
        """What it is called in tables."""
        return f"{self.input_tokens}+{self.output_tokens} tokens, {self.rate:g} requests/s"


def measure_end_to_end(loads: Sequence[Load], rounds: int, plan: Plan) -> Iterator[Result]:
    """Measure all loads with all stacks, so many times each.

    Yields:
        Results that are still to be filled: what comes after them takes many minutes, and is worth
        something also where it is interrupted.

    Raises:
        BenchmarkError: A server or a client failed.
    """
    results = [Result(Part.END_TO_END, load.name, {"rate": load.rate}) for load in loads]
    yield from results
    stacks: dict[str, KVTransfer | None] = {
        specs.OURS.name: KVTransfer(),
        specs.UPSTREAM.name: UPSTREAM,
        specs.UPSTREAM_AT_REST.name: UPSTREAM_AT_REST,
        SINGLE: None,
    }
    try:
        model = prepare_default_model(cache_dir(), plan.directory)
        for lane, connector in stacks.items():
            directory = plan.directory / lane.replace(" ", "-")
            directory.mkdir()
            _serve(lane, connector, model, loads, rounds, results, directory, plan)
    except PDStackError as error:
        raise BenchmarkError(str(error)) from error


def _serve(
    lane: str,
    connector: KVTransfer | None,
    model: ServedModel,
    loads: Sequence[Load],
    rounds: int,
    results: Sequence[Result],
    directory: Path,
    plan: Plan,
) -> None:
    """Start a stack, warm it up, and put it under each load in every round.

    Every time the prompts are others, the same for all stacks: none is in a prefix cache.
    """
    plan.say(f"end to end: starting {lane}")
    with PDStack(model, directory) as stack:
        server: Server
        if connector is None:
            (server,) = stack.start_engines(EngineSpec("single", kv_transfer=None))
        else:
            prefill, decode = stack.start_engines(
                EngineSpec("prefill", kv_transfer=connector),
                EngineSpec("decode", kv_transfer=connector),
            )
            server = stack.start_router([prefill], [decode])
        seeds = itertools.count()
        plan.say(f"end to end: {lane}, warming up")
        _bench(stack, server, model, loads[-1], next(seeds), directory)
        for number in range(rounds):
            for load, result in zip(loads, results, strict=True):
                plan.say(f"end to end: {lane}, {load.name}, round {number + 1} of {rounds}")
                result.add(lane, _bench(stack, server, model, load, next(seeds), directory))


def _bench(
    stack: PDStack, server: Server, model: ServedModel, load: Load, seed: int, directory: Path
) -> dict[Metric, float]:
    """Run `vllm bench serve`."""
    name = f"bench-{seed}"
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
    }

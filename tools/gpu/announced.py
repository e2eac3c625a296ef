# SPDX-License-Identifier: Apache-2.0
"""What announcing offers beside steps gains: the time to the first token, with it and without.

One pair of engines answers the same prompts in rounds, by turns with announcements and with these
withheld, so that whatever else the machine does is in both.
"""

from __future__ import annotations

import importlib.metadata
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from tools.pdstack import accuracy, demo
from tools.pdstack.layout import Layout
from tools.pdstack.stack import Engine, PDStack, Router

MODULE_DIR = Path(__file__).parents[1] / "pdstack/modules/offers_by_turns"
ASYNCHRONOUS = ("--async-scheduling",)
PROMPT_TOKENS = 450
"""Less than a step computes, and than the longest sequence with its answer."""

_FORK = "vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.scheduling.offers"
_PLUGIN = "vllm_kv_reshard.engine.scheduling.offers"
_WAYS = ("announced", "withheld")


@dataclass(frozen=True)
class Gain:
    """What was seen.

    Attributes:
        ttft_s: Of each request of each round, by way, until its first token had come.
        told: How many offers were announced.
        withheld: How many were not.
        bytes_moved: What the decode engine has read.
    """

    ttft_s: dict[str, list[list[float]]]
    told: int
    withheld: int
    bytes_moved: int

    @property
    def fault(self) -> str:
        """Why it says nothing; empty where it does."""
        if not self.bytes_moved:
            return "nothing was moved over NIXL"
        if not (self.told and self.withheld):
            return (
                f"{self.told} offers were announced and {self.withheld} withheld, where each way "
                "has to have some: is scheduling asynchronous, or has prefill stages?"
            )
        return ""

    def __str__(self) -> str:
        times = {way: list(chain(*rounds)) for way, rounds in self.ttft_s.items()}
        lines = [
            f"{way:10} {len(each):4} requests  first token after {statistics.median(each):.4f} s,"
            f" at most {max(each):.4f} s"
            for way, each in times.items()
        ]
        # Of a difference that has either sign, there is nothing to be said.
        gains = [
            statistics.median(without) - statistics.median(told)
            for told, without in zip(*(self.ttft_s[way] for way in _WAYS), strict=True)
        ]
        whole = statistics.median(times["withheld"]) - statistics.median(times["announced"])
        lines.append(
            f"gain       {whole * 1e3:.1f} ms of the median; "
            f"{min(gains) * 1e3:.1f} to {max(gains) * 1e3:.1f} ms in pairs of rounds"
        )
        return "\n".join(lines)


def measure(
    stack: PDStack,
    *,
    prefill: Layout,
    rounds: int,
    requests: int,
    engine_args: Sequence[str] = ASYNCHRONOUS,
) -> Gain:
    """Start a pair, and ask it in rounds.

    Args:
        prefill: The prefill engine's layout; the decode engine is one rank.
        rounds: How many there are of either way.
        requests: Prompts of a round, eight at a time.
        engine_args: For `vllm serve`.

    Raises:
        PDStackError: A server did not start, died, or gave no answer.
    """
    marks = stack.run_dir / "offers"
    marks.mkdir()
    (p,) = demo.engine_specs("prefill", [prefill], engine_args)
    fork = "reshard." in importlib.metadata.version("vllm")
    env = {**p.env, "OFFERS_BY_TURNS": str(marks), "OFFERS_OF": _FORK if fork else _PLUGIN}
    specs = [replace(p, env=env, module_dirs=(MODULE_DIR,))]
    specs += demo.engine_specs("decode", [Layout(1, 1)], engine_args)
    source, reader = stack.start_engines(*specs)
    router = stack.start_router([source], [reader])
    return ask(router, reader, stack.model.name, marks, rounds=rounds, prompts=_prompts(requests))


def ask(
    router: Router,
    reader: Engine,
    model: str,
    marks: Path,
    *,
    rounds: int,
    prompts: Sequence[Sequence[int]],
) -> Gain:
    """Ask in rounds, by turns with announcements and without.

    Args:
        router: Who is asked.
        reader: The decode engine.
        model: What is asked for.
        marks: What the prefill engine's module has been given.
        rounds: How many there are of either way.
        prompts: Of each round.
    """
    # Connections, and whatever else comes with the first ones, are no round's.
    accuracy.complete_all(router.url, model, prompts, salt="first")
    counted = [_size(marks / name) for name in ("told", "withheld")]
    times: dict[str, list[list[float]]] = {way: [] for way in _WAYS}
    withhold = marks / "withhold"
    for number in range(2 * rounds):
        # The one that comes first is another one each time.
        way = _WAYS[(number + number // 2) % 2]
        if way == "withheld":
            withhold.touch()
        else:
            withhold.unlink(missing_ok=True)
        found = accuracy.complete_all(router.url, model, prompts, salt=f"round {number}")
        times[way].append([each.ttft_s for each in found])
    told, withheld = (
        _size(marks / name) - before
        for name, before in zip(("told", "withheld"), counted, strict=True)
    )
    return Gain(times, told, withheld, reader.nixl_counters().bytes_moved)


def report(gain: Gain, path: Path | None) -> None:
    """Print what was seen, and write it as JSON."""
    print(gain)
    if path is not None:
        path.write_text(json.dumps({**vars(gain), "fault": gain.fault}, indent=1) + "\n")


def _prompts(count: int) -> list[list[int]]:
    """Prompts of equal length, that begin each in its own way."""
    numbers = random.Random(1)
    return [[numbers.randrange(100, 20000) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0

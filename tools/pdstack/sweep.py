# SPDX-License-Identifier: Apache-2.0
"""Pairs of layouts, one after the other, each compared with one engine.

Engines are started once and kept for as long as later pairs want them and memory allows: which of
them work together is settled by their first handshake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
from rich import box
from rich.table import Table

from . import accuracy, interpreter
from .accuracy import Accuracy, Completion
from .engine import UPSTREAM_AT_REST, EngineSpec, KVTransfer, ServedModel
from .errors import PDStackError
from .families import MODELS
from .family import STAGED, Family, Side
from .metrics import NixlCounters
from .report import format_bytes, yes_no
from .stack import Engine, PDStack, Router

MAX_WORKERS = 9
"""Worker processes that are kept alive at the same time: four ranks at either end, and the one that
says what is right."""

BF16_AGREEMENT = 0.5
"""Share of tokens that must agree where layouts round differently."""

BF16_LOGPROB_BOUND = 0.3
"""How far log-probabilities of equal tokens may lie apart there: 0.16 was seen, of DeepSeek V4. Its
cache is of 8 bits, so that a sum that was rounded otherwise may fall on the next number."""

_CACHE_TOKENS = 16384

After = Callable[[PDStack, Router], "str | None"]
"""Does more with a router whose answers have passed; returns what is wrong, if anything."""


@dataclass(frozen=True)
class Result:
    """What became of a family.

    Attributes:
        accuracy: how its answers compare; ``None`` where there were none.
        bytes_moved: what its decode engines read.
        fault: why it did not pass; ``None`` where it did.
    """

    family: Family
    accuracy: Accuracy | None
    bytes_moved: int
    fault: str | None


def judge(family: Family, found: Accuracy, counters: NixlCounters) -> str | None:
    """Return why a family has not passed; ``None`` where it has."""
    if counters.failed_reads or counters.failed_notifications:
        return f"{counters.failed_reads} reads failed"
    if not counters.bytes_moved:
        return "nothing was moved over NIXL"
    if family.decode.has("early_dispatch") and not counters.prefill_waits:
        return "no request was at a decode engine before its prompt was computed"
    chunked = family.decode.has("early_dispatch") and "--max-num-batched-tokens" in family.args
    if chunked and not counters.prefetched_bytes:
        return "nothing of a prompt was read while the rest was computed"
    if family.decode.has("seed_first_token") and not counters.first_tokens:
        return "no answer began with the prefill engine's token"
    if STAGED in family.decode.options and not counters.staged_bytes:
        return "nothing was read by way of the staging arena"
    differing = found.requests - found.equal - found.tied
    if family.exact and differing:
        return f"{differing} answers differ"
    if found.logprob_gap > (accuracy.LOGPROB_BOUND if family.exact else BF16_LOGPROB_BOUND):
        return f"log-probabilities differ by {found.logprob_gap:.2g}"
    if found.agreement < BF16_AGREEMENT:
        return f"only {found.agreement:.0%} of the tokens agree"
    return None


class Sweep:
    """Runs families of one model after the other.

    Args:
        run_dir: where models and logs go.
        num_requests: prompts of each family.
        startup_timeout_s: how long a server may take to become ready.
        on_wait: as `PDStack`'s.
        say: told what is going on.
        models: how to make the models that families name.
        after: what else is done with a family's router once its answers have passed; returns why
            the family has not passed, after all.
        keep: given each result as soon as there is one.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        num_requests: int,
        startup_timeout_s: float,
        on_wait: Callable[..., None],
        say: Callable[[str], None],
        models: Mapping[str, Callable[[Path], ServedModel]] = MODELS,
        after: After = lambda _stack, _router: None,
        keep: Callable[[Result], None] = lambda _: None,
    ) -> None:
        self._run_dir = run_dir
        self._num_requests = num_requests
        self._startup_timeout_s = startup_timeout_s
        self._on_wait = on_wait
        self._say = say
        self._models = models
        self._after = after
        self._keep = keep

    def run(self, families: Sequence[Family]) -> list[Result]:
        """Run them, and return what became of each, in the order of models."""
        results: list[Result] = []
        for name in dict.fromkeys(family.model for family in families):
            model = self._models[name](self._run_dir / f"model-{len(results)}")
            with PDStack(
                model,
                self._run_dir,
                startup_timeout_s=self._startup_timeout_s,
                on_wait=self._on_wait,
            ) as stack:
                group = _Group(stack, self._num_requests, self._after)
                for family in families:
                    if family.model == name:
                        results.append(self._run_one(group, family))
        return results

    def _run_one(self, group: _Group, family: Family) -> Result:
        self._say(f"{family.name}: {family.prefill} -> {family.decode}, {family.model}")
        result = group.run(family)
        self._say(f"  {result.fault or 'passed'}{_figures(result)}")
        self._keep(result)
        return result


@dataclass
class _Group:
    """The engines of one model."""

    stack: PDStack
    num_requests: int
    after: After = lambda _stack, _router: None
    _engines: dict[tuple[Side, tuple[str, ...], int], Engine] = field(default_factory=dict)
    _references: dict[tuple[Side, tuple[str, ...], int], list[Completion]] = field(
        default_factory=dict
    )

    def run(self, family: Family) -> Result:
        """Compare one family's answers with those of one engine."""
        try:
            return self._compare(family)
        except (PDStackError, httpx.HTTPError) as error:
            if not isinstance(error, PDStackError):
                error = self.stack.explain(error)
            # Whatever died, the next family begins with servers of its own.
            self.stack.stop_all()
            self._engines.clear()
            return Result(family, None, 0, str(error))

    def _compare(self, family: Family) -> Result:
        name = self.stack.model.name
        size = accuracy.vocabulary_size(self.stack.model.directory)
        prompts = accuracy.make_prompts(size, self.num_requests)
        prefill, decode = self._start(family)
        references = self._reference(family, prompts)
        before = sum((each.nixl_counters() for each in decode), NixlCounters())
        router = self.stack.start_router(prefill, decode)
        answers = accuracy.complete_all(
            router.url,
            name,
            prompts,
            salt=family.name,
            # Log-probabilities keep a decode engine from beginning with a token that it has not.
            logprobs=not family.decode.has("seed_first_token"),
        )
        counters = sum((each.nixl_counters() for each in decode), NixlCounters()) - before
        found = accuracy.compare(references, answers)
        fault = judge(family, found, counters)
        if fault is None:
            fault = self.after(self.stack, router)
        self.stack.stop(router)
        return Result(family, found, counters.bytes_moved, fault)

    def _reference(self, family: Family, prompts: list[list[int]]) -> list[Completion]:
        """What one engine answers; any that is one rank, alone and under another salt."""
        key = _one_rank(family)
        if key not in self._references:
            one, name = self._engines[key], self.stack.model.name
            self._references[key] = accuracy.complete_all(one.url, name, prompts, salt="reference")
        return self._references[key]

    def _start(self, family: Family) -> tuple[list[Engine], list[Engine]]:
        """The engines of a family; those that are in the way are stopped first.

        The one that says what is right is started with them, where it has not said so yet.
        """
        keys = [
            [(replace(side, count=1), family.args, first + number) for number in range(side.count)]
            for side, first in _numbered(family)
        ]
        wanted = [key for side in keys for key in side]
        if _one_rank(family) not in {*self._references, *wanted}:
            wanted.append(_one_rank(family))
        missing = [key for key in wanted if key not in self._engines]
        idle = [key for key in self._engines if key not in wanted]
        while idle and _workers([*self._engines, *missing]) > MAX_WORKERS:
            self.stack.stop(self._engines.pop(idle.pop(0)))
        self._start_engines(missing)
        prefill, decode = ([self._engines[key] for key in side] for side in keys)
        return prefill, decode

    def _start_engines(self, keys: Sequence[tuple[Side, tuple[str, ...], int]]) -> list[Engine]:
        specs = [_spec(*key, self.stack.model.block_tokens) for key in keys]
        engines = self.stack.start_engines(*specs) if specs else []
        self._engines.update(zip(keys, engines, strict=True))
        return engines


def equal_of(found: Accuracy) -> str:
    """Return how many answers are equal, and how many more part where two tokens were as likely."""
    return f"{found.equal} + {found.tied} tied" if found.tied else str(found.equal)


def _figures(result: Result) -> str:
    """What a sweep that is ended early has found by then."""
    found = result.accuracy
    if found is None:
        return ""
    return (
        f": {equal_of(found)} of {found.requests} equal, gap {found.logprob_gap:.1e}, "
        f"{format_bytes(result.bytes_moved)} moved"
    )


def _numbered(family: Family) -> list[tuple[Side, int]]:
    """Both sides, with the number of the first engine: equal engines on both sides are two."""
    same = replace(family.prefill, count=1) == replace(family.decode, count=1)
    return [(family.prefill, 0), (family.decode, family.prefill.count if same else 0)]


def _one_rank(family: Family) -> tuple[Side, tuple[str, ...], int]:
    """The engine whose answers a family's are compared with."""
    return family.one, family.args, 0


def _workers(keys: Iterable[tuple[Side, tuple[str, ...], int]]) -> int:
    return sum(side.layout.world_size for side, _, _ in keys)


def _spec(side: Side, args: tuple[str, ...], number: int, block_tokens: int) -> EngineSpec:
    """How an engine is started; pairs share it, so that it may prefill and decode.

    One with prefill context parallelism is read from alone.
    """
    kv_transfer = UPSTREAM_AT_REST if side.connector == "upstream" else KVTransfer()
    kv_transfer = replace(
        kv_transfer, extra_config={**kv_transfer.extra_config, **dict(side.options)}
    )
    if side.connector == "MultiConnector":
        child = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
        kv_transfer = KVTransfer("MultiConnector", extra_config={"connectors": [child]})
    if side.layout.pcp_size > 1:
        kv_transfer = replace(kv_transfer, role="kv_producer")
    stages = dict(side.env).get("VLLM_PP_LAYER_PARTITION", "").replace(",", "-")
    drafts = str(side.speculation or "")
    options = [value if isinstance(value, str) else name for name, value in side.options]
    caches = str(side.caches or "").replace(" ", "-")
    release = side.installation.release if side.installation else ""
    runner = "second-runner" if side.second_runner else ""
    parts = [str(side.layout), stages, side.connector, drafts, caches, runner, release, *options]
    parts += [*side.args, *args]
    parts.append(str(number))
    name = "-".join(part.strip("-") for part in parts if part)
    # So many blocks hold the prompts of a sweep, but not longer ones that somebody asks for.
    is_longer = any(word.split("=")[0] == "--max-model-len" for word in side.args)
    env: dict[str, str] = {}
    module_dirs: list[Path] = []
    if side.caches:
        env |= side.caches.env
        module_dirs += side.caches.module_dirs
    if side.second_runner:
        env |= interpreter.SECOND_RUNNER
        module_dirs.append(interpreter.MODULE_DIR)
    num_blocks = _CACHE_TOKENS // (side.caches.block_tokens if side.caches else block_tokens)
    blocks = () if is_longer else ("--num-gpu-blocks-override", str(num_blocks))
    return EngineSpec(
        name,
        side.layout,
        kv_transfer,
        extra_args=(*blocks, *(side.caches.args if side.caches else ()), *side.args, *args),
        env=env | dict(side.env),
        max_model_len=1024,
        speculation=side.speculation,
        module_dirs=module_dirs,
        scripts=side.installation.scripts if side.installation else None,
    )


def result_table(results: Sequence[Result]) -> Table:
    """Return the table that a sweep ends with."""
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("family", "prefill", "decode", "model"):
        table.add_column(title)
    for title in (
        "requests",
        "equal",
        "logprob gap",
        "KV moved",
        "TTFT p50",
        "one engine",
        "passed",
    ):
        table.add_column(title, justify="right")
    for result in results:
        found, family = result.accuracy, result.family
        measured = (
            ["-"] * 6
            if found is None
            else [
                str(found.requests),
                equal_of(found),
                f"{found.logprob_gap:.1e}",
                format_bytes(result.bytes_moved),
                f"{found.ttft_p50_s:.2f} s",
                f"{found.reference_ttft_p50_s:.2f} s",
            ]
        )
        sides = str(family.prefill), str(family.decode)
        table.add_row(family.name, *sides, family.model, *measured, yes_no(result.fault is None))
    return table

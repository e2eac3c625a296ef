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

from . import accuracy
from .accuracy import Accuracy, Completion
from .engine import (
    EngineSpec,
    KVTransfer,
    ServedModel,
    Speculation,
    why_no_mla,
    why_no_model,
    why_no_state,
)
from .errors import PDStackError, UsageError
from .layout import Layout
from .metrics import NixlCounters
from .report import format_bytes, yes_no
from .stack import Engine, PDStack, Router
from .tiny_checkpoints import (
    write_tiny_llama_with_eagle,
    write_tiny_mimo,
    write_tiny_mimo2,
    write_tiny_nemotron_nas,
    write_tiny_step3p5,
)
from .tiny_models import (
    write_tiny_deepseek2,
    write_tiny_falcon_h1,
    write_tiny_gemma3,
    write_tiny_gemma4,
    write_tiny_llama,
    write_tiny_qwen3_next,
)

MAX_WORKERS = 8
"""Worker processes that are kept alive at the same time."""

BF16_AGREEMENT = 0.5
"""Share of tokens that must agree where layouts round differently."""

_CACHE_TOKENS = 16384
_ONE = Layout(1, 1)


@dataclass(frozen=True)
class Side:
    """The engines of one role.

    Attributes:
        layout: of each.
        count: how many.
        args: more of the command line.
        env: more of the environment, as pairs.
        connector: what moves the KV cache.
        speculation: how each drafts, if it does.
        options: more of the connector's, as pairs.
    """

    layout: Layout = _ONE
    count: int = 1
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    connector: str = "NixlConnector"
    speculation: Speculation | None = None
    options: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        times = f"{self.count} x " if self.count > 1 else ""
        stages = dict(self.env).get("VLLM_PP_LAYER_PARTITION")
        drafts = f", {self.speculation}" if self.speculation else ""
        return f"{times}{self.layout}" + (f" ({stages})" if stages else "") + drafts


@dataclass(frozen=True)
class Family:
    """A pair of layouts.

    Attributes:
        name: what is special about it.
        model: name of what is served.
        prefill: the prefill engines.
        decode: the decode engines.
        exact: whether answers have to be equal; where not, as at bfloat16, most tokens have to.
        args: more of every engine's command line.
    """

    name: str
    model: str
    prefill: Side
    decode: Side
    exact: bool = True
    args: tuple[str, ...] = ()


MODELS: Mapping[str, Callable[[Path], ServedModel]] = {
    "llama, 6 KV heads": lambda directory: write_tiny_llama(
        directory, num_layers=6, num_heads=6, num_kv_heads=6
    ),
    "llama, 2 KV heads": lambda directory: write_tiny_llama(
        directory, num_layers=4, num_heads=4, num_kv_heads=2
    ),
    "gemma 3": write_tiny_gemma3,
    "deepseek 2, MLA": write_tiny_deepseek2,
    "gemma 4": write_tiny_gemma4,
    "mimo 2": write_tiny_mimo2,
    "step 3.5": write_tiny_step3p5,
    "nemotron nas": write_tiny_nemotron_nas,
    "llama with an eagle": write_tiny_llama_with_eagle,
    "mimo": write_tiny_mimo,
    "falcon h1": write_tiny_falcon_h1,
    "qwen3 next": write_tiny_qwen3_next,
}

(
    _SIX,
    _TWO,
    _GEMMA,
    _MLA,
    _GEMMA4,
    _MIMO2,
    _STEP,
    _NEMOTRON,
    _EAGLE,
    _MIMO,
    _MAMBA,
    _GDN,
) = MODELS


WHY_NOT: Mapping[str, Callable[[], str]] = {
    _MLA: why_no_mla,
    _GEMMA4: lambda: why_no_model("gemma4"),
    _MIMO2: lambda: why_no_model("mimo_v2"),
    _STEP: lambda: why_no_model("step3p5"),
    _MAMBA: why_no_state,
    _GDN: why_no_state,
}
"""For models that not every vLLM can serve: says why the installed one cannot."""

_HYBRID = ("--no-disable-hybrid-kv-cache-manager",)
_BF16 = ("--dtype", "bfloat16")
_RAY = ("--distributed-executor-backend", "ray")
_STAGES = Layout(1, 2)
_RANKS = Layout(2, 1)
_LAYER_LAYOUTS = {
    "TP down": (_RANKS, _ONE),
    "TP up": (_ONE, _RANKS),
    "PP on P": (_STAGES, _ONE),
    "PP to TP": (_STAGES, _RANKS),
}
_LAYERS_THAT_DIFFER = {
    "Gemma 4": _GEMMA4,
    "MiMo-V2": _MIMO2,
    "Step-3.5": _STEP,
    "Nemotron-NAS": _NEMOTRON,
}

# Of three that are drafted, answers repeat enough to accept some.
_NGRAM = Speculation("ngram", 3, options=(("prompt_lookup_min", 1), ("prompt_lookup_max", 3)))
_EAGLE_HEAD = Speculation("eagle", 3, "eagle")
# What drafts as the model itself does is always right.
_ITSELF = Speculation("draft_model", 3, ".")
_MTP = Speculation("mtp", 1)
_COLD = (("missing_draft_layers", "compute"),)

FAMILIES: tuple[Family, ...] = (
    Family("PP on P", _SIX, Side(_STAGES), Side()),
    Family("PP on D", _SIX, Side(), Side(_STAGES)),
    Family("TP down", _SIX, Side(Layout(2, 1)), Side()),
    Family("TP up", _SIX, Side(), Side(Layout(2, 1))),
    Family("TP not divisible", _SIX, Side(Layout(3, 1)), Side(Layout(2, 1))),
    Family("TP and PP on both", _SIX, Side(Layout(3, 1)), Side(_STAGES)),
    Family("TP x PP on D", _SIX, Side(_STAGES), Side(Layout(2, 2))),
    Family("PP3 to PP2", _SIX, Side(Layout(1, 3)), Side(_STAGES)),
    Family(
        "uneven stages",
        _SIX,
        Side(_STAGES, env=(("VLLM_PP_LAYER_PARTITION", "5,1"),)),
        Side(_STAGES),
    ),
    Family("2 P and 2 D", _SIX, Side(_STAGES, count=2), Side(count=2)),
    Family("MultiConnector", _SIX, Side(_STAGES, connector="MultiConnector"), Side()),
    Family("P on Ray", _SIX, Side(_STAGES, args=_RAY), Side()),
    Family("replicated heads", _TWO, Side(Layout(4, 1)), Side()),
    Family("sliding windows", _GEMMA, Side(_STAGES), Side(), args=_HYBRID),
    Family("MLA TP down", _MLA, Side(Layout(2, 1)), Side()),
    Family("MLA PP on P", _MLA, Side(_STAGES), Side()),
    Family("MLA TP up", _MLA, Side(), Side(Layout(2, 1))),
    Family("Mamba 2", _MAMBA, Side(), Side()),
    Family("Mamba 2 TP down", _MAMBA, Side(Layout(2, 1)), Side()),
    Family("Mamba 2 TP up", _MAMBA, Side(), Side(Layout(2, 1))),
    Family("Mamba 2 PP on P", _MAMBA, Side(_STAGES), Side()),
    Family("Mamba 2 PP to TP", _MAMBA, Side(_STAGES), Side(Layout(2, 1))),
    Family("delta net", _GDN, Side(), Side(), exact=False),
    Family("delta net TP down", _GDN, Side(Layout(2, 1)), Side(), exact=False),
    Family("delta net TP up", _GDN, Side(), Side(Layout(2, 1)), exact=False),
    Family("delta net PP on P", _GDN, Side(_STAGES), Side(), exact=False),
    Family("delta net PP to TP", _GDN, Side(_STAGES), Side(Layout(2, 1)), exact=False),
    Family("bfloat16", _TWO, Side(_STAGES), Side(Layout(2, 1)), exact=False, args=_BF16),
    *(
        Family(f"{name} {layouts}", model, Side(prefill), Side(decode))
        for name, model in _LAYERS_THAT_DIFFER.items()
        for layouts, (prefill, decode) in _LAYER_LAYOUTS.items()
    ),
    Family("n-grams", _EAGLE, Side(_RANKS, speculation=_NGRAM), Side(speculation=_NGRAM)),
    Family("n-grams on D", _EAGLE, Side(_STAGES), Side(speculation=_NGRAM)),
    Family("EAGLE", _EAGLE, Side(_RANKS, speculation=_EAGLE_HEAD), Side(speculation=_EAGLE_HEAD)),
    Family(
        "EAGLE TP up", _EAGLE, Side(speculation=_EAGLE_HEAD), Side(_RANKS, speculation=_EAGLE_HEAD)
    ),
    Family(
        "EAGLE on D",
        _EAGLE,
        Side(_STAGES),
        Side(speculation=_EAGLE_HEAD, options=_COLD),
    ),
    Family("draft model", _EAGLE, Side(_RANKS, speculation=_ITSELF), Side(speculation=_ITSELF)),
    Family("MTP", _MIMO, Side(_RANKS, speculation=_MTP), Side(speculation=_MTP)),
    Family("MTP on D", _MIMO, Side(_STAGES), Side(speculation=_MTP, options=_COLD)),
)

SUBSETS: Mapping[str, tuple[str, ...]] = {
    # What the end-to-end tests do not run, in at most 20 minutes on two cores: there, an engine
    # takes up to 100 s to start, and a family 25 s once its engines are up.
    "ci": ("TP not divisible", "uneven stages", "MultiConnector", "P on Ray", "bfloat16"),
    # One with stages and one without, to see that another base works at all.
    "base": ("PP on P", "TP not divisible"),
}
"""Families that are run together under one name."""


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


def choose(names: Iterable[str]) -> list[Family]:
    """Return the families of these names; all without any.

    Raises:
        UsageError: there is none of that name.
    """
    wanted = list(names)
    known = {family.name.lower(): family for family in FAMILIES}
    for name in wanted:
        if name.lower() not in known:
            raise UsageError(f"no family {name!r}; there are {', '.join(map(repr, known))}")
    return [known[name.lower()] for name in wanted] or list(FAMILIES)


def split_by_vllm(families: Iterable[Family]) -> tuple[list[Family], dict[str, str]]:
    """Return the families that the installed vLLM can serve, and by name why not the others."""
    wanted = list(families)
    models = {family.model for family in wanted}
    why = {model: ask() for model, ask in WHY_NOT.items() if model in models}
    served = [family for family in wanted if not why.get(family.model)]
    left_out = {family.name: why[family.model] for family in wanted if why.get(family.model)}
    return served, left_out


def subsets_of(family: Family) -> list[str]:
    """Return the names of the subsets that a family is in."""
    return [name for name, families in SUBSETS.items() if family.name in families]


def judge(family: Family, found: Accuracy, counters: NixlCounters) -> str | None:
    """Return why a family has not passed; ``None`` where it has."""
    if counters.failed_transfers or counters.failed_notifications:
        return f"{counters.failed_transfers} reads failed"
    if not counters.bytes_moved:
        return "nothing was moved over NIXL"
    if family.exact and found.equal < found.requests:
        return f"{found.requests - found.equal} answers differ"
    if family.exact and found.logprob_gap > accuracy.LOGPROB_BOUND:
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
    ) -> None:
        self._run_dir = run_dir
        self._num_requests = num_requests
        self._startup_timeout_s = startup_timeout_s
        self._on_wait = on_wait
        self._say = say
        self._models = models
        self._after = after

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
        self._say(f"  {result.fault or 'passed'}")
        return result


@dataclass
class _Group:
    """The engines of one model."""

    stack: PDStack
    num_requests: int
    after: After = lambda _stack, _router: None
    _engines: dict[tuple[Side, tuple[str, ...], int], Engine] = field(default_factory=dict)
    _references: dict[tuple[str, ...], list[Completion]] = field(default_factory=dict)

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
        answers = accuracy.complete_all(router.url, name, prompts, salt=family.name)
        counters = sum((each.nixl_counters() for each in decode), NixlCounters()) - before
        found = accuracy.compare(references, answers)
        fault = judge(family, found, counters)
        if fault is None:
            fault = self.after(self.stack, router)
        self.stack.stop(router)
        return Result(family, found, counters.bytes_moved, fault)

    def _reference(self, family: Family, prompts: list[list[int]]) -> list[Completion]:
        """What one engine answers; any that is one rank, alone and under another salt."""
        if family.args not in self._references:
            one, name = self._engines[_one_rank(family)], self.stack.model.name
            self._references[family.args] = accuracy.complete_all(
                one.url, name, prompts, salt="reference"
            )
        return self._references[family.args]

    def _start(self, family: Family) -> tuple[list[Engine], list[Engine]]:
        """The engines of a family; those that are in the way are stopped first.

        The one that says what is right is started with them, where it has not said so yet.
        """
        keys = [
            [(replace(side, count=1), family.args, first + number) for number in range(side.count)]
            for side, first in _numbered(family)
        ]
        wanted = [key for side in keys for key in side]
        if family.args not in self._references and _one_rank(family) not in wanted:
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


def _numbered(family: Family) -> list[tuple[Side, int]]:
    """Both sides, with the number of the first engine: equal engines on both sides are two."""
    same = replace(family.prefill, count=1) == replace(family.decode, count=1)
    return [(family.prefill, 0), (family.decode, family.prefill.count if same else 0)]


def _one_rank(family: Family) -> tuple[Side, tuple[str, ...], int]:
    """The engine whose answers a family's are compared with."""
    return Side(), family.args, 0


def _workers(keys: Iterable[tuple[Side, tuple[str, ...], int]]) -> int:
    return sum(side.layout.world_size for side, _, _ in keys)


def _spec(side: Side, args: tuple[str, ...], number: int, block_tokens: int) -> EngineSpec:
    """How an engine is started; pairs share it, so that it may prefill and decode."""
    kv_transfer = KVTransfer()
    kv_transfer = replace(
        kv_transfer, extra_config={**kv_transfer.extra_config, **dict(side.options)}
    )
    if side.connector == "MultiConnector":
        child = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
        kv_transfer = KVTransfer("MultiConnector", extra_config={"connectors": [child]})
    stages = dict(side.env).get("VLLM_PP_LAYER_PARTITION", "").replace(",", "-")
    drafts = str(side.speculation or "")
    options = [value for _, value in side.options]
    parts = [str(side.layout), stages, side.connector, drafts, *options, *side.args, *args]
    parts.append(str(number))
    name = "-".join(part.strip("-") for part in parts if part)
    # So many blocks hold the prompts of a sweep, but not longer ones that somebody asks for.
    is_longer = any(word.split("=")[0] == "--max-model-len" for word in side.args)
    num_blocks = _CACHE_TOKENS // block_tokens
    blocks = () if is_longer else ("--num-gpu-blocks-override", str(num_blocks))
    return EngineSpec(
        name,
        side.layout,
        kv_transfer,
        extra_args=(*blocks, *side.args, *args),
        env=dict(side.env),
        max_model_len=1024,
        speculation=side.speculation,
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
                str(found.equal),
                f"{found.logprob_gap:.1e}",
                format_bytes(result.bytes_moved),
                f"{found.ttft_p50_s:.2f} s",
                f"{found.reference_ttft_p50_s:.2f} s",
            ]
        )
        sides = str(family.prefill), str(family.decode)
        table.add_row(family.name, *sides, family.model, *measured, yes_no(result.fault is None))
    return table

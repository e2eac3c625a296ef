# SPDX-License-Identifier: Apache-2.0
"""The pairs of layouts that a sweep compares, and the models that they serve."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from .caches import Caches, why_no_caches
from .engine import (
    ServedModel,
    Speculation,
    why_no_deepseek4,
    why_no_first_tokens,
    why_no_mla,
    why_no_model,
    why_no_second_runner,
    why_no_state,
)
from .errors import UsageError
from .family import STAGED, Family, Side
from .installation import Installation
from .layout import Layout
from .tiny_checkpoints import (
    write_tiny_llama_with_eagle,
    write_tiny_mimo,
    write_tiny_mimo2,
    write_tiny_nemotron_nas,
    write_tiny_step3p5,
)
from .tiny_deepseek4 import write_tiny_deepseek4
from .tiny_models import (
    write_tiny_deepseek2,
    write_tiny_falcon_h1,
    write_tiny_gemma3,
    write_tiny_gemma4,
    write_tiny_llama,
    write_tiny_qwen3_next,
)

MODELS: Mapping[str, Callable[[Path], ServedModel]] = {
    "llama, 6 KV heads": lambda directory: write_tiny_llama(
        directory, num_layers=6, num_heads=6, num_kv_heads=6
    ),
    "llama, 2 KV heads": lambda directory: write_tiny_llama(
        directory, num_layers=4, num_heads=4, num_kv_heads=2
    ),
    "llama, 1 KV head": lambda directory: write_tiny_llama(
        directory, num_layers=4, num_heads=4, num_kv_heads=1
    ),
    "llama, heads of 128": lambda directory: write_tiny_llama(
        directory, num_layers=6, num_heads=4, num_kv_heads=4, head_size=128
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
    "deepseek 4": write_tiny_deepseek4,
}

(
    _SIX,
    _TWO,
    _SINGLE,
    _WIDE,
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
    _V4,
) = MODELS


WHY_NOT: Mapping[str, Callable[[], str]] = {
    _MLA: why_no_mla,
    _GEMMA4: lambda: why_no_model("gemma4"),
    _MIMO2: lambda: why_no_model("mimo_v2"),
    _STEP: lambda: why_no_model("step3p5"),
    _MAMBA: why_no_state,
    _GDN: why_no_state,
    _V4: why_no_deepseek4,
}
"""For models that not every vLLM can serve: says why the installed one cannot."""

_HYBRID = ("--no-disable-hybrid-kv-cache-manager",)
_BF16 = ("--dtype", "bfloat16")
_RAY = ("--distributed-executor-backend", "ray")
_STAGES = Layout(1, 2)
_ONE, _RANKS = Layout(1, 1), Layout(2, 1)
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
_EARLY, _SEEDED = (("early_dispatch", True),), (("seed_first_token", True),)
# In the only order in which it reads the state of a convolution by its parts.
_UPSTREAM = Side(connector="upstream", env=(("VLLM_SSM_CONV_STATE_LAYOUT", "DS"),))

_UNEVEN = (Layout(3, 1), _RANKS)
_CACHE_LAYOUTS = {
    **_LAYER_LAYOUTS,
    "TP not divisible": _UNEVEN,
    "PP x TP": (Layout(2, 2), _RANKS),
    "TP to TP": (_RANKS, _RANKS),
    "TP4 to TP2": (Layout(4, 1), _RANKS),
    "TP4 to TP4": (Layout(4, 1), Layout(4, 1)),
}

# Model, caches of P and of D, and pairs of layouts. Of slots, each size of blocks and each order of
# heads and tokens is at either end.
_OF_GPUS: tuple[tuple[str, Caches, Caches, tuple[str, ...]], ...] = (
    *(
        (_SIX, cache_p, cache_d, ("TP down", "TP up", "TP not divisible", "PP to TP"))
        for cache_p, cache_d in (
            (Caches("NHD", 16), Caches("HND", 64)),
            (Caches("HND", 64), Caches("NHD", 16)),
            (Caches("NHD", 48), Caches("HND", 32)),
        )
    ),
    # Of 0.22.1, the last release that has them so.
    (_SIX, Caches("NHD", 48, "Planes"), Caches("HND", 32, "Planes"), ("TP down", "PP to TP")),
    (_SIX, Caches("BHLNC", 48), Caches("LHBNC", 256), ("PP to TP",)),
    (_SIX, Caches("NHD", 64, kernel_tokens=16), Caches("HND", 96, kernel_tokens=48), ("TP down",)),
    (_GEMMA, Caches("NHD", 64), Caches("HND", 16), ("TP down", "PP to TP")),
    (_GEMMA, Caches("HND", 96, kernel_tokens=16), Caches("NHD", 48), ("TP up",)),
    (_MLA, Caches("HND", 64), Caches("HND", 16), ("TP down", "PP to TP")),
    (_MLA, Caches("HND", 32), Caches("HND", 48), ("TP up",)),
    (_SIX, Caches("HND", 64, "Sides"), Caches("NHD", 32, "Sides"), ("TP down", "PP to TP")),
    # What settings differ in may have a say in its values, so that its two layouts are no pair.
    (_SIX, Caches("HND", 32, "PackedSides"), Caches("HND", 32, "PackedSides"), ("PP to TP",)),
    (
        _SIX,
        Caches("LHBNC", 32, "Shuffled"),
        Caches("HND", 32, "Shuffled"),
        ("TP down", "PP to TP"),
    ),
    # Backends for heads of no other size, or of no smaller one.
    *(
        (_WIDE, cache_p, cache_d, (layouts,))
        for cache_p, cache_d, layouts in (
            (
                Caches("NHD", 128, "MinimaxM3"),
                Caches("HND", 256, "MinimaxM3", kernel_tokens=128),
                "TP down",
            ),
            (Caches("HND", 128, "MinimaxM3Nvfp4"), Caches("HND", 128, "MinimaxM3Nvfp4"), "TP down"),
            (Caches("HND", 32, "Nvfp4"), Caches("HND", 32, "Nvfp4"), "TP down"),
            (Caches("HND", 32, "Nvfp4"), Caches("BLHNC", 32, "Nvfp4"), "PP to TP"),
            (Caches("NHD", 64, "TurboQuant"), Caches("NHD", 16, "TurboQuant"), "TP down"),
            (Caches("NHD", 16, "TurboQuant3"), Caches("NHD", 64, "TurboQuant3"), "PP to TP"),
            (Caches("NHD", 64, "UltraQuant"), Caches("NHD", 32, "UltraQuant"), "TP up"),
        )
    ),
    (_SIX, Caches("NHD", 16, "Scaled"), Caches("HND", 64, "Scaled"), ("TP down", "PP on P")),
    (_SIX, Caches("HND", 32, "ScalesLast"), Caches("HND", 32, "ScalesLast"), ("PP on P",)),
    (_SIX, Caches("NHD", 32, "Scrambled"), Caches("NHD", 32, "Scrambled"), ("PP on P", "PP x TP")),
    (_MLA, Caches("HND", 32, "Scrambled"), Caches("HND", 32, "Scrambled"), ("TP down", "PP to TP")),
    # Decode context parallelism, in runs of a block where nothing else is said.
    *(
        (_SINGLE, cache_p, cache_d, (layouts,))
        for cache_p, cache_d, layouts in (
            (Caches("HND", 32), Caches("HND", 32, shares=2), "TP to TP"),
            (Caches("HND", 32, shares=2), Caches("NHD", 48), "TP down"),
            (
                Caches("HND", 16, shares=4),
                Caches("NHD", 32, shares=2, run_tokens=8),
                "TP4 to TP2",
            ),
            (
                Caches("NHD", 64, shares=2, run_tokens=1),
                Caches("HND", 64, shares=2, run_tokens=1),
                "PP x TP",
            ),
            (Caches("HND", 32), Caches("HND", 16, shares=2, run_tokens=4), "PP to TP"),
            (Caches("HND", 32), Caches("NHD", 48, shares=2), "TP4 to TP4"),
            (Caches("NHD", 16), Caches("HND", 32, shares=4, run_tokens=8), "TP4 to TP4"),
        )
    ),
    (_MLA, Caches("HND", 16), Caches("HND", 32, shares=2), ("TP up", "PP to TP")),
    (_MLA, Caches("HND", 32, shares=2), Caches("HND", 16), ("TP down",)),
    (
        _MLA,
        Caches("HND", 32, shares=2),
        Caches("HND", 16, shares=2, run_tokens=1),
        ("TP to TP",),
    ),
)


def _with_caches(model: str, cache_p: Caches, cache_d: Caches, layouts: str) -> Family:
    """A pair of engines that fill their caches as backends for GPUs do.

    Their answers are those of vLLM's own attention for CPU, but where caches have few bits.
    """
    prefill, decode = _CACHE_LAYOUTS[layouts]
    few_bits = cache_p.has_few_bits
    kind = {_GEMMA: "windows ", _MLA: "MLA "}.get(model, "")
    pair = f"{cache_p} to {cache_d}" if cache_p != cache_d else str(cache_p)
    return Family(
        f"{kind}{pair}, {layouts}",
        model,
        Side(prefill, caches=cache_p),
        Side(decode, caches=cache_d),
        # Of a prompt in other chunks, a sum of another order may be rounded to the next of 8 bits.
        exact=not few_bits,
        args=_HYBRID if model == _GEMMA else (),
        one=Side(caches=cache_d if few_bits else None),
    )


def _staged(family: Family) -> Family:
    """The same, with reads by way of the decode engine's staging arena."""
    decode = replace(family.decode, options=(STAGED,))
    return replace(family, name=f"staged {family.name}", decode=decode)


# Which model runners there are at both ends, by what a family is called; and pairs of layouts.
_RUNNERS: tuple[tuple[str, bool, bool, tuple[str, ...]], ...] = (
    ("second runner", True, True, ("TP down", "TP up", "PP on P", "PP to TP")),
    ("first to second runner", False, True, ("TP up", "PP to TP")),
    ("second to first runner", True, False, ("TP down", "PP on P")),
)

# Of requests that are sent to both engines at once. With chunks, a step computes 128 tokens of
# prompts that have up to 900.
_CHUNKS = ("--max-num-batched-tokens", "128", "--max-num-seqs", "16")
# And of answers that begin with the prefill engine's token, by each model runner.
_OF_OPTIONS: tuple[tuple[str, str, Side, tuple[str, ...], tuple[str, ...]], ...] = (
    ("early", _SIX, Side(options=_EARLY), (), ("TP down", "PP to TP")),
    ("early windows", _GEMMA, Side(options=_EARLY), _HYBRID, ("PP on P",)),
    ("early state", _MAMBA, Side(options=_EARLY), (), ("TP down",)),
    ("early chunks", _SIX, Side(options=_EARLY), _CHUNKS, ("PP on P",)),
    ("seeded", _SIX, Side(options=_SEEDED), (), ("TP down", "PP to TP")),
    ("MLA seeded", _MLA, Side(options=_SEEDED), (), ("PP on P",)),
    ("seeded second runner", _SIX, Side(options=_SEEDED, second_runner=True), (), ("TP down",)),
    ("early seeded", _SIX, Side(options=_EARLY + _SEEDED), (), ("PP to TP",)),
    ("early seeded chunks", _SIX, Side(options=_EARLY + _SEEDED), _CHUNKS, ("PP on P",)),
)

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
    # Upstream's connector is compared with one engine as well. Not with TP down, where none of its
    # answers was equal.
    Family("Mamba 2, upstream's", _MAMBA, _UPSTREAM, _UPSTREAM),
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
    *(
        # At bfloat16, where ranks add up their parts in another order than one rank does.
        Family(
            f"DeepSeek V4 {layouts}",
            _V4,
            Side(prefill),
            Side(decode),
            exact=prefill.tp_size == decode.tp_size,
        )
        for layouts, (prefill, decode) in _LAYER_LAYOUTS.items()
    ),
    Family("MTP on D", _MIMO, Side(_STAGES), Side(speculation=_MTP, options=_COLD)),
    *(
        Family(
            f"{name}, {each}",
            _SIX,
            Side(_LAYER_LAYOUTS[each][0], second_runner=prefill),
            Side(_LAYER_LAYOUTS[each][1], second_runner=decode),
        )
        for name, prefill, decode, layouts in _RUNNERS
        for each in layouts
    ),
    Family(
        "windows second runner, PP on P",
        _GEMMA,
        Side(_STAGES, second_runner=True),
        Side(second_runner=True),
        args=_HYBRID,
    ),
    Family(
        "MLA second runner, TP down",
        _MLA,
        Side(_RANKS, second_runner=True),
        Side(second_runner=True),
    ),
    # Decode engines run the first runner, as vLLM for CPU does by itself.
    Family("MLA PCP on P", _MLA, Side(Layout(pcp_size=2), second_runner=True), Side()),
    Family(
        "MLA PCP and PP on P",
        _MLA,
        Side(Layout(pp_size=2, pcp_size=2), second_runner=True),
        Side(_RANKS),
    ),
    *(
        Family(
            f"{name}, {each}",
            model,
            replace(side, layout=_LAYER_LAYOUTS[each][0]),
            replace(side, layout=_LAYER_LAYOUTS[each][1]),
            args=args,
        )
        for name, model, side, args, layouts in _OF_OPTIONS
        for each in layouts
    ),
    *(
        _with_caches(model, cache_p, cache_d, each)
        for model, cache_p, cache_d, layouts in _OF_GPUS
        for each in layouts
    ),
    # Ranks that share tokens out one by one: what is read of them are single tokens.
    _staged(
        _with_caches(
            _SINGLE, Caches("NHD", 64, shares=2, run_tokens=1), Caches("NHD", 48), "TP down"
        )
    ),
)

SUBSETS: Mapping[str, tuple[str, ...]] = {
    # What the end-to-end tests do not run, in at most 15 minutes on two cores: there, an engine
    # takes up to 100 s to start, and a family 25 s once its engines are up. Not bfloat16: what its
    # elements are, reads do not know. Nor uneven stages, which workers without engines read.
    "ci": ("TP not divisible", "MultiConnector", "Mamba 2 PP to TP"),
    # With ranks at one end and stages at the other, to see that another base works at all.
    "base": ("TP and PP on both",),
    # Of each kind of cache and of draft, one pair of ranks and stages, for two releases.
    "releases": (
        "TP not divisible",
        "PP on P",
        "sliding windows",
        "MLA TP down",
        "Mamba 2 PP to TP",
        "delta net TP down",
        "Gemma 4 PP to TP",
        "MiMo-V2 PP to TP",
        "Nemotron-NAS PP to TP",
        "n-grams on D",
        "EAGLE",
        "draft model",
        "MTP",
    ),
}
"""Families that are run together under one name."""


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


def across(family: Family, here: str, other: Installation) -> tuple[Family, Family]:
    """Return a family with this release at its prefill engines, and with it at its decode engines.

    Args:
        here: the release of this installation.
        other: the installation at the other end.
    """
    return (
        replace(
            family,
            name=f"{family.name}, {here} to {other.release}",
            decode=replace(family.decode, installation=other),
        ),
        replace(
            family,
            name=f"{family.name}, {other.release} to {here}",
            prefill=replace(family.prefill, installation=other),
        ),
    )


def split_by_vllm(families: Iterable[Family]) -> tuple[list[Family], dict[str, str]]:
    """Return the families that the installed vLLM can serve, and by name why not the others."""
    wanted = list(families)
    models = {family.model for family in wanted}
    why = {model: ask() for model, ask in WHY_NOT.items() if model in models}
    of_runner = why_no_second_runner() if any(map(_has_second_runner, wanted)) else ""
    of_tokens = why_no_first_tokens() if any(map(_is_seeded, wanted)) else ""
    left_out = {
        family.name: reason
        for family in wanted
        if (
            reason := why.get(family.model)
            or _why_no_caches(family)
            or (of_runner if _has_second_runner(family) else "")
            or (of_tokens if _is_seeded(family) else "")
        )
    }
    return [family for family in wanted if family.name not in left_out], left_out


def _why_no_caches(family: Family) -> str:
    """Why engines cannot fill their caches as it says; empty where they can, or nothing is said."""
    formats = {side.caches.format for side in family.sides if side.caches}
    return why_no_caches(formats) if formats else ""


def _has_second_runner(family: Family) -> bool:
    """Whether vLLM's second model runner runs any of its engines."""
    return any(side.second_runner for side in family.sides)


def _is_seeded(family: Family) -> bool:
    """Whether its answers begin with the prefill engine's token."""
    return any(side.has("seed_first_token") for side in family.sides)


def subsets_of(family: Family) -> list[str]:
    """Return the names of the subsets that a family is in."""
    return [name for name, families in SUBSETS.items() if family.name in families]

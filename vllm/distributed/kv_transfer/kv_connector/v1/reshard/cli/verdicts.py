# SPDX-License-Identifier: Apache-2.0
"""How engines would treat a model: serve it, refuse it, or leave it to upstream's connector.

The contents of a block depend on the attention backend, and so on the GPU and on options that are
not in `config.json`. Engines compare them at the handshake.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from ..plan.mesh import ParallelMesh
from ..plan.text import layers_text
from .caches import Family
from .model import ModelSizes


class Verdict(Enum):
    """How engines treat a model or a part of it."""

    SERVED = "served"
    REFUSED = "refused"
    UPSTREAM = "upstream's"


@dataclass(frozen=True, slots=True)
class Note:
    """A verdict on a model or a part of it.

    Attributes:
        verdict: The verdict.
        where: Devices and options that it holds for.
        why: The reason, as one sentence without a full stop.
    """

    verdict: Verdict
    where: str
    why: str


@dataclass(frozen=True, slots=True)
class Backend:
    """An attention backend with its own arrangement of heads in blocks.

    Attributes:
        where: Its name, with the devices and options that it is used with.
        is_whole: True if its blocks are opaque and differ from rank to rank.
    """

    where: str
    is_whole: bool = False


ARRANGED = (
    Backend("CPU_ATTN on CPU"),
    Backend("FLASHINFER on NVIDIA with --kv-cache-dtype nvfp4"),
    Backend("ROCM_ATTN on AMD"),
    Backend("ROCM_AITER_FA on AMD with VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT"),
    Backend("ROCM_AITER_UNIFIED_ATTN on AMD with VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", is_whole=True),
)
"""Backends for heads that require blocks of equal size at both engines."""

EVERYWHERE = "everywhere"
FIRST_BASE = "vLLM 0.22.1"
_BLACKWELL = "NVIDIA Blackwell"


def judge(
    model: ModelSizes,
    prefill: ParallelMesh,
    decode: ParallelMesh,
    block_tokens: tuple[int, int],
) -> tuple[Note, ...]:
    """Return how engines with these two layouts would treat a model.

    Args:
        model: The model.
        prefill: Mesh of the prefill engine, which is read from.
        decode: Mesh of the decode engine, which reads.
        block_tokens: Tokens in a block of the prefill and of the decode engine.

    Raises:
        ValueError: An engine would refuse the model when it starts, or refuse the other engine.
    """
    if (family := model.family) is not None and not family.is_served:
        return (_left_to_upstream(family, prefill, decode),)
    notes = [] if family is None else [*_of_family(family, prefill, decode)]
    shares_slots = family is not None and any(each.state_tokens > 1 for each in family.caches)
    if shares_slots or model.state:
        what = "several tokens as one" if shares_slots else "recurrent state"
        notes.append(
            Note(
                Verdict.UPSTREAM,
                FIRST_BASE,
                f"a model that keeps {what} is left to upstream's NixlConnector, and refused with "
                "stages",
            )
        )
    if model.keeps_heads:
        notes += _of_backends(prefill, decode, block_tokens)
    if model.draft_layers:
        notes.append(_drafts(model.draft_layers))
    return tuple(notes)


def _left_to_upstream(family: Family, prefill: ParallelMesh, decode: ParallelMesh) -> Note:
    kept = "; ".join(
        f"{layers_text(each.layers)} keep{'s' * (len(each.layers) == 1)} {each.unserved}"
        for each in family.unserved
    )
    if max(prefill.pp_size, decode.pp_size) > 1:
        raise ValueError(
            f"{family.name} is left to upstream's NixlConnector, which does not support pipeline "
            f"parallelism ({kept}): use pp=1 at both engines"
        )
    if max(prefill.tp_size, decode.tp_size) % min(prefill.tp_size, decode.tp_size):
        raise ValueError(
            f"{family.name} is left to upstream's NixlConnector, which needs TP sizes of which one "
            f"divides the other, not {prefill.tp_size} and {decode.tp_size} ({kept}): use others"
        )
    return Note(
        Verdict.UPSTREAM,
        EVERYWHERE,
        f"{family.name} is left to upstream's NixlConnector, at both engines: {kept}",
    )


def _of_family(family: Family, prefill: ParallelMesh, decode: ParallelMesh) -> Iterator[Note]:
    """Return the notes on a family that this connector serves."""
    if shared := [each.name for each in family.caches if each.is_whole and each.num_units > 1]:
        note = _uncut(EVERYWHERE, f"whole blocks of {_listed(shared)}", prefill, decode)
        if note.verdict is Verdict.REFUSED:
            raise ValueError(
                f"{family.name} keeps {_listed(shared)} of each rank's own, and such blocks, which "
                "nobody looks into, cannot be cut: use one tp at both engines, not "
                f"{prefill.tp_size} and {decode.tp_size}"
            )
        yield note
    if whole := [each.name for each in family.caches if each.is_whole and each.num_units == 1]:
        yield Note(
            Verdict.SERVED,
            EVERYWHERE,
            f"whole blocks of {_listed(whole)}, with any TP and PP, where both engines have the "
            "same attention backends",
        )
    if family.chooses_fp8_on_blackwell:
        yield Note(
            Verdict.REFUSED,
            f"{_BLACKWELL} beside any other",
            f"{family.name} keeps its latent there in 8 bits, unless both engines are given one "
            "--kv-cache-dtype",
        )


def _of_backends(
    prefill: ParallelMesh, decode: ParallelMesh, block_tokens: tuple[int, int]
) -> Iterator[Note]:
    """Return what the backends in `ARRANGED` refuse of these layouts."""
    if block_tokens[0] != block_tokens[1]:
        yield Note(
            Verdict.REFUSED,
            _listed([each.where for each in ARRANGED]),
            "what is arranged by the backend needs one --block-size at both engines, not "
            f"{block_tokens[0]} and {block_tokens[1]}",
        )
    for each in ARRANGED:
        if each.is_whole and prefill.tp_size != decode.tp_size:
            yield _uncut(each.where, "heads, moved in whole blocks", prefill, decode)


def _uncut(where: str, what: str, prefill: ParallelMesh, decode: ParallelMesh) -> Note:
    """Return the note on blocks that differ from rank to rank, which need equal TP."""
    if prefill.tp_size == decode.tp_size:
        return Note(Verdict.SERVED, where, f"{what}, as long as TP is the same at both engines")
    return Note(
        Verdict.REFUSED,
        where,
        f"{what}, need one --tensor-parallel-size at both engines, not {prefill.tp_size} and "
        f"{decode.tp_size}",
    )


def _drafts(num_layers: int) -> Note:
    return Note(
        Verdict.SERVED,
        "--speculative-config with method mtp",
        f"{num_layers} layer{'s' * (num_layers != 1)} more, on the last stage, which "
        f"{'is' if num_layers == 1 else 'are'} not counted here: both engines draft alike, or "
        "neither does",
    )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:-1]) + " and " * (len(names) > 1) + names[-1]

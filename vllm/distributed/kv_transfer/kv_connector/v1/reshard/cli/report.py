# SPDX-License-Identifier: Apache-2.0
"""From the command's arguments to a plan, and to all that is told about it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..plan.mesh import ParallelMesh
from ..plan.reshard import ReshardPlan, plan_reshard
from ..plan.shards import Shard, shard_model
from ..plan.text import layers_text
from ..plan.verify import verify_plan
from .figures import CacheFormat, PlanFigures, measure_plan
from .model import LayerSizes, ModelSizes, element_bytes, read_model
from .recurrent_state import StateRead, plan_state

_MAX_PROMPT_TOKENS = 1 << 21


@dataclass(frozen=True, slots=True)
class PlanReport:
    """All that is told about a plan.

    Attributes:
        prefill: The mesh that is read from.
        decode: The mesh that reads.
        src: The shards of the prefill engine.
        dst: The shards of the decode engine.
        plan: The plan.
        figures: What it costs.
        num_layers: Layers of the model.
        num_kv_heads: KV heads of each layer, as given.
        model: The model in words.
        is_mla: The model keeps one latent in place of heads.
        cache_format: How the caches lie in memory.
        layers: What each layer with a KV cache of its own keeps, where layers differ; by index.
        knows_bytes: Sizes in bytes are known; else only descriptors can be counted.
        prompt_tokens: Length of the prompt that a request is counted with.
        state: What is read of recurrent state.
        state_element_bytes: Size of an element of it.
    """

    prefill: ParallelMesh
    decode: ParallelMesh
    src: Sequence[Shard]
    dst: Sequence[Shard]
    plan: ReshardPlan
    figures: PlanFigures
    num_layers: int
    num_kv_heads: int
    model: str
    is_mla: bool
    cache_format: CacheFormat
    layers: Mapping[int, LayerSizes]
    knows_bytes: bool
    prompt_tokens: int
    state: Sequence[StateRead] = ()
    state_element_bytes: int = 1


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What the arguments and the model's configuration say together.

    Attributes:
        num_layers: Layers with a KV cache.
        num_kv_heads: KV heads of each layer; 1 for MLA.
        is_mla: One latent takes the place of keys and values.
        slot_elements: Elements of one head of one token in one plane; None where nothing says.
        dtype: Name of the elements' type.
        model: What the configuration says, where there is one.
        keeps_windows: Layers with windows keep no more than these.
        layers: What each layer keeps, where they differ.
    """

    num_layers: int
    num_kv_heads: int
    is_mla: bool
    slot_elements: int | None
    dtype: str
    model: ModelSizes | None
    keeps_windows: bool
    layers: Mapping[int, LayerSizes]


def make_report(args: argparse.Namespace) -> PlanReport:
    """Plan what the arguments describe, and measure it.

    Raises:
        ValueError: An argument is malformed, or vLLM could not run one of the layouts.
    """
    sizes = _read_sizes(args)
    prefill, src = _read_layout(args, "prefill", sizes)
    decode, dst = _read_layout(args, "decode", sizes)
    plan = plan_reshard(src, dst)
    faults = verify_plan(src, dst, plan)
    assert not faults, faults
    cache_format = _cache_format(args, sizes)
    if not 1 <= args.prompt_tokens <= _MAX_PROMPT_TOKENS:
        raise ValueError(
            f"--prompt-tokens is {args.prompt_tokens} but must be between 1 and "
            f"{_MAX_PROMPT_TOKENS}"
        )
    return PlanReport(
        prefill=prefill,
        decode=decode,
        src=src,
        dst=dst,
        plan=plan,
        figures=measure_plan(plan, src, dst, cache_format, args.prompt_tokens),
        num_layers=sizes.num_layers,
        num_kv_heads=sizes.num_kv_heads if args.num_kv_heads is None else args.num_kv_heads,
        model=_in_words(sizes),
        is_mla=sizes.is_mla,
        cache_format=cache_format,
        layers=sizes.layers,
        knows_bytes=sizes.slot_elements is not None,
        prompt_tokens=args.prompt_tokens,
        state=_plan_state(args, sizes, prefill, decode),
        state_element_bytes=element_bytes(sizes.dtype),
    )


def _plan_state(
    args: argparse.Namespace, sizes: _Sizes, prefill: ParallelMesh, decode: ParallelMesh
) -> tuple[StateRead, ...]:
    """What is read of the model's state, unless sizes are given that take its place."""
    if sizes.model is None or _overrides(args):
        return ()
    ends = (
        (mesh, _parse_partition(role, getattr(args, f"{role}_layer_partition")))
        for role, mesh in (("prefill", prefill), ("decode", decode))
    )
    return plan_state(sizes.model.state, sizes.num_layers, *ends)


def _read_sizes(args: argparse.Namespace) -> _Sizes:
    """The sizes that decide: a number that is given comes before the model's own.

    Raises:
        ValueError: One is missing or impossible, or the model's configuration cannot be read.
    """
    model = None if args.model is None else read_model(args.model)
    is_mla = args.mla or (model is not None and model.is_mla and args.num_kv_heads is None)
    num_layers, num_kv_heads = args.num_layers, args.num_kv_heads
    if model is not None:
        num_layers = model.num_layers if num_layers is None else num_layers
        num_kv_heads = model.num_kv_heads if num_kv_heads is None else num_kv_heads
    if num_layers is None:
        raise ValueError("--num-layers is missing: give the model's layers, or --model")
    if num_layers < 1:
        raise ValueError(f"--num-layers is {num_layers} but must be at least 1")
    if num_kv_heads is None and not is_mla:
        raise ValueError("--num-kv-heads is missing: give the model's KV heads, or --mla")
    slot_elements = args.head_size
    if slot_elements is None and model is not None and model.is_mla == is_mla:
        slot_elements = model.slot_elements
    if slot_elements is not None and slot_elements < 1:
        raise ValueError(f"--head-size is {slot_elements} but must be at least 1")
    return _Sizes(
        num_layers=num_layers,
        num_kv_heads=1 if is_mla else num_kv_heads,
        is_mla=is_mla,
        slot_elements=slot_elements,
        dtype=args.dtype or (model and model.dtype) or "bfloat16",
        model=model,
        keeps_windows=_keeps_windows(args, model),
        layers={} if model is None or _overrides(args) else model.layers,
    )


def _overrides(args: argparse.Namespace) -> bool:
    """Whether sizes are given that take the place of those of the model's layers."""
    return args.mla or any(
        given is not None for given in (args.num_layers, args.num_kv_heads, args.head_size)
    )


def _keeps_windows(args: argparse.Namespace, model: ModelSizes | None) -> bool:
    """Whether engines keep windows only: vLLM's hybrid KV-cache manager is on.

    With this connector it is, unless somebody turns it off, or vLLM does, as with chunks.
    """
    if args.disable_hybrid_kv_cache_manager is not None:
        return not args.disable_hybrid_kv_cache_manager
    return model is not None and not model.is_chunked


def _read_layout(
    args: argparse.Namespace, role: str, sizes: _Sizes
) -> tuple[ParallelMesh, tuple[Shard, ...]]:
    """The mesh of one engine, and what its ranks hold.

    Raises:
        ValueError: vLLM could not run it.
    """
    partition = _parse_partition(role, getattr(args, f"{role}_layer_partition"))
    try:
        mesh = _parse_mesh(getattr(args, role))
        num_kv_heads: int | dict[int, int] = sizes.num_kv_heads
        if sizes.layers:
            num_kv_heads = {layer: each.num_kv_heads for layer, each in sizes.layers.items()}
        return mesh, shard_model(mesh, sizes.num_layers, num_kv_heads, partition)
    except ValueError as error:
        raise ValueError(f"--{role} {getattr(args, role)}: {error}") from error


def _parse_mesh(text: str) -> ParallelMesh:
    """Read `tp=4,pp=2`; what is left out is 1."""
    sizes: dict[str, int] = {}
    for item in text.split(","):
        axis, _, size = item.strip().partition("=")
        if axis not in ("tp", "pp") or axis in sizes or not size.isdecimal():
            raise ValueError(f"{item!r} is not understood: write tp=N,pp=N, each axis at most once")
        sizes[axis] = int(size)
    return ParallelMesh(pp_size=sizes.get("pp", 1), tp_size=sizes.get("tp", 1))


def _parse_partition(role: str, text: str | None) -> list[int] | None:
    """Read `10,22`."""
    if text is None:
        return None
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--{role}-layer-partition {text!r} is not understood: write one number a stage, "
            "separated by commas"
        ) from None


def _cache_format(args: argparse.Namespace, sizes: _Sizes) -> CacheFormat:
    """How the caches lie in memory; of one element a slot where its size is not known."""
    block_tokens = []
    for role in ("prefill", "decode"):
        own = getattr(args, f"{role}_block_size")
        name = "--block-size" if own is None else f"--{role}-block-size"
        block_tokens.append(args.block_size if own is None else own)
        if block_tokens[-1] < 1:
            raise ValueError(f"{name} is {block_tokens[-1]} but must be at least 1")
    # A head's key and value lie side by side, as since vLLM 0.32; 0.22.1 keeps them apart, which
    # makes twice as many descriptors of half the size.
    slot_element_bytes = (1 if sizes.is_mla else 2) * element_bytes(sizes.dtype)
    return CacheFormat(
        slot_bytes=slot_element_bytes * (sizes.slot_elements or 1),
        num_planes=1,
        src_block_tokens=block_tokens[0],
        dst_block_tokens=block_tokens[1],
        window_tokens_by_layer=(
            {
                layer: tokens
                for layer, tokens in sizes.model.window_tokens_by_layer.items()
                if layer < sizes.num_layers
            }
            if sizes.model is not None and sizes.keeps_windows
            else {}
        ),
        slot_bytes_by_layer={
            layer: slot_element_bytes * each.slot_elements for layer, each in sizes.layers.items()
        },
    )


def _families(layers: Mapping[int, LayerSizes]) -> dict[LayerSizes, list[int]]:
    """The layers that are alike, in the order of the first of each kind."""
    families: dict[LayerSizes, list[int]] = {}
    for layer, sizes in layers.items():
        families.setdefault(sizes, []).append(layer)
    return families


def _in_words(sizes: _Sizes) -> str:
    """The model in words: 32 layers, 8 KV heads of 128 bfloat16."""
    heads = (
        "one latent (MLA)"
        if sizes.is_mla
        else f"{sizes.num_kv_heads} KV head{'s' * (sizes.num_kv_heads != 1)}"
    )
    dtype = sizes.dtype.removeprefix("torch.")
    text = f"{sizes.num_layers} layer{'s' * (sizes.num_layers != 1)}"
    if sizes.layers:
        text += "".join(
            f"; {layers_text(layers)}: {each.num_kv_heads} KV head{'s' * (each.num_kv_heads != 1)} "
            f"of {each.slot_elements} {dtype}"
            for each, layers in _families(sizes.layers).items()
        )
        if none := [layer for layer in range(sizes.num_layers) if layer not in sizes.layers]:
            text += f"; {layers_text(none)}: no KV cache of their own"
            if sizes.model is not None and sizes.model.state:
                text += ", but state"
    else:
        text += f", {heads}"
        if sizes.slot_elements is not None:
            text += f" of {sizes.slot_elements} {dtype}"
    windows = {} if sizes.model is None else sizes.model.window_tokens_by_layer
    if windows:
        tokens = ", ".join(map(str, sorted(set(windows.values()))))
        kept = (
            "no more is read"
            if sizes.keeps_windows
            else "read in full without the hybrid KV-cache manager"
        )
        text += f"; windows of {tokens} tokens in {len(windows)} layers, {kept}"
    return text

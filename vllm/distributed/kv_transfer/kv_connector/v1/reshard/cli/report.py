# SPDX-License-Identifier: Apache-2.0
"""Makes a plan from the command's arguments, with all data that the command prints about it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..plan.mesh import ParallelMesh
from ..plan.reshard import ReshardPlan, plan_reshard
from ..plan.shards import Layer, Shard, shard_model
from ..plan.text import layers_text
from .caches import Cache, CacheRow, ReadPart, shard_kinds
from .figures import CacheSizes, PlanFigures, ReadFigures, measure_plan
from .layouts import EngineLayout, parse_layout, parse_partition, read_run_tokens
from .limits import MAX_LAYERS, require_size, require_units
from .model import LayerSizes, ModelSizes, element_bytes, read_model
from .recurrent_state import StateRead, plan_state
from .verdicts import Note, judge

_MAX_PROMPT_TOKENS = 1 << 21


@dataclass(frozen=True, slots=True)
class UpstreamReport:
    """The report on a model that is left to upstream's connector, without a plan.

    Attributes:
        prefill: Layout of the prefill engine, which is read from.
        decode: Layout of the decode engine, which reads.
        model: Description of the model.
        caches: Its kinds of cache, without sizes.
        notes: How engines would treat the model.
    """

    prefill: EngineLayout
    decode: EngineLayout
    model: str
    caches: Sequence[CacheRow]
    notes: Sequence[Note]


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The report on a plan.

    Attributes:
        prefill: Layout of the prefill engine, which is read from.
        decode: Layout of the decode engine, which reads.
        src: Shards of the prefill engine.
        dst: Shards of the decode engine.
        plan: The plan.
        figures: Its cost.
        num_layers: Number of layers of the model.
        num_kv_heads: KV heads of each layer, as given.
        model: Description of the model.
        is_mla: True if the model keeps one latent instead of heads.
        cache_sizes: Sizes of the caches of both engines.
        layers: Sizes of each layer with its own KV cache, by index; empty if all layers are alike.
        knows_bytes: True if sizes in bytes are known; otherwise only descriptors are counted.
        prompt_tokens: Length of the prompt of the measured request.
        state: Reads of recurrent state.
        state_element_bytes: Size of one element of the state.
        caches: The kinds of cache that layers keep.
        notes: How engines would treat the model.
    """

    prefill: EngineLayout
    decode: EngineLayout
    src: Sequence[Shard]
    dst: Sequence[Shard]
    plan: ReshardPlan
    figures: PlanFigures
    num_layers: int
    num_kv_heads: int
    model: str
    is_mla: bool
    cache_sizes: CacheSizes
    layers: Mapping[int, LayerSizes]
    knows_bytes: bool
    prompt_tokens: int
    state: Sequence[StateRead] = ()
    state_element_bytes: int = 1
    caches: Sequence[CacheRow] = ()
    notes: Sequence[Note] = ()

    @property
    def keeps_main(self) -> bool:
        """True if layers keep heads or a latent, in blocks of `--block-size` tokens."""
        return not self.caches or _main_name(self.is_mla) in {row.name for row in self.caches}

    @property
    def has_shares(self) -> bool:
        """True if the ranks of one of the engines divide tokens between them."""
        return max(self.prefill.num_shares, self.decode.num_shares) > 1

    @property
    def has_kinds(self) -> bool:
        """True if layers keep another kind of cache than heads or a latent."""
        return {row.name for row in self.caches} > {_main_name(self.is_mla)} or not self.keeps_main

    def parts(self, figures: ReadFigures) -> Iterator[ReadPart]:
        """Divide a read by kind of cache."""
        by_name: dict[str, list[Layer]] = {}
        for layer in figures.read.layers:
            name = _main_name(self.is_mla) if isinstance(layer, int) else layer.partition("/")[2]
            by_name.setdefault(name, []).append(layer)
        for name, layers in by_name.items():
            yield ReadPart(
                name,
                tuple(int(str(layer).partition("/")[0]) for layer in layers),
                figures.read.num_units
                * figures.portion
                * sum(map(self.cache_sizes.token_bytes_of, layers)),
            )


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes from the arguments and the model's configuration together.

    Attributes:
        num_layers: Number of layers of the model.
        num_kv_heads: KV heads of each layer; 1 for MLA.
        is_mla: True if one latent replaces keys and values.
        slot_elements: Elements of one head of one token in one plane; None if unknown.
        dtype: Name of the elements' type.
        model: Sizes from the model's configuration; None without one.
        keeps_windows: True if layers with windows keep only the last tokens.
        layers: Sizes of each layer with its own KV cache, by index; empty if all layers are alike.
        caches: Kinds of cache beside heads or a latent, or instead of them.
        has_main: True if layers keep heads or a latent, not only `caches`.
    """

    num_layers: int
    num_kv_heads: int
    is_mla: bool
    slot_elements: int | None
    dtype: str
    model: ModelSizes | None
    keeps_windows: bool
    layers: Mapping[int, LayerSizes]
    caches: tuple[Cache, ...] = ()
    has_main: bool = True

    def identity(self, layer: int) -> Layer:
        """Return the name of a layer's heads or latent in the plan."""
        return f"{layer}/{_main_name(self.is_mla)}" if self.caches else layer

    @property
    def main_layers(self) -> dict[int, LayerSizes]:
        """Sizes of the heads or the latent of each layer that keeps them, by index."""
        if not self.has_main:
            return {}
        common = LayerSizes(self.num_kv_heads, self.slot_elements or 1)
        return dict(self.layers or dict.fromkeys(range(self.num_layers), common))


def make_report(args: argparse.Namespace) -> PlanReport | UpstreamReport:
    """Make and measure the plan that the arguments describe.

    Raises:
        ValueError: An argument is malformed, vLLM could not run one of the layouts, or this
            connector would refuse it.
    """
    sizes = _read_sizes(args)
    if sizes.caches and any(each.unserved for each in sizes.caches):
        return _left_to_upstream(args, sizes)
    cache_sizes = _cache_sizes(args, sizes)
    prefill, src = _read_layout(args, "prefill", sizes, cache_sizes.src_block_tokens)
    decode, dst = _read_layout(args, "decode", sizes, cache_sizes.dst_block_tokens)
    plan = plan_reshard(src, dst)
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
        figures=measure_plan(plan, src, dst, cache_sizes, args.prompt_tokens),
        num_layers=sizes.num_layers,
        num_kv_heads=sizes.num_kv_heads if args.num_kv_heads is None else args.num_kv_heads,
        model=_in_words(sizes),
        is_mla=sizes.is_mla,
        cache_sizes=cache_sizes,
        layers=sizes.layers,
        knows_bytes=sizes.slot_elements is not None,
        prompt_tokens=args.prompt_tokens,
        state=_plan_state(args, sizes, prefill.mesh, decode.mesh),
        state_element_bytes=element_bytes(sizes.dtype),
        caches=_rows(sizes, cache_sizes),
        notes=_judge(args, sizes, prefill.mesh, decode.mesh, cache_sizes),
    )


def _left_to_upstream(args: argparse.Namespace, sizes: _Sizes) -> UpstreamReport:
    """Report on a model that this connector does not serve.

    Raises:
        ValueError: Upstream's connector does not serve it either.
    """
    prefill, decode = (parse_layout(each, 1) for each in (args.prefill, args.decode))
    if max(prefill.num_shares, decode.num_shares) > 1:
        _check_sharing(sizes)
    assert sizes.model is not None
    rows = (
        CacheRow(each.name, each.layers, each.unserved, 1, None, 0, None) for each in sizes.caches
    )
    notes = judge(sizes.model, prefill.mesh, decode.mesh, (1, 1))
    return UpstreamReport(prefill, decode, _in_words(sizes), tuple(rows), notes)


def _judge(
    args: argparse.Namespace,
    sizes: _Sizes,
    prefill: ParallelMesh,
    decode: ParallelMesh,
    cache_sizes: CacheSizes,
) -> tuple[Note, ...]:
    """Return how engines would treat the model; empty if arguments override its sizes."""
    if sizes.model is None or _overrides(args):
        return ()
    block_tokens = cache_sizes.src_block_tokens, cache_sizes.dst_block_tokens
    return judge(sizes.model, prefill, decode, block_tokens)


def _main_name(is_mla: bool) -> str:
    return "latent" if is_mla else "heads"


def _rows(sizes: _Sizes, cache_sizes: CacheSizes) -> tuple[CacheRow, ...]:
    """Return one row per kind of cache; for heads or latents, one per size and window."""
    block_tokens = cache_sizes.src_block_tokens, cache_sizes.dst_block_tokens
    kinds: dict[tuple[LayerSizes, int], list[int]] = {}
    for layer, each in sizes.main_layers.items():
        window = cache_sizes.window_tokens_by_layer.get(sizes.identity(layer), 0)
        kinds.setdefault((each, window), []).append(layer)
    rows = []
    for (each, window), layers in kinds.items():
        token_bytes = each.num_kv_heads * cache_sizes.token_bytes_of(sizes.identity(layers[0]))
        moved = "slots" if sizes.is_mla else "heads"
        rows.append(
            CacheRow(
                _main_name(sizes.is_mla),
                tuple(layers),
                moved,
                1,
                block_tokens,
                window,
                token_bytes if sizes.slot_elements is not None else None,
            )
        )
    for own in sizes.caches:
        tokens = (own.block_tokens,) * 2 if own.block_tokens else block_tokens
        rows.append(
            CacheRow(
                own.name,
                own.layers,
                "whole blocks" if own.is_whole else "slots",
                own.state_tokens,
                (tokens[0], tokens[1]),
                own.window_tokens if sizes.keeps_windows else 0,
                own.num_units * own.state_bytes / own.state_tokens,
            )
        )
    return tuple(rows)


def _plan_state(
    args: argparse.Namespace, sizes: _Sizes, prefill: ParallelMesh, decode: ParallelMesh
) -> tuple[StateRead, ...]:
    """Return the reads of the model's state; empty if arguments override its sizes."""
    if sizes.model is None or _overrides(args):
        return ()
    ends = (
        (mesh, parse_partition(role, getattr(args, f"{role}_layer_partition")))
        for role, mesh in (("prefill", prefill), ("decode", decode))
    )
    return plan_state(sizes.model.state, sizes.num_layers, *ends)


def _read_sizes(args: argparse.Namespace) -> _Sizes:
    """Return the sizes to plan with: an argument takes precedence over the model's configuration.

    Raises:
        ValueError: A size is missing or impossible, or the configuration cannot be read.
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
    require_size("--num-layers", num_layers, MAX_LAYERS)
    if num_kv_heads is None and not is_mla:
        raise ValueError("--num-kv-heads is missing: give the model's KV heads, or --mla")
    slot_elements = args.head_size
    if slot_elements is None and model is not None and model.is_mla == is_mla:
        slot_elements = model.slot_elements
    if slot_elements is not None and slot_elements < 1:
        raise ValueError(f"--head-size is {slot_elements} but must be at least 1")
    require_size("--head-size", slot_elements or 1)
    family = None if model is None or _overrides(args) else model.family
    sizes = _Sizes(
        num_layers=num_layers,
        num_kv_heads=1 if is_mla else num_kv_heads,
        is_mla=is_mla,
        slot_elements=slot_elements,
        dtype=args.dtype or (model and model.dtype) or "bfloat16",
        model=model,
        keeps_windows=_keeps_windows(args, model),
        layers={} if model is None or _overrides(args) else model.layers,
        caches=() if family is None else family.caches,
        has_main=family is None or (family.has_main and family.is_served),
    )
    state = () if model is None else model.state
    require_units(sum(each.num_kv_heads for each in sizes.main_layers.values()))
    require_units(sum(each.num_units * len(each.layers) for each in sizes.caches))
    require_units(sum(each.num_units * len(each.layers) for each in state))
    return sizes


def _overrides(args: argparse.Namespace) -> bool:
    """Return whether an argument overrides the sizes of the model's layers."""
    return args.mla or any(
        given is not None for given in (args.num_layers, args.num_kv_heads, args.head_size)
    )


def _keeps_windows(args: argparse.Namespace, model: ModelSizes | None) -> bool:
    """Return whether engines keep only windows: whether vLLM's hybrid KV-cache manager is on.

    With this connector it is on, unless an option turns it off, or vLLM does, as for chunked
    windows.
    """
    if args.disable_hybrid_kv_cache_manager is not None:
        return not args.disable_hybrid_kv_cache_manager
    return model is not None and not model.is_chunked


def _read_layout(
    args: argparse.Namespace, role: str, sizes: _Sizes, block_tokens: int
) -> tuple[EngineLayout, tuple[Shard, ...]]:
    """Return the layout of one engine and the shards of its ranks.

    Raises:
        ValueError: vLLM could not run it.
    """
    partition = parse_partition(role, getattr(args, f"{role}_layer_partition"))
    run_tokens = read_run_tokens(args, role, block_tokens)
    try:
        layout = parse_layout(getattr(args, role), run_tokens)
        if layout.num_replicas > 1:
            _check_replicas(role, sizes)
        num_kv_heads = {layer: each.num_kv_heads for layer, each in sizes.main_layers.items()}
        if layout.num_shares > 1:
            _check_sharing(sizes)
        if not sizes.caches:
            shared = layout.num_shares, layout.run_tokens
            shape = layout.mesh, sizes.num_layers, num_kv_heads, partition
            return layout, shard_model(*shape, *shared)
        units = {_main_name(sizes.is_mla): num_kv_heads} if sizes.has_main else {}
        units |= {each.name: dict.fromkeys(each.layers, each.num_units) for each in sizes.caches}
        return layout, shard_kinds(layout.mesh, sizes.num_layers, units, partition)
    except ValueError as error:
        raise ValueError(f"--{role} {getattr(args, role)}: {error}") from error


def _check_replicas(role: str, sizes: _Sizes) -> None:
    """Check that an engine can have prefill context parallelism.

    Raises:
        ValueError: The engine reads, or its model keeps heads.
    """
    if role == "decode":
        raise ValueError("an engine with prefill context parallelism cannot read: leave pcp out")
    if not sizes.is_mla:
        raise ValueError("vLLM has prefill context parallelism for MLA only: leave pcp out")


def _check_sharing(sizes: _Sizes) -> None:
    """Check that ranks can divide the tokens of all layers between them.

    Raises:
        ValueError: Some layers have windows, or caches that this command cannot divide.
    """
    if sizes.keeps_windows and sizes.model is not None and sizes.model.window_tokens_by_layer:
        raise ValueError(
            "vLLM has no decode context parallelism for layers with windows: use dcp=1"
        )
    if sizes.caches:
        raise ValueError(
            "how ranks share out caches that layers keep beside heads or a latent is not known "
            "here: give --num-layers, --head-size and --num-kv-heads or --mla of those alone"
        )


def _cache_sizes(args: argparse.Namespace, sizes: _Sizes) -> CacheSizes:
    """Return the sizes of both caches; slots of unknown size count as one element."""
    block_tokens = []
    for role in ("prefill", "decode"):
        own = getattr(args, f"{role}_block_size")
        name = "--block-size" if own is None else f"--{role}-block-size"
        block_tokens.append(args.block_size if own is None else own)
        if block_tokens[-1] < 1:
            raise ValueError(f"{name} is {block_tokens[-1]} but must be at least 1")
        require_size(name, block_tokens[-1])
    # A head's key and value are adjacent, as they are since vLLM 0.32. 0.22.1 keeps them apart,
    # which makes twice as many descriptors of half the size.
    slot_element_bytes = (1 if sizes.is_mla else 2) * element_bytes(sizes.dtype)
    caches: dict[Layer, Cache] = {
        f"{layer}/{each.name}": each for each in sizes.caches for layer in each.layers
    }
    windows: dict[Layer, int] = {}
    if sizes.model is not None and sizes.keeps_windows:
        windows = {
            sizes.identity(layer): tokens
            for layer, tokens in sizes.model.window_tokens_by_layer.items()
            if layer < sizes.num_layers
        }
        windows |= {
            layer: each.window_tokens for layer, each in caches.items() if each.window_tokens
        }
    return CacheSizes(
        slot_bytes=slot_element_bytes * (sizes.slot_elements or 1),
        num_planes=1,
        src_block_tokens=block_tokens[0],
        dst_block_tokens=block_tokens[1],
        window_tokens_by_layer=windows,
        slot_bytes_by_layer={
            sizes.identity(layer): slot_element_bytes * each.slot_elements
            for layer, each in sizes.layers.items()
        },
        caches=caches,
    )


def _families(layers: Mapping[int, LayerSizes]) -> dict[LayerSizes, list[int]]:
    """Group layers of equal sizes, ordered by the first layer of each group."""
    families: dict[LayerSizes, list[int]] = {}
    for layer, sizes in layers.items():
        families.setdefault(sizes, []).append(layer)
    return families


def _in_words(sizes: _Sizes) -> str:
    """Describe the model, such as "32 layers, 8 KV heads of 128 bfloat16"."""
    dtype = sizes.dtype.removeprefix("torch.")
    text = f"{sizes.num_layers} layer{'s' * (sizes.num_layers != 1)}"
    if not sizes.has_main:
        pass
    elif sizes.layers:
        text += "".join(
            f"; {layers_text(layers)}: {_heads_text(each.num_kv_heads, sizes.is_mla)} "
            f"of {each.slot_elements} {dtype}"
            for each, layers in _families(sizes.layers).items()
        )
        if none := [layer for layer in range(sizes.num_layers) if layer not in sizes.layers]:
            text += f"; {layers_text(none)}: no KV cache of their own"
            if sizes.model is not None and sizes.model.state:
                text += ", but state"
    else:
        text += f", {_heads_text(sizes.num_kv_heads, sizes.is_mla)}"
        if sizes.slot_elements is not None:
            text += f" of {sizes.slot_elements} {dtype}"
    if sizes.model is not None and sizes.model.family is not None and sizes.caches:
        text = f"{sizes.model.family.name}, {text}"
    if any(not each.unserved for each in sizes.caches):
        names = ", ".join(each.name for each in sizes.caches)
        text += f"; beside it {names}" if sizes.has_main else f": {names}"
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


def _heads_text(num_kv_heads: int, is_mla: bool) -> str:
    if is_mla:
        return "one latent (MLA)"
    return f"{num_kv_heads} KV head{'s' * (num_kv_heads != 1)}"

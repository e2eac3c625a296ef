# SPDX-License-Identifier: Apache-2.0
"""Recurrent state for `kv-plan`: the components that layers keep, and which ranks read them.

An engine uses vLLM's specification of each layer (`engine.caches.recurrent_state`). Without an
engine, only the entries of `config.json` are available.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..plan.mesh import ParallelMesh
from ..plan.reshard import Read, ReshardPlan, plan_reshard
from .caches import shard_kinds
from .limits import require_size

STATE_ONLY = frozenset({"mamba", "linear_attention", "conv"})
"""Kinds of layers with state and no KV cache."""

NOTHING_KEPT = frozenset({"mlp", "moe"})
"""Kinds of layers with neither."""

BOTH = frozenset({"hybrid"})
"""Kinds of layers with both."""

_DELTA_NET = (
    *("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"),
    "conv_kernel_dim",
)
"""Sizes of a gated delta net: Qwen's entries, without their prefix `linear_`."""

_NEMOTRON = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


@dataclass(frozen=True, slots=True)
class StateComponent:
    """One component of the state of some layers.

    Attributes:
        name: Its name.
        layers: Indices of the layers that keep it.
        num_units: Number of heads, groups or channels, over all ranks.
        unit_elements: Elements of one head, group or channel.
    """

    name: str
    layers: tuple[int, ...]
    num_units: int
    unit_elements: int


@dataclass(frozen=True, slots=True)
class StateRead:
    """The state that one decode rank reads from one prefill rank.

    Attributes:
        read: The read. Its layers are named after a layer's index and a component.
        layers: Indices of the layers.
        components: Names of the components; the same units are read of each.
        num_elements: Elements read per request.
    """

    read: Read
    layers: tuple[int, ...]
    components: tuple[str, ...]
    num_elements: int


def layer_kinds(config: Mapping[str, Any], num_layers: int) -> list[str] | None:
    """Return the kind of each layer; None if the configuration does not list them."""
    if config.get("model_type") == "falcon_h1":
        return ["hybrid"] * num_layers
    if isinstance(pattern := config.get("hybrid_override_pattern"), str):
        return [_NEMOTRON.get(letter, letter) for letter in pattern]
    if (of_kimi := _kimi_linear(config)) is not None:
        # Kimi numbers layers from 1.
        linear = of_kimi.get("kda_layers") or ()
        return [
            "linear_attention" if layer + 1 in linear else "full_attention"
            for layer in range(num_layers)
        ]
    return config.get("layer_types") or config.get("layers_block_type")


def read_state(config: Mapping[str, Any], kinds: Sequence[str]) -> tuple[StateComponent, ...]:
    """Return the components of a model's state; empty without state, or with an unknown kind."""
    found: list[StateComponent] = []
    for names, parts in (
        ({"mamba", "hybrid"}, _mamba2(config)),
        ({"linear_attention"}, _delta_net(config)),
        ({"conv"}, _short_conv(config)),
    ):
        layers = tuple(layer for layer, kind in enumerate(kinds) if kind in names)
        if layers and parts is not None:
            found += [StateComponent(name, layers, *sizes) for name, *sizes in parts]
    return tuple(found)


def _mamba2(config: Mapping[str, Any]) -> list[tuple[str, int, int]] | None:
    """Return name, units and elements per unit of state, x, B and C; None if not Mamba 2."""
    heads = _first(config, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
    size = _first(config, "mamba_d_head", "mamba_head_dim", "mamba_headdim")
    groups = _first(config, "mamba_n_groups", "n_groups", "mamba_ngroups")
    columns = _first(config, "mamba_d_state", "ssm_state_size")
    kernel = _first(config, "mamba_d_conv", "conv_kernel")
    if not (heads and size and groups and columns and kernel):
        return None
    rows = kernel - 1
    return [
        ("state", heads, size * columns),
        ("x", heads, size * rows),
        ("B", groups, columns * rows),
        ("C", groups, columns * rows),
    ]


def _delta_net(config: Mapping[str, Any]) -> list[tuple[str, int, int]] | None:
    """Return name, units and elements per unit of state, q, k and v; None if no delta net."""
    if (of_kimi := _kimi_linear(config)) is not None:
        # Keys and values have the same number of heads and the same head size.
        names = ("num_heads", "num_heads", "head_dim", "head_dim", "short_conv_kernel_size")
        config = {
            f"linear_{ours}": of_kimi.get(theirs)
            for ours, theirs in zip(_DELTA_NET, names, strict=True)
        }
    key_heads, value_heads, key_size, value_size, kernel = (
        _first(config, f"linear_{name}") for name in _DELTA_NET
    )
    if not (key_heads and value_heads and key_size and value_size and kernel):
        return None
    rows = kernel - 1
    return [
        ("state", value_heads, key_size * value_size),
        ("q", key_heads, key_size * rows),
        ("k", key_heads, key_size * rows),
        ("v", value_heads, value_size * rows),
    ]


def _kimi_linear(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the entry in which Kimi Linear and Kimi K3 describe their layers with state."""
    found = config.get("linear_attn_config")
    return found if isinstance(found, dict) else None


def _short_conv(config: Mapping[str, Any]) -> list[tuple[str, int, int]] | None:
    """Return name, units and elements per unit of a short convolution; None without one."""
    kernel, channels = _first(config, "conv_L_cache"), _first(config, "hidden_size")
    return [("x", channels, kernel - 1)] if kernel and channels else None


def _first(config: Mapping[str, Any], *names: str) -> int | None:
    """Return the first entry that is an integer of at least 1; None without one."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and value > 0:
            require_size(name, value)
            return value
    return None


def plan_state(
    components: Sequence[StateComponent],
    num_layers: int,
    prefill: tuple[ParallelMesh, Sequence[int] | None],
    decode: tuple[ParallelMesh, Sequence[int] | None],
) -> tuple[StateRead, ...]:
    """Plan which rank reads which part of a model's state.

    Args:
        components: The components of the model's state.
        num_layers: Number of layers of the model.
        prefill: The mesh to read from, and its number of layers per stage, or None for vLLM's
            default.
        decode: The same for the reading mesh.

    Raises:
        ValueError: vLLM could not run the model on one of the meshes.
    """
    if not components:
        return ()
    units = {each.name: dict.fromkeys(each.layers, each.num_units) for each in components}
    src, dst = (
        shard_kinds(mesh, num_layers, units, layers_per_stage)
        for mesh, layers_per_stage in (prefill, decode)
    )
    plan: ReshardPlan = plan_reshard(src, dst)
    return tuple(_state_reads(plan, {each.name: each for each in components}))


def _state_reads(
    plan: ReshardPlan, components: Mapping[str, StateComponent]
) -> Iterator[StateRead]:
    for read in plan.reads:
        named = [str(layer).partition("/") for layer in read.layers]
        yield StateRead(
            read,
            tuple(sorted({int(layer) for layer, _, _ in named})),
            tuple(dict.fromkeys(name for _, _, name in named)),
            sum(read.num_units * components[name].unit_elements for _, _, name in named),
        )

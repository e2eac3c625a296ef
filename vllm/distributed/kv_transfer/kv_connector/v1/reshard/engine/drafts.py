# SPDX-License-Identifier: Apache-2.0
"""Layers of drafts: which workers have them, and what happens where the other engine has not.

A draft's layers are read like any others, for they keep the KV of the same tokens. But two engines
may draft with different models, whose layers have the same names; so a draft's layer is known to
other engines by its name and by what it drafts with, and is another one where that differs.

Which layers these are, releases before 0.33 do not say. They are told by their names: vLLM begins
these with what the draft is, or numbers them with what its stage has no layers of. With pipeline
stages that may be the number of another stage's layer: EAGLE's are numbered from how many layers
the stage has. So to other engines a draft's layers are numbered from 0 always.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from ..errors import LocalLayoutError, RemoteLayoutError
from ..plan.shards import Layer, Shard
from .factors import draft_identity

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_MARK = "@draft-"
_DRAFT_PARTS = frozenset({"draft_model", "eagle_layers", "mtp", "mtp_block", "mtp_layers"})
"""Parts of names that only layers of drafts have."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
"""The first one in a layer's name is its own."""


def refuse_impossible_drafts(vllm_config: VllmConfig) -> None:
    """Refuse drafts that vLLM begins and cannot make, before a worker dies of them.

    Raises:
        LocalLayoutError: The model runner looks for a drafter on stages that have none.
    """
    speculative = vllm_config.speculative_config
    pp_size = vllm_config.parallel_config.pipeline_parallel_size
    # The first connection of runners asks for a drafter on all stages, and makes one on the last.
    if speculative is None or pp_size == 1 or vllm_config.use_v2_model_runner:
        return
    raise LocalLayoutError(
        f"--speculative-config with method {speculative.method} needs one pipeline stage with this "
        f"version's model runner, whose other stages end for want of a drafter: use "
        f"--pipeline-parallel-size 1 instead of {pp_size}, or no --speculative-config"
    )


def draft_identities(vllm_config: VllmConfig, layers: Iterable[str]) -> dict[str, str]:
    """By what name other engines know the layers of this engine's draft, for those that are."""
    identity = draft_identity(vllm_config)
    if identity is None:
        return {}
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    own = range(*model.get_layers_start_end_indices(parallel))
    drafts = [name for name in layers if _is_draft(name, own)]
    first = min((int(number[0]) for name in drafts if (number := _NUMBER.search(name))), default=0)
    return {name: f"{_numbered_from(first, name)}{_MARK}{digest}" for name in drafts}


def _is_draft(name: str, own: range) -> bool:
    """Whether a layer is not one of the model's own, of which the stage has these."""
    number = _NUMBER.search(name)
    is_not_own = number is not None and int(number[0]) not in own
    return is_not_own or not _DRAFT_PARTS.isdisjoint(name.split("."))


def _numbered_from(first: int, name: str) -> str:
    """A layer's name with its number among the draft's, of which this is the first one's."""
    return _NUMBER.sub(lambda number: f"draft{int(number[0]) - first}", name, count=1)


def without_missing_drafts(
    src: Iterable[Shard], dst: Sequence[Shard], policy: Literal["refuse", "compute"]
) -> tuple[tuple[Shard, ...], tuple[Layer, ...]]:
    """Leave out what the destination's drafts need and no source rank has.

    Args:
        src: What each source rank holds.
        dst: What each destination rank needs.
        policy: Whether such layers are refused, or left for the destination to compute.

    Returns:
        What is to be read, and the layers that are not.

    Raises:
        RemoteLayoutError: There are such layers, and they are refused.
    """
    held = {layer for shard in src for layer in shard.holdings}
    missing = tuple(
        dict.fromkeys(
            layer
            for shard in dst
            for layer in shard.holdings
            if layer not in held and _MARK in str(layer)
        )
    )
    if missing and policy == "refuse":
        names = ", ".join(str(layer).partition(_MARK)[0] for layer in missing)
        raise RemoteLayoutError(
            f"the source does not have the draft's layers that this engine has ({names}): give "
            "both engines the same --speculative-config, or set missing_draft_layers to compute "
            "here, with which drafts start cold"
        )
    if not missing:
        return tuple(dst), ()
    return tuple(
        Shard(
            shard.rank,
            {layer: held for layer, held in shard.holdings.items() if layer not in missing},
        )
        for shard in dst
    ), missing

# SPDX-License-Identifier: Apache-2.0
"""Draft layers: which workers have them, and what happens if the other engine has none.

A draft's layers are read like any others, because they keep the KV of the same tokens. But two
engines may draft with different models whose layers have the same names. So other engines know a
draft layer by its name and a digest of what it drafts with; another digest means another layer.

Releases before 0.33 do not mark draft layers, so they are recognized by name: vLLM begins the name
with the kind of draft, or numbers the layer beyond the stage's own. With pipeline stages, another
stage's layer may have that number: EAGLE numbers its layers from the stage's layer count. So for
other engines a draft's layers are always numbered from 0.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from ...errors import LocalLayoutError, RemoteLayoutError
from ...plan.shards import Layer, Shard
from .factors import draft_identity

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_MARK = "@draft-"
_DRAFT_PARTS = frozenset({"draft_model", "eagle_layers", "mtp", "mtp_block", "mtp_layers"})
"""Name components that only draft layers have."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
"""The first match in a layer's name is the layer's number."""


def refuse_impossible_drafts(vllm_config: VllmConfig) -> None:
    """Refuse drafts that vLLM accepts but cannot run, before a worker crashes.

    Raises:
        LocalLayoutError: The model runner looks for a drafter on stages that have none.
    """
    speculative = vllm_config.speculative_config
    pp_size = vllm_config.parallel_config.pipeline_parallel_size
    # vLLM's first model runner uses the drafter on every stage but makes one only on the last.
    if speculative is None or pp_size == 1 or vllm_config.use_v2_model_runner:
        return
    raise LocalLayoutError(
        f"--speculative-config with method {speculative.method} needs one pipeline stage with this "
        f"version's model runner, whose other stages end for want of a drafter: use "
        f"--pipeline-parallel-size 1 instead of {pp_size}, or no --speculative-config"
    )


def draft_identities(vllm_config: VllmConfig, layers: Iterable[str]) -> dict[str, str]:
    """Return the names by which other engines know this engine's draft layers, by local name."""
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
    """Return whether a layer is a draft's; `own` are the model's layers on this stage."""
    number = _NUMBER.search(name)
    is_not_own = number is not None and int(number[0]) not in own
    return is_not_own or not _DRAFT_PARTS.isdisjoint(name.split("."))


def _numbered_from(first: int, name: str) -> str:
    """Return a layer's name, renumbered so that the draft's first layer has number 0."""
    return _NUMBER.sub(lambda number: f"draft{int(number[0]) - first}", name, count=1)


def without_missing_drafts(
    src: Iterable[Shard], dst: Sequence[Shard], policy: Literal["refuse", "compute"]
) -> tuple[tuple[Shard, ...], tuple[Layer, ...]]:
    """Leave out draft layers that the destination needs and no source rank has.

    Args:
        src: What each source rank holds.
        dst: What each destination rank needs.
        policy: Whether to refuse such layers, or to leave them for the destination to compute.

    Returns:
        What is to be read, and the layers that are left out.

    Raises:
        RemoteLayoutError: There are such layers, and the policy is to refuse them.
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

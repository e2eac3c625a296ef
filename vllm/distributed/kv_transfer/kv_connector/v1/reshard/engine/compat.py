# SPDX-License-Identifier: Apache-2.0
"""Differences between the releases of vLLM that this connector runs on.

Only this module tells one release from another: a test checks that no other module does. Each
switch is named after the difference, and its docstring names the base that needs it. A switch is
removed together with that base. A change of meaning stays for as long as peers have the older one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packaging.version import Version
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from vllm import __version__ as _vllm_version

if TYPE_CHECKING:
    from vllm.config import CacheConfig, SpeculativeConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.request import Request


_IS_0_22 = Version(_vllm_version).release < (0, 32)
"""True if the base is 0.22.1; no release between it and 0.32.0 is a base."""

_IS_BEFORE_0_33 = Version(_vllm_version).release < (0, 33)
"""True if the base is 0.22.1 or 0.32.0."""

# `describe_layer`: finds a layer's planes in its tensor; in 0.22.1, each backend has its own shape.
# `UpstreamConnector`: base class of our connector, with additions that only 0.22.1 requires.
if _IS_0_22:
    from .caches.cross_layers import CrossLayerConnector as UpstreamConnector
    from .caches.probed_shapes import describe_layer
else:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (  # type: ignore[no-redef]
        NixlConnector as UpstreamConnector,
    )

    from .caches.cache_views import describe_layer

CACHES_ARE_VIEWS = not _IS_0_22
"""True if the caches of all layers are views of one form; not so in 0.22.1."""

REQUEST_NUMBERS: tuple[int, ...] = (0,) if _IS_0_22 else (0, 0)
"""Numbers after the verb in a request to a side channel: the rank, or the stage and the rank.

With more or fewer numbers, the thread of upstream's listener ends, and no request is answered any
more. The listener of 0.22.1 takes one.
"""

FAILED_READS_ARE_NAMED = not _IS_0_22
"""True if a request that could not be read is reported by its id, not by its blocks.

The scheduler of 0.22.1 takes blocks; it is patched to find them in all groups. Later schedulers
always take ids, and refuse blocks if there are several groups.
"""

LAYERS_SAY_WHAT_IS_SHARED = not _IS_0_22
"""True if a layer's specification says whether ranks divide its tokens; not so in 0.22.1.

Later, upstream's connector checks this, too.
"""

SLEEP_IS_UPSTREAMS = not _IS_BEFORE_0_33
"""True if upstream's connector unregisters its memory before an engine sleeps.

In 0.22.1 and 0.32.0 it does not, and keeps using memory that no longer belongs to the cache.
"""

STATE_IS_UPSTREAMS = _IS_0_22
"""True if models with recurrent state are left to upstream's connector.

The scheduler of 0.22.1 does not say which of a request's blocks has the state, and offers all.
"""

PREFILLS_STOP_SHORT = not _IS_0_22
"""True if upstream's prefill engines leave the last tokens of some prompts to decode engines.

They do for recurrent state, which 0.22.1 leaves to upstream's connector, and for some drafts.
"""

OUTPUTS_OUTLIVE_PREEMPTION = _IS_0_22
"""True if the output of a step from before a request's preemption can still end the request.

The request is then over while its new blocks are being computed. The scheduler of 0.22.1 takes such
an output as current; later schedulers recognise it as stale.
"""

BLOCK_HASHES_KNOW_ADAPTERS_PATHS = not _IS_0_22
"""True if the prefix cache tells adapters of one name apart that lie at two paths; not in 0.22.1.

In no release does it see that the files at a path have changed.
"""

UPSTREAM_COUNTS_ALL_FAILURES = not _IS_0_22
"""True if upstream's statistics count failed handshakes and late notifications; not in 0.22.1."""

ENGINES_CAN_BE_ASKED = not _IS_0_22
"""True if an engine's caches can be planned without its workers; not so in 0.22.1."""

CONNECTORS_GIVE_FIRST_OUTPUTS = hasattr(KVConnectorBase_V1, "take_first_outputs")
"""True if a connector may answer a request that it has received: in the fork since 0.32.0.

The fork of 0.22.1 does not call connectors for it, nor does any released vLLM, so the plugin cannot
answer either.
"""


def tokens_in_flight(request: Any, *, is_ahead: bool) -> int | None:
    """Return how many of a request's computed tokens are in steps without a known output yet.

    Args:
        request: The request.
        is_ahead: True if steps are scheduled before the output of earlier ones is known.

    Returns:
        The number of tokens; None if `is_ahead` in 0.22.1, which does not count them.
    """
    if _IS_0_22:
        return None if is_ahead else 0
    return int(request.num_in_flight_tokens)


def is_since(release: str) -> bool:
    """Return whether the base is this release or a later one; 0.22.1 is the first base."""
    return Version(_vllm_version).release >= Version(release).release


def transfer_results(sent: set[str], received: set[str], failed: set[str]) -> Any:
    """Return a step's results in the form that model runners take; 0.22.1 has no class for it.

    Args:
        sent: Requests that other engines have finished reading.
        received: Requests that this worker has finished reading, or failed to read.
        failed: Requests in `received` that could not be read.
    """
    if _IS_0_22:
        return sent, received
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

    return KVConnectorTransferResults(sent, received, failed)


def tokens_per_slot(spec: Any) -> float:
    """Return how many tokens of a sequence share one slot of an attention cache.

    0.22.1 gives the number of slots in a block instead.
    """
    if _IS_0_22:
        return float(spec.block_size / spec.storage_block_size)
    return float(spec.tokens_per_state)


def shares_tokens(spec: Any) -> bool:
    """Return whether decode context parallelism divides a layer's tokens; never in 0.22.1."""
    return not _IS_0_22 and bool(spec.dcp_sharded)


def loses_its_middle(spec: Any) -> bool:
    """Return whether a layer keeps only a prompt and its answer's last tokens; never in 0.22.1."""
    if _IS_0_22:
        return False
    from vllm.v1.kv_cache_interface import RSWASpec

    return type(spec) is RSWASpec


def is_on_every_rank(spec: Any) -> bool:
    """Return whether all ranks keep the same recurrent state; never in 0.22.1."""
    return not _IS_0_22 and bool(spec.tp_replicated)


def makes_own_scales(cache_config: CacheConfig) -> bool:
    """Return whether an engine computes the scales of its quantized cache; only in 0.22.1."""
    return _IS_0_22 and bool(cache_config.calculate_kv_scales)


def keeps_groups_back(kv_cache_config: KVCacheConfig) -> bool:
    """Return whether some KV-cache groups must not be transferred; never in 0.22.1."""
    return not _IS_0_22 and not all(
        group.enable_kv_transfer for group in kv_cache_config.kv_cache_groups
    )


def is_in_two_memories(kv_cache_config: KVCacheConfig) -> bool:
    """Return whether some layers' caches are in host memory; never in 0.22.1."""
    return not _IS_0_22 and kv_cache_config.hisparse_host_num_blocks is not None


def draft_cache_dtype(speculative: SpeculativeConfig, cache_config: CacheConfig) -> str:
    """Return the format of drafts' caches: their own if set, else the model's, as in 0.22.1."""
    own = None if _IS_0_22 else speculative.kv_cache_dtype
    return str(own or cache_config.cache_dtype)


def keeps_turboquants_scales_apart() -> bool:
    """Return whether TurboQuant puts a block's scales after its other data; never in 0.22.1.

    Later releases do if FlyDSL's kernels read the cache: `TurboQuantAttentionImpl._soa_store`. Only
    ROCm has them. Elsewhere, checking for them loads operators that end the process: on a CPU
    without AVX-512, `vllm._C` beside `vllm._C_AVX2`.
    """
    from vllm.platforms import current_platform

    if _IS_0_22 or not current_platform.is_rocm():
        return False
    from vllm.v1.attention.ops.flydsl_turboquant_decode import is_flydsl_available

    return bool(is_flydsl_available())


def attention_variants(implementation: Any) -> tuple[Any, ...]:
    """Return the variants of an attention implementation; only the one itself in 0.22.1."""
    return (implementation,) if _IS_0_22 else tuple(implementation.get_impl_variants())


def prefill_lookahead_tokens(vllm_config: VllmConfig) -> int:
    """Return how many tokens drafts read ahead in a prompt; 1 in 0.22.1.

    In later releases, a prefill engine leaves at least one token fewer than this number, at the end
    of a prompt, to the decode engine.
    """
    return 1 if _IS_0_22 else int(vllm_config.num_prefill_lookahead_tokens)


def last_logprobs(request: Request) -> LogprobsLists | None:
    """Return the log-probabilities of the tokens with which a request has stopped.

    None if its client has not asked for them; always in 0.22.1, and without this project's patches.
    """
    return getattr(request, "last_logprobs", None)


def asks_more_of_forwards(config: VllmConfig) -> bool:
    """Return whether an engine samples or returns more with each token than its id.

    False in 0.22.1, where connectors give no first outputs.
    """
    return not _IS_0_22 and (
        config.watermark_config is not None
        or config.model_config.return_sampling_mask
        or config.aux_output_config.enabled
    )


def kv_cache_configs(
    vllm_config: VllmConfig, specs: list[dict[str, Any]], memory_bytes: list[int]
) -> list[KVCacheConfig]:
    """Return each worker's groups and sizes, and settle how tokens are dealt to sharing ranks.

    Both stand elsewhere since 0.33, where engines do the latter from groups alone. Those of 0.22.1
    are not asked: see `ENGINES_CAN_BE_ASKED`.

    Args:
        vllm_config: The engine's configuration.
        specs: The specification of each worker's layers, by name.
        memory_bytes: Memory of each worker for its caches.
    """
    assert ENGINES_CAN_BE_ASKED
    found: list[KVCacheConfig]
    if _IS_BEFORE_0_33:
        from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

        found = get_kv_cache_configs(vllm_config, specs, memory_bytes)
        vllm_config.adjust_dcp_kv_cache_interleave_size(found[0])
        return found
    from vllm.v1.core import kv_cache_planning

    # As the engine core does when it starts.
    groups = kv_cache_planning.get_global_kv_cache_groups(vllm_config, specs)
    vllm_config.adjust_dcp_kv_cache_interleave_size(groups)
    found = kv_cache_planning.get_kv_cache_configs(vllm_config, specs, memory_bytes, groups)
    for each in found:
        each.kv_cache_layout = vllm_config.cache_config.kv_cache_layout
    return found


# Imported here for other modules. Tests find switches by their definitions.
__all__ = ["UpstreamConnector", "describe_layer"]


@dataclass(frozen=True, slots=True)
class Change:
    """A change of meaning in one release.

    Engines of different releases can be paired if they share this connector's protocol and the
    meaning of bytes. Each engine states its own meaning where a change affects it; like other
    settings that must be equal, the two meanings are then compared. Changes that affect only
    rounding are not listed: they do not change how a number is stored.

    Attributes:
        since: First release with the new meaning.
        reason: Description of the change.
        module: Path of the source file that shows the change, within the wheel.
        sign: Text that this file contains since then, but not before.
    """

    since: str
    reason: str
    module: str
    sign: str

    @property
    def is_here(self) -> bool:
        """True if this engine's release has the change."""
        return is_since(self.since)

    @property
    def meaning(self) -> str:
        """This engine's meaning, old or new, in words that are the same at both ends."""
        return f"{'since' if self.is_here else 'before'} vLLM {self.since}"


ITEM_HASHES = Change(
    "0.32",
    "a multimodal item is hashed with the lengths of its parts, so that it has another name",
    "vllm/multimodal/hasher.py",
    "def _framed(",
)

ROCM_ATTN_VALUES = Change(
    "0.33",
    "values are interleaved where a fused pass writes them",
    "vllm/v1/attention/backends/rocm_attn.py",
    "interleaved_v_pack_factor",
)

BLACKWELL_SCALES = Change(
    "0.33",
    "an indexer's scale of a token is four equal exponents on GPUs of this generation, and no "
    "longer a float32",
    "vllm/utils/deep_gemm.py",
    "def mqa_logits_use_mx_scales(",
)

CHANGES = (ITEM_HASHES, ROCM_ATTN_VALUES, BLACKWELL_SCALES)
"""All known changes between the bases."""

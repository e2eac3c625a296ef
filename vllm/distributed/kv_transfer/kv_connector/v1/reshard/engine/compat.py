# SPDX-License-Identifier: Apache-2.0
"""What the releases of vLLM that this connector runs on do not have in common.

This is the only module that tells one release from another: a test reads all others and sees that
they do not ask. Each switch is named for what differs, and says which base needs it; it goes when
that base goes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from packaging.version import Version
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from vllm import __version__ as _vllm_version

if TYPE_CHECKING:
    from vllm.config import CacheConfig, SpeculativeConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_IS_0_22 = Version(_vllm_version).release < (0, 32)
"""The base is 0.22.1; nothing between it and 0.32.0 is one."""

_IS_BEFORE_0_33 = Version(_vllm_version).release < (0, 33)
"""The base is 0.22.1 or 0.32.0."""

# `describe_layer`: how a layer's planes are found in its tensor, which every backend of 0.22.1
# shapes in its way. `UpstreamConnector`: what ours is derived from, with what 0.22.1 alone asks.
if _IS_0_22:
    from .caches.cross_layers import CrossLayerConnector as UpstreamConnector
    from .caches.probed_shapes import describe_layer
else:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (  # type: ignore[no-redef]
        NixlConnector as UpstreamConnector,
    )

    from .caches.cache_views import describe_layer

CACHES_ARE_VIEWS = not _IS_0_22
"""Whether all layers' caches are views of one form, as they are not in 0.22.1."""

REQUEST_NUMBERS: tuple[int, ...] = (0,) if _IS_0_22 else (0, 0)
"""What follows the verb in a request to a side channel: the rank, or the stage and the rank.

Upstream's listener unpacks exactly these; with more or fewer, its thread ends and answers no one
any more. That of 0.22.1 wants one.
"""

FAILED_READS_ARE_NAMED = not _IS_0_22
"""Whether a request that could not be read is reported by its id, and not by its blocks.

The scheduler of 0.22.1 learns of blocks, which its patches find in all groups; later ones refuse
blocks where there are several groups, and take ids always.
"""

LAYERS_SAY_WHAT_IS_SHARED = not _IS_0_22
"""Whether a layer says that ranks share out its tokens, as one of 0.22.1 does not.

Upstream's connector looks since then, too.
"""

SLEEP_IS_UPSTREAMS = not _IS_BEFORE_0_33
"""Whether upstream's connector gives its registrations back before an engine sleeps.

Those of 0.22.1 and 0.32.0 do not, and go on with memory that is no longer the cache's.
"""

STATE_IS_UPSTREAMS = _IS_0_22
"""Whether models with recurrent state are left to upstream's connector.

The scheduler of 0.22.1 does not tell which of a request's blocks has the state, and offers all.
"""

PRODUCERS_KEEP_THE_LAST_WINDOW = _IS_0_22
"""Whether an engine holds what the window of a request's last token reaches back to.

The scheduler of 0.22.1 is patched to. Later ones are not: a prefill engine stops before that token,
and what it holds is the window of the next.
"""

OUTPUTS_OUTLIVE_PREEMPTION = _IS_0_22
"""Whether a request that was preempted, and began anew, can be ended by the output of a step from
before that, so that it is over while its new blocks are being computed.

The scheduler of 0.22.1 takes such an output for the new one's; later ones know it for stale.
"""

UPSTREAM_COUNTS_ALL_FAILURES = not _IS_0_22
"""Whether upstream's statistics count handshakes that failed and notifications that came late,
which those of 0.22.1 have no name for."""

CONNECTORS_GIVE_FIRST_OUTPUTS = hasattr(KVConnectorBase_V1, "take_first_outputs")
"""Whether a connector may answer a request that it has received, as in the fork since 0.32.0.

That of 0.22.1 does not ask connectors, nor does any vLLM as released, so that the plugin cannot.
"""


def tokens_in_flight(request: Any, *, is_ahead: bool) -> int | None:
    """How many of a request's computed tokens are those of steps whose output is not known yet.

    Args:
        request: The request.
        is_ahead: Steps are scheduled before the output of earlier ones is known.

    Returns:
        That many; None where steps are ahead in 0.22.1, which does not count them.
    """
    if _IS_0_22:
        return None if is_ahead else 0
    return int(request.num_in_flight_tokens)


def is_since(release: str) -> bool:
    """Whether the base is this release or a later one; 0.22.1 is the first of all."""
    return Version(_vllm_version).release >= Version(release).release


def transfer_results(sent: set[str], received: set[str], failed: set[str]) -> Any:
    """What runners ask a connector for; those of 0.22.1 do not, and have no class for it.

    Args:
        sent: Requests that other engines are through with.
        received: Requests that this worker is through with.
        failed: Those of the latter that could not be read.
    """
    if _IS_0_22:
        return sent, received
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

    return KVConnectorTransferResults(sent, received, failed)


def tokens_per_slot(spec: Any) -> float:
    """How many tokens of a sequence a slot of an attention cache stands for.

    0.22.1 says how many slots a block has instead.
    """
    if _IS_0_22:
        return float(spec.block_size / spec.storage_block_size)
    return float(spec.tokens_per_state)


def shares_tokens(spec: Any) -> bool:
    """Whether decode context parallelism shares out a layer's tokens; 0.22.1 does not say so."""
    return not _IS_0_22 and bool(spec.dcp_sharded)


def loses_its_middle(spec: Any) -> bool:
    """Whether a layer keeps a prompt and the last tokens of its answer, as none does in 0.22.1."""
    if _IS_0_22:
        return False
    from vllm.v1.kv_cache_interface import RSWASpec

    return type(spec) is RSWASpec


def is_on_every_rank(spec: Any) -> bool:
    """Whether all ranks keep the same recurrent state, as none do in 0.22.1."""
    return not _IS_0_22 and bool(spec.tp_replicated)


def makes_own_scales(cache_config: CacheConfig) -> bool:
    """Whether an engine computes the scales of its quantized cache, which 0.22.1 still can."""
    return _IS_0_22 and bool(cache_config.calculate_kv_scales)


def keeps_groups_back(kv_cache_config: KVCacheConfig) -> bool:
    """Whether some KV-cache groups are not to be transferred, which 0.22.1 does not know of."""
    return not _IS_0_22 and not all(
        group.enable_kv_transfer for group in kv_cache_config.kv_cache_groups
    )


def is_in_two_memories(kv_cache_config: KVCacheConfig) -> bool:
    """Whether some layers' caches are in the host's memory, which 0.22.1 does not know of."""
    return not _IS_0_22 and kv_cache_config.hisparse_host_num_blocks is not None


def draft_cache_dtype(speculative: SpeculativeConfig, cache_config: CacheConfig) -> str:
    """The format of drafts' caches: the model's, or one of their own, as 0.22.1 has not."""
    own = None if _IS_0_22 else speculative.kv_cache_dtype
    return str(own or cache_config.cache_dtype)


def keeps_turboquants_scales_apart() -> bool:
    """Whether TurboQuant puts a block's scales behind all else of it, as 0.22.1 never does.

    Later ones do where FlyDSL's kernels read: `TurboQuantAttentionImpl._soa_store`. These are of
    ROCm alone, and to ask for them elsewhere loads operators that end the process: on a CPU without
    AVX-512, `vllm._C` beside `vllm._C_AVX2`.
    """
    from vllm.platforms import current_platform

    if _IS_0_22 or not current_platform.is_rocm():
        return False
    from vllm.v1.attention.ops.flydsl_turboquant_decode import is_flydsl_available

    return bool(is_flydsl_available())


def attention_variants(implementation: Any) -> tuple[Any, ...]:
    """The implementations that one of attention is made of, which of 0.22.1 is one only."""
    return (implementation,) if _IS_0_22 else tuple(implementation.get_impl_variants())


def prefill_lookahead_tokens(vllm_config: VllmConfig) -> int:
    """How far drafts read ahead in a prompt, whose last tokens the decode engine then computes.

    0.22.1 has no drafts that read further than the next token.
    """
    return 1 if _IS_0_22 else int(vllm_config.num_prefill_lookahead_tokens)


def asks_more_of_forwards(config: VllmConfig) -> bool:
    """Whether an engine draws or returns more with each token than its id.

    Nothing that 0.22.1 has is looked at: its connectors give no first outputs.
    """
    return not _IS_0_22 and (
        config.watermark_config is not None
        or config.model_config.return_sampling_mask
        or config.aux_output_config.enabled
    )


# What is imported here for others; switches are found by their definitions.
__all__ = ["UpstreamConnector", "describe_layer"]

# SPDX-License-Identifier: Apache-2.0
"""What means something else in one release of vLLM than in the next.

Engines of two releases are a pair: what they have in common is this connector's protocol and what
bytes mean. Where a release is known to mean something else than the one before it, that is listed
here, with the reason and with what in its source shows it. Each engine says which meaning is its
own, where it matters to it, and the two are compared as everything else is that must be equal.

What only rounds otherwise is not listed: numbers in a cache mean what they are.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..compat import is_since


@dataclass(frozen=True, slots=True)
class Change:
    """Something that a release means otherwise than those before it.

    Attributes:
        since: The first release.
        reason: What has changed.
        module: Where its source shows it, within the wheel.
        sign: What stands there since then, and did not before.
    """

    since: str
    reason: str
    module: str
    sign: str

    @property
    def is_here(self) -> bool:
        """Whether this engine's release has it."""
        return is_since(self.since)

    @property
    def meaning(self) -> str:
        """Which of the two meanings is this engine's, in words that are the same at both ends."""
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
"""All that are known between the bases."""

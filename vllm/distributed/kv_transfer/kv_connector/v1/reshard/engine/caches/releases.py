# SPDX-License-Identifier: Apache-2.0
"""Known changes of meaning between releases of vLLM.

Engines of different releases can be paired if they share this connector's protocol and the meaning
of bytes. This table lists each release that is known to change a meaning, with the reason and with
the place in vLLM's source that shows it. Each engine states its own meaning where the change
affects it; like other settings that must be equal, the two meanings are then compared.

Changes that affect only rounding are not listed: they do not change how a number is stored.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..compat import is_since


@dataclass(frozen=True, slots=True)
class Change:
    """A change of meaning in one release.

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

# SPDX-License-Identifier: Apache-2.0
"""What the scheduler keeps of a finished request that another engine goes on with."""

from __future__ import annotations


def num_tokens_behind(num_computed_tokens: int, *, has_mamba_layers: bool) -> int:
    """The tokens that count as computed when blocks outside of windows are given up.

    The engine that goes on computes the last token anew, for its logits: where layers have windows,
    it needs that token's window, which reaches back one token further than the next one's. Mamba
    state has no window.

    Args:
        num_computed_tokens: Tokens of the request that are computed.
        has_mamba_layers: Whether the model keeps Mamba state.
    """
    return num_computed_tokens if has_mamba_layers else max(num_computed_tokens - 1, 0)

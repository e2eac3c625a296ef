# SPDX-License-Identifier: Apache-2.0
"""How many tokens of a request are read, held and offered, and how many blocks they take."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from vllm.utils.math_utils import cdiv

from ...protocol.ids import BlockIds


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Counts tokens and blocks of this engine's requests.

    Attributes:
        block_tokens: Tokens of a sequence that one block id stands for, for each KV-cache group.
        state_groups: Groups that keep recurrent state.
        has_windows: Whether some group keeps only the last tokens.
    """

    block_tokens: tuple[int, ...]
    state_groups: Collection[int]
    has_windows: bool

    def num_blocks(self, num_tokens: int) -> int:
        """Return how many blocks `num_tokens` tokens take at most, over all KV-cache groups."""
        return sum(cdiv(num_tokens, tokens) for tokens in self.block_tokens)

    def blocks_of(self, num_tokens: int, block_ids: BlockIds) -> BlockIds:
        """Return the blocks of a request that hold its first `num_tokens` tokens.

        Upstream's scheduler finds which block has the state, so all blocks of state groups are
        kept.
        """
        return tuple(
            ids if number in self.state_groups else ids[: cdiv(num_tokens, tokens)]
            for number, (ids, tokens) in enumerate(zip(block_ids, self.block_tokens, strict=True))
        )

    def num_to_read(
        self,
        num_asked: int,
        num_offered: int | None,
        num_computed: int,
        num_tokens: int,
    ) -> int:
        """Return how many tokens behind the locally computed ones are read from another engine.

        No more are read than are offered. Recurrent state covers exactly as many tokens as its
        producer says; where fewer are needed, all are computed here.

        vLLM recomputes a prompt's last token for its logits. With windows that token is not read:
        if it counted as computed, the blocks that only its own window reaches back to would already
        be freed.

        Args:
            num_asked: How many would be read if all of them were offered.
            num_offered: How many of the sequence are offered; None if the producer did not say.
            num_computed: How many are computed here.
            num_tokens: How many the request has.
        """
        count = num_asked
        if count > 0 and num_offered is not None:
            count = max(min(count, num_offered - num_computed), 0)
            if self.state_groups and num_computed + count != num_offered:
                return 0
        if self.has_windows and 0 < count == num_tokens - num_computed:
            count -= 1
        return count


def num_to_offer(num_computed: int, num_tokens: int) -> int:
    """Return how many tokens of an ended request have their KV in its blocks.

    The last token was sampled but not computed. Any count beyond that comes from a step in flight,
    or from drafts behind the token that ended the answer.
    """
    return min(num_computed, num_tokens - 1)

# SPDX-License-Identifier: Apache-2.0
"""How many tokens of a request are read, held and offered, and how many blocks they take."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from vllm.utils.math_utils import cdiv

from ..protocol.ids import BlockIds


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Counts tokens and blocks of this engine's requests.

    Attributes:
        block_tokens: How many tokens of a sequence a block id of each KV-cache group stands for.
        state_groups: The groups that keep recurrent state.
        has_windows: Whether some group keeps the last tokens only.
    """

    block_tokens: tuple[int, ...]
    state_groups: Collection[int]
    has_windows: bool

    def num_blocks(self, num_tokens: int) -> int:
        """How many blocks so many tokens take at most, of all KV-cache groups."""
        return sum(cdiv(num_tokens, tokens) for tokens in self.block_tokens)

    def blocks_of(self, num_tokens: int, block_ids: BlockIds) -> BlockIds:
        """Those of a request's blocks that hold its first tokens.

        Which of them has its state, upstream's scheduler finds: all of that group's are left.
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
        *,
        is_window_whole: bool,
    ) -> int:
        """How many tokens behind those that are computed here are read from another engine.

        No more than are there. State is there for as many tokens as its producer says, and for no
        fewer: where fewer are wanted, all is computed.

        vLLM computes a prompt's last token anew, for its logits. Under windows it is not read: had
        it been counted as computed, the blocks that only its own window reaches back to would not
        be there any more. Where the producer does not keep them either, as it may be for a turn
        that asks for nothing new, all is computed.

        Args:
            num_asked: How many would be read if all of them were there.
            num_offered: How many of the sequence are there; None where that was not said.
            num_computed: How many are computed here.
            num_tokens: How many there are.
            is_window_whole: Whether producers keep what the last token's window reaches back to.
        """
        count = num_asked
        if count > 0 and num_offered is not None:
            count = max(min(count, num_offered - num_computed), 0)
            if self.state_groups and num_computed + count != num_offered:
                return 0
        if self.has_windows and 0 < count == num_tokens - num_computed:
            count = count - 1 if is_window_whole else 0
        return count


def num_to_offer(num_computed: int, num_tokens: int) -> int:
    """How many tokens of a request that has ended have their KV in its blocks.

    The last token was sampled and is not computed. What is counted beyond that is of a step in
    flight, or of drafts behind the one that ended the answer.
    """
    return min(num_computed, num_tokens - 1)

# SPDX-License-Identifier: Apache-2.0
"""What a read is bound to: the tokens that the KV was computed for, and the blocks it lies in.

A request's parameters come by way of a router and a client. They may belong to another request, the
prompt may have been cut or tokenized anew on the way, and a client may name blocks that are not
its own. So the holder says in its table of leases what it offered, the reader computes the same
from its *own* prompt and from what it was told, and believes what it has read only if both agree.

    holder   tokens it computed, blocks it offers  --bind-->  Binding, in its table
    reader   tokens of its prompt, blocks it read  --bind-->  the same Binding, or the read fails

Digests are cut to one word each. Nobody learns a digest of what he does not know, and each guess
costs a request: 64 bits are enough.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from .messages import BlockIds


@dataclass(frozen=True, slots=True)
class Binding:
    """What stands for an offer.

    Attributes:
        num_tokens: Tokens in the blocks; from 1.
        content: Digest of these tokens, and of what else their KV depends on.
        blocks: Digest of the blocks' ids, in the order of the sequence, for each KV-cache group.
    """

    num_tokens: int
    content: int
    blocks: int

    def difference(self, wanted: Binding) -> str | None:
        """Why a reader who wanted something else must not use what it has read.

        Args:
            wanted: What the reader computed from its own prompt and from what it was told.

        Returns:
            What differs, as the end of a sentence on "what is held there"; None where nothing does.
        """
        if self.num_tokens != wanted.num_tokens:
            return f"is of {self.num_tokens} tokens, and {wanted.num_tokens} are wanted here"
        if self.content != wanted.content:
            return f"was computed for {self.num_tokens} other tokens than this prompt's"
        if self.blocks != wanted.blocks:
            return "lies in other blocks than those that were read"
        return None


def bind(
    token_ids: Sequence[int], num_tokens: int, extra_keys: object, block_ids: BlockIds
) -> Binding:
    """What stands for some tokens in some blocks, the same in every process.

    Args:
        token_ids: The request's tokens. Where they are fewer than `num_tokens`, the result is that
            of no holder.
        num_tokens: How many of them the blocks hold; from 1.
        extra_keys: What else the KV of these tokens depends on, as vLLM's own block hashes take it
            in: multimodal items, LoRA, the cache's salt.
        block_ids: The blocks as they are offered, for each KV-cache group.
    """
    # One pass in C each, whatever the length. A token id fits an int on every platform of vLLM.
    tokens = sha256(array("i", token_ids[:num_tokens]).tobytes())
    tokens.update(msgspec.msgpack.encode(extra_keys, enc_hook=repr))
    blocks = sha256()
    for group in block_ids:
        ids = np.asarray(group, dtype=np.uint32)
        blocks.update(len(ids).to_bytes(8, "little"))
        blocks.update(ids.tobytes())
    return Binding(num_tokens, _word(tokens.digest()), _word(blocks.digest()))


def _word(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little")

# SPDX-License-Identifier: Apache-2.0
"""Block tables: which blocks a request has, and in which order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import Enum

import numpy as np
import numpy.typing as npt

NULL_BLOCK = 0
"""A block that vLLM gives to no request: it stands for blocks that are not there."""


class TableOrder(Enum):
    """The order of a request's blocks, at both ends.

    A fresh pool gives out blocks in ascending order; one whose requests have ended, in the reversed
    order, as their blocks were freed last to first; one that is used by many requests, in any.
    """

    CONTIGUOUS = "contiguous"
    REVERSED = "reversed"
    SHUFFLED = "shuffled"


def pool_blocks(longest_blocks: int) -> int:
    """Blocks of a cache in which requests lie elsewhere each time.

    Args:
        longest_blocks: Blocks of the longest request.
    """
    return NULL_BLOCK + 1 + longest_blocks + max(longest_blocks // 4, 8)


def block_table(order: TableOrder, num_blocks: int, pool: int, rng: random.Random) -> list[int]:
    """Block ids of a request.

    Args:
        num_blocks: How many.
        pool: Blocks of the cache, the null block included; more than that.
    """
    if order is TableOrder.SHUFFLED:
        return rng.sample(range(NULL_BLOCK + 1, pool), num_blocks)
    start = rng.randrange(NULL_BLOCK + 1, pool - num_blocks + 1)
    ids = list(range(start, start + num_blocks))
    return ids[::-1] if order is TableOrder.REVERSED else ids


def stretches(
    offsets: Sequence[npt.NDArray[np.int64]], size: int
) -> tuple[list[npt.NDArray[np.int64]], npt.NDArray[np.int64]]:
    """Join pieces that follow each other in all memories.

    Args:
        offsets: Where pieces begin, in each memory; of the same length.
        size: Of a piece.

    Returns:
        Where stretches begin in each memory, and their sizes.
    """
    apart = np.logical_or.reduce([np.diff(each) != size for each in offsets])
    firsts = np.concatenate([[0], 1 + np.flatnonzero(apart)])
    counts = np.diff(firsts, append=len(offsets[0]))
    return [each[firsts] for each in offsets], counts * size

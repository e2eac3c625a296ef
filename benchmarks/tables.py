# SPDX-License-Identifier: Apache-2.0
"""Block tables: which blocks a request has, and in which order."""

from __future__ import annotations

import random
from enum import Enum

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


def runs(*tables: list[int]) -> list[tuple[int, int]]:
    """Stretches of blocks that ascend one by one in all tables.

    Args:
        tables: Of the same length.

    Returns:
        Position of the first block and number of blocks of each stretch.
    """
    starts = [
        position
        for position in range(len(tables[0]))
        if position == 0 or any(ids[position] != ids[position - 1] + 1 for ids in tables)
    ]
    stops = [*starts[1:], len(tables[0])]
    return [(start, stop - start) for start, stop in zip(starts, stops, strict=True)]

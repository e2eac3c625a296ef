# SPDX-License-Identifier: Apache-2.0
"""Which of a request's blocks the scheduler looks at when a connector reports blocks as invalid.

The scheduler walks through one list of blocks and takes the position of the first invalid one for
the length of the prefix that is still valid. With several KV-cache groups there is no such list:
blocks of one position differ in size, and where a group keeps a window only, those of the prefix
are gone. All that can be done then is to start over.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

_NULL_BLOCK = 0
"""What stands for a block that a window has left behind."""


class RunningRequestError(RuntimeError):
    """A running request lost blocks, and cannot be taken back."""


def blocks_in_order_of_validity(
    request_id: str,
    block_ids_by_group: Sequence[list[int]],
    invalid_block_ids: AbstractSet[int],
    *,
    continues_in_place: bool,
) -> list[int]:
    """The blocks of a request such that what stands before the first invalid one is still valid.

    Args:
        request_id: The request, for messages.
        block_ids_by_group: Its blocks in the order of the sequence, for each KV-cache group. A
            block belongs to one group only, but for the null block.
        invalid_block_ids: Blocks that were to be filled, and were not.
        continues_in_place: The request is running, and is to be computed anew in the blocks that it
            has; others give theirs back first.

    Returns:
        With one group that has all of its blocks, these as they are. Else all blocks, an invalid
        one first, and none at all where all are valid.

    Raises:
        RunningRequestError: The request is to start over in its own blocks, of which those before a
            window are the null block.
    """
    if len(block_ids_by_group) == 1 and _NULL_BLOCK not in block_ids_by_group[0]:
        return block_ids_by_group[0]
    blocks = [block for group in block_ids_by_group for block in group]
    invalid = [block for block in blocks if block in invalid_block_ids]
    if not invalid:
        return []
    if continues_in_place:
        raise RunningRequestError(
            f"blocks {sorted(invalid)} of running request {request_id} could not be loaded, and a "
            f"model with {len(block_ids_by_group)} KV-cache groups cannot recompute them in place: "
            "set kv_load_failure_policy to fail"
        )
    return invalid + [block for block in blocks if block not in invalid_block_ids]

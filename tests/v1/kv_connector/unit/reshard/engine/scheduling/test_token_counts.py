# SPDX-License-Identifier: Apache-2.0
"""How many tokens of a request are read and offered, of engines with windows and with state."""

from __future__ import annotations

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.scheduling.token_counts import (
    TokenCounts,
    num_to_offer,
)

FULL = TokenCounts((16, 8), frozenset(), has_windows=False)
WINDOWS = TokenCounts((16, 8), frozenset(), has_windows=True)
STATE = TokenCounts((16, 64), frozenset({1}), has_windows=False)


def test_blocks_of_all_groups_are_counted():
    """A block that is begun counts."""
    assert [FULL.num_blocks(tokens) for tokens in (0, 1, 16, 17)] == [0, 2, 3, 5]


def test_blocks_beyond_the_answer_are_left_out_but_for_state():
    """Which block has a state, its producer's scheduler finds."""
    blocks = [[1, 2, 3], [4, 5, 6]]
    assert FULL.blocks_of(16, blocks) == ([1], [4, 5])
    assert STATE.blocks_of(16, blocks) == ([1], [4, 5, 6])


@pytest.mark.parametrize(
    ("counts", "asked", "offered", "computed", "expected"),
    [
        (FULL, 32, None, 16, 32),
        # The prompt has grown since it was prefilled, or is shorter than what is held.
        (FULL, 32, 40, 16, 24),
        (FULL, 32, 16, 16, 0),
        (FULL, 32, 8, 16, 0),
        (FULL, 0, 40, 16, 0),
        # State is there for 48 tokens, and not for 40.
        (STATE, 32, 48, 16, 32),
        (STATE, 24, 48, 16, 0),
        # All of a prompt of 48 tokens, whose last one is computed anew, and less.
        (WINDOWS, 32, 48, 16, 31),
        (WINDOWS, 31, 48, 16, 31),
    ],
)
def test_no_more_is_read_than_is_there_and_can_be_gone_on_from(
    counts, asked, offered, computed, expected
):
    """Of a sequence of 48 tokens."""
    assert counts.num_to_read(asked, offered, computed, 48) == expected


@pytest.mark.parametrize(("computed", "tokens", "expected"), [(9, 10, 9), (10, 10, 9), (5, 10, 5)])
def test_last_token_is_not_offered(computed, tokens, expected):
    """It was sampled, and a step in flight may count it all the same."""
    assert num_to_offer(computed, tokens) == expected

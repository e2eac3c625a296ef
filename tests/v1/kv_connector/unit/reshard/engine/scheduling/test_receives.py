# SPDX-License-Identifier: Apache-2.0
"""What is read for a request, by what its parameters say and by how long its prompt is."""

from __future__ import annotations

import pytest

from tests.v1.kv_connector.unit.reshard.engine.schedulers import PARAMS, request
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.scheduling.receives import (
    TokenCounts,
    address_of,
    fingerprint_of,
    is_placeholder,
    num_to_offer,
    receive_of,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    Receive,
    RemoteEngineAddress,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.params import (
    faulty,
    remote_blocks,
)

SECRET = 7 << 40
FULL = TokenCounts((16, 8), frozenset(), has_windows=False)
WINDOWS = TokenCounts((16, 8), frozenset(), has_windows=True)
STATE = TokenCounts((16, 64), frozenset({1}), has_windows=False)


def read_for(asked, local_block_ids) -> Receive:
    """What is read where a prefill engine computes all of a prompt but its last token."""
    return receive_of(asked, local_block_ids, asked.num_prompt_tokens - 1)


@pytest.mark.parametrize(
    ("num_tokens", "at_once", "expected"),
    [(1, True, True), (1, False, False), (2, True, False)],
)
def test_made_up_requests_are_told_from_others(num_tokens, at_once, expected):
    """From a client's of the same prompt, and from one that vLLM ends at once with its own."""
    asked = request({}, num_tokens)
    asked.abort_immediately = at_once
    assert is_placeholder(asked) is expected


def test_what_is_held_is_read_into_the_blocks():
    """With the fingerprint of the tokens that are held there."""
    asked = request(PARAMS)
    receive = read_for(asked, [[1, 2, 3]])
    assert receive.source == RemoteEngineAddress("prefill", "10.0.0.1", 5600)
    assert (receive.remote_request_id, receive.remote_block_ids) == ("p-a", [[5, 2, 9]])
    assert (receive.local_block_ids, receive.fault, receive.secret) == ([[1, 2, 3]], None, None)
    assert (receive.local_tokens, receive.remote_tokens) == (40, 40)
    assert receive.fingerprint == fingerprint_of(asked, 40, [[5, 2, 9]])


@pytest.mark.parametrize("said", [0, None])
def test_without_a_count_what_is_computed_there_is_held(said):
    """Of the prompt, as far as a prefill engine computes it."""
    receive = read_for(request({**PARAMS, "remote_num_tokens": said}), [[1]])
    assert (receive.local_tokens, receive.remote_tokens) == (39, 39)


def test_tokens_that_are_not_computed_here_are_not_read():
    """What is being read counts as computed; the rest of what is held is not wanted."""
    asked = request(PARAMS)
    asked.num_computed_tokens = 32
    receive = read_for(asked, [[1, 2]])
    assert (receive.local_tokens, receive.remote_tokens) == (32, 40)


def test_what_is_held_of_a_longer_prompt_is_anothers():
    """Where nothing is read of it, it is not given back: its lease ends it."""
    assert read_for(request(PARAMS, 40), [[]]).fingerprint is not None
    assert read_for(request(PARAMS, 24), [[]]).fingerprint is None
    assert read_for(request(PARAMS, 24), [[1]]).fingerprint is not None


def test_request_that_was_made_up_shows_the_secret():
    """It has no prompt that a fingerprint could be of."""
    asked = request({**PARAMS, "remote_secret": f"{SECRET:016x}"}, 1)
    asked.prompt_token_ids, asked.abort_immediately = [0], True
    receive = read_for(asked, ())
    assert (receive.secret, receive.fingerprint) == (SECRET, None)


def test_parameters_with_a_fault_name_no_engine():
    """What is wrong with them is the request's fault, in its blocks."""
    receive = read_for(request(faulty("its parameters are odd")), [[1, 2]])
    assert receive.fault == "its parameters are odd" and receive.source.port == 0
    assert receive.local_block_ids == [[1, 2]] and receive.fingerprint is None


def test_trace_goes_with_the_request():
    """As its client has begun it."""
    asked = request(PARAMS)
    asked.trace_headers = {"traceparent": "00-1-2-01"}
    assert read_for(asked, [[1]]).trace_headers == asked.trace_headers


def test_address_is_the_side_channels():
    """Engine, host and port."""
    assert address_of(remote_blocks(PARAMS)) == RemoteEngineAddress("prefill", "10.0.0.1", 5600)


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

# SPDX-License-Identifier: Apache-2.0
"""What is read for a request, by what its parameters say and by how long its prompt is."""

from __future__ import annotations

import pytest

from tests.v1.kv_connector.unit.reshard.engine.schedulers import PARAMS, request
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.scheduling.receives import (
    address_of,
    fingerprint_of,
    is_placeholder,
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

# SPDX-License-Identifier: Apache-2.0
"""What the scheduler makes of the parameters that a router passes on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.messages import RemoteEngineAddress
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.scheduler import _receive

PARAMS = {
    "do_remote_prefill": True,
    "remote_engine_id": "prefill",
    "remote_request_id": "p-a",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "remote_block_ids": [[5, 2, 9]],
    "remote_num_tokens": 40,
    "tp_size": 2,
}


def request(params, num_prompt_tokens: int = 40):
    """A request with the given parameters."""
    return SimpleNamespace(
        request_id="d-a",
        kv_transfer_params=params,
        num_prompt_tokens=num_prompt_tokens,
        num_computed_tokens=num_prompt_tokens,
    )


def test_parameters_become_a_read():
    """Address, blocks and tokens are taken as the other engine wrote them."""
    receive = _receive(request(PARAMS), ([3, 4, 1],))
    assert receive.fault is None
    assert receive.source == RemoteEngineAddress("prefill", "10.0.0.1", 5600)
    assert (receive.remote_request_id, receive.remote_block_ids) == ("p-a", [[5, 2, 9]])
    assert (receive.local_tokens, receive.remote_tokens) == (40, 40)


@pytest.mark.parametrize(
    ("remote", "local", "expected"), [(None, 40, (40, 40)), (50, 40, (40, 50))]
)
def test_tokens_are_counted_at_each_end(remote, local, expected):
    """Without a count the prompt is what was computed; a longer remote sequence is told apart."""
    receive = _receive(request(PARAMS | {"remote_num_tokens": remote}, local), ([3],))
    assert (receive.local_tokens, receive.remote_tokens) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"remote_engine_id": None},
        {"remote_engine_id": ["prefill"]},
        {"remote_request_id": 7},
        {"remote_host": None},
        {"remote_port": "abc"},
        {"remote_port": 0},
        {"remote_port": 1 << 16},
        {"remote_block_ids": [1, 2, 3]},
        {"remote_block_ids": [["a"]]},
        {"remote_block_ids": [[None]]},
        {"remote_block_ids": [[-1]]},
        {"remote_block_ids": [[1 << 31]]},
        {"remote_block_ids": [[1.5]]},
        {"remote_num_tokens": "9"},
        {"remote_num_tokens": 4.5},
    ],
)
def test_malformed_parameters_are_a_fault_of_the_request(change):
    """The request fails with a readable line; the engine lives on."""
    receive = _receive(request(PARAMS | change), ([3, 4, 1],))
    assert "the router must pass them on unchanged" in receive.fault
    assert "\n" not in receive.fault
    assert receive.local_block_ids == ([3, 4, 1],)


@given(
    params=st.one_of(
        st.none(),
        st.dictionaries(
            st.sampled_from(sorted(PARAMS)),
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
                st.lists,
                max_leaves=4,
            ),
        ),
    )
)
def test_nothing_that_json_can_say_raises(params):
    """Whatever a router makes of the parameters, the scheduler's step goes on."""
    receive = _receive(request(params), ([3],))
    assert receive.fault is not None or receive.source.port > 0

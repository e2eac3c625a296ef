# SPDX-License-Identifier: Apache-2.0
"""Names that two engines have for one request, and what routers send to both at once."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.bounds import TrustedPeers
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.early import (
    EarlyRequest,
    early_request,
    prefill_name,
    prefill_params,
    shared_name,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    RemoteEngineAddress,
)

SUFFIXES = st.from_regex(r"-[0-9a-f]{8}", fullmatch=True)
FROM_ROUTER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "prefill",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 2,
    "remote_request_id": "x",
}
PEER_TO_PEER = {
    "remote_prefiller": {
        "kv_request_id": "k",
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
    }
}


@given(st.text(max_size=40), SUFFIXES, SUFFIXES)
def test_engines_agree_on_a_name(base, here, there):
    """Whatever random characters each has added."""
    assert shared_name(base + here, None) == shared_name(base + there, None) == base


@given(st.integers(0, 99), st.integers(0, 99), SUFFIXES, SUFFIXES)
def test_children_pair_by_their_places(child, prompt, here, there):
    """Under a router's name, though their ids have nothing else in common."""
    names = {
        shared_name(f"{child}_cmpl-{request_id}-{prompt}{suffix}", "xfer-1")
        for request_id, suffix in (("a", here), ("b", there))
    }
    assert names == {f"xfer-1/{child}/{prompt}"}
    assert shared_name("chatcmpl-a-7-12345678", "xfer-1") == "xfer-1/0/0"


def test_parameters_of_vllms_router():
    """They name the producer, and the request by the name that both have."""
    params = early_request(FROM_ROUTER, "cmpl-x-0-12345678", None)
    assert params == (RemoteEngineAddress("prefill", "10.0.0.1", 5600), "cmpl-x-0")


@pytest.mark.parametrize("engine_id", ["old", None])
def test_engine_need_not_be_known(engine_id):
    """It may have restarted since the router heard of it."""
    params = early_request({**FROM_ROUTER, "remote_engine_id": engine_id}, "cmpl-x-0-0", None)
    assert params.place.engine_id == (engine_id or "unknown")


def test_parameters_of_llm_ds_routers():
    """A transfer_id in both legs, or names for transfers between peers."""
    pushed = early_request({**FROM_ROUTER, "transfer_id": "t"}, "chatcmpl-other-12345678", None)
    assert pushed.name == "t/0/0"
    assert prefill_name("chatcmpl-x-12345678", {"transfer_id": "t"}) == "t/0/0"
    asked = prefill_params({"remote_decoder": {"kv_request_id": "k"}})
    assert asked["do_remote_decode"] and "remote_decoder" not in asked
    there = prefill_name("chatcmpl-a-12345678", asked)
    here = early_request(PEER_TO_PEER, "chatcmpl-b-87654321", None).name
    assert here == there == "k/0/0"


def test_request_that_has_another_name_here_has_none():
    """It is known by its prompt alone."""
    assert early_request(FROM_ROUTER, "resp_y-12345678", None).name == ""


@pytest.mark.parametrize(
    "params",
    [
        None,
        "text",
        {},
        {"do_remote_decode": True},
        {**FROM_ROUTER, "remote_block_ids": [[1]]},
    ],
)
def test_other_requests_are_none_of_these(params):
    """They are handled as ever."""
    assert early_request(params, "cmpl-x-0", None) is None
    assert prefill_params(params) is params


@pytest.mark.parametrize(
    "changes",
    [
        {"remote_host": None},
        {"remote_port": "5600"},
        {"remote_port": 1 << 16},
        {"remote_host": "a" * 2000},
        {"transfer_id": "\ud800"},
        {"transfer_id": "a" * 600},
        {"remote_prefiller": {"kv_request_id": 1}},
    ],
)
def test_malformed_parameters_are_a_fault(changes):
    """Of that request."""
    assert isinstance(early_request({**FROM_ROUTER, **changes}, "cmpl-x-0", None), str)


def test_only_trusted_hosts_are_asked():
    """As where blocks are named."""
    fault = early_request(FROM_ROUTER, "cmpl-x-0", TrustedPeers.parse(["192.168.0.0/16"]))
    assert isinstance(fault, str) and "not followed" in fault


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@example(params={"remote_request_id": None}, request_id="")
@example(params={"remote_request_id": None}, request_id="\ud800")
@given(
    st.dictionaries(st.sampled_from([*FROM_ROUTER, *PEER_TO_PEER, "transfer_id"]), JSON),
    st.text(max_size=1200),
)
def test_whatever_a_client_says_is_sound_or_a_fault(params, request_id):
    """Nothing is raised, and what schedulers believe is what they expect."""
    found = early_request({**FROM_ROUTER, **params}, request_id, None)
    if isinstance(found, EarlyRequest):
        assert found.place.host and 0 < found.place.port < 1 << 16 and len(found.name) <= 1 << 10
    assert isinstance(prefill_name(request_id, params), str)
    msgspec.json.encode(prefill_params(params))

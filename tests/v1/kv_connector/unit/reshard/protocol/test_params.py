# SPDX-License-Identifier: Apache-2.0
"""The kv_transfer_params of a request, which any client may have written."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.bounds import TrustedPeers
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.params import (
    RemoteBlocks,
    already_requested,
    is_disaggregated,
    offered_tokens,
    remote_blocks,
    remote_request,
    sanitize_params,
    without_source,
    write_secret,
)

SOUND = {
    "remote_engine_id": "prefill",
    "remote_request_id": "p-a",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "remote_block_ids": [[5, 2, 9]],
    "remote_num_tokens": 40,
}
NOTED = ("_fault", "_remote_blocks_processed", "_p_side_truncated")
"""What schedulers alone may say."""
FLAGS = ("do_remote_prefill", "do_remote_decode")
TRUSTED = TrustedPeers.parse(["10.0.0.0/8"])

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from([*SOUND, *NOTED, *FLAGS, "tp_size", "of somebody else"])
any_params = st.dictionaries(names, json_values) | st.dictionaries(names, json_values).map(
    lambda changes: {**SOUND, "do_remote_prefill": True, **changes}
)
sound_params = st.fixed_dictionaries(
    {
        "remote_engine_id": st.text(min_size=1, max_size=20),
        "remote_request_id": st.text(min_size=1, max_size=20),
        "remote_host": st.text(min_size=1, max_size=20),
        "remote_port": st.integers(1, 65535),
        "remote_block_ids": st.lists(st.lists(st.integers(0, 2**31 - 1)), min_size=1, max_size=4),
    },
    optional={
        "remote_num_tokens": st.none() | st.integers(0, 2**31 - 1),
        "remote_secret": st.none() | st.integers(0, 2**64 - 1).map(write_secret),
    },
)


@given(any_params, st.booleans(), st.sampled_from([None, TRUSTED]))
def test_whatever_is_said_is_understood_or_refused(params, reads_back, trusted):
    """Nothing raises; who reads finds a source that can be, or one line that says what is wrong."""
    before = dict(params)
    made, why = sanitize_params(params, reads_back=reads_back, trusted=trusted)
    assert params.keys() == before.keys()
    assert made is not None and (why is None or "\n" not in why)
    offered_tokens(made), is_disaggregated(made), already_requested(made)
    if made.get("do_remote_prefill") or (reads_back and made.get("remote_block_ids")):
        source = remote_blocks(made)
        if isinstance(source, str):
            assert source and "\n" not in source
        else:
            assert 0 < source.remote_port < 1 << 16 and source.remote_block_ids
            assert trusted is None or trusted.fault(source.remote_host) is None


@given(sound_params, st.sampled_from(FLAGS))
def test_what_an_engine_says_is_passed_on(params, flag):
    """All that is sound is taken as it is."""
    params[flag] = True
    made, why = sanitize_params(params, reads_back=True)
    assert (made, why) == (params, None)
    source = remote_blocks(made)
    assert isinstance(source, RemoteBlocks)
    assert {name: getattr(source, name) for name in params if name != flag} == {
        name: value for name, value in params.items() if name != flag
    }


@given(any_params, st.booleans())
def test_no_client_speaks_for_a_scheduler(params, reads_back):
    """What schedulers note down is nothing that they find there."""
    said = {name: value for name, value in params.items() if name not in NOTED}
    lied = {**params, **dict.fromkeys(NOTED, "a client's own")}
    expected = sanitize_params(said, reads_back=reads_back)
    found = sanitize_params(lied, reads_back=reads_back)
    assert repr(found) == repr(expected)
    assert "a client's own" not in repr(found)


@pytest.mark.parametrize(
    "change",
    [
        {"remote_engine_id": ""},
        {"remote_engine_id": "e" * 1025},
        {"remote_engine_id": "e\ud800"},
        {"remote_request_id": "\udfff"},
        {"remote_host": "10.0.0.1\udc80"},
        {"remote_request_id": None},
        {"remote_host": 7},
        {"remote_port": True},
        {"remote_port": 0},
        {"remote_port": "\ud800"},
        {"remote_port": 65536},
        {"remote_port": 5600.5},
        {"remote_block_ids": []},
        {"remote_block_ids": [5]},
        {"remote_block_ids": [[-1]]},
        {"remote_block_ids": [[1 << 31]]},
        {"remote_num_tokens": -1},
        {"remote_num_tokens": 1 << 31},
        {"remote_secret": 7},
        {"remote_secret": ""},
        {"remote_secret": 15 * "0"},
        {"remote_secret": 17 * "0"},
        {"remote_secret": 16 * "A"},
        {"remote_secret": 16 * "0" + "\n"},
        {"remote_secret": 16 * "\u0660"},
    ],
    ids=str,
)
def test_source_that_cannot_be_is_a_fault(change):
    """A prompt that should be read fails with it; a last turn's is computed, and says why."""
    params, why = sanitize_params({**SOUND, "do_remote_prefill": True, **change}, reads_back=True)
    fault = remote_blocks(params)
    assert why is None and params["do_remote_prefill"] and params["remote_block_ids"]
    assert "the router must pass on unchanged" in fault
    if change != {"remote_block_ids": []}:
        params, why = sanitize_params(
            {**SOUND, "do_remote_decode": True, **change}, reads_back=True
        )
        assert (params, why) == ({"do_remote_decode": True}, fault)


@pytest.mark.parametrize(
    "params", ["do_remote_prefill", 7, True, False, "", [], [["do_remote_prefill", True]], {7: 1}]
)
@pytest.mark.parametrize("reads_back", [True, False])
def test_params_that_are_no_object_are_a_fault(params, reads_back):
    """A front end may let them through; a request with none has none."""
    made, why = sanitize_params(params, reads_back=reads_back)
    assert made is not None and why is None and "they are no object, but" in remote_blocks(made)
    assert sanitize_params(None, reads_back=reads_back) == (None, None)
    assert sanitize_params({}, reads_back=reads_back) == ({}, None)


def test_lists_without_end_are_a_fault():
    """However deep a client nests them."""
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    made, _ = sanitize_params(
        {**SOUND, "do_remote_prefill": True, "remote_block_ids": deep}, reads_back=False
    )
    assert "malformed" in remote_blocks(made)


def test_host_that_is_empty_is_the_other_engines_setting():
    """It was not the router that has left it out."""
    params = {**SOUND, "do_remote_prefill": True, "remote_host": ""}
    made, _ = sanitize_params(params, reads_back=False)
    fault = remote_blocks(made)
    assert (
        fault == "its remote_host is empty: set VLLM_NIXL_SIDE_CHANNEL_HOST where it was prefilled"
    )


def test_host_that_is_not_trusted_is_not_asked():
    """Its fault names the option that would allow it."""
    asked = {**SOUND, "remote_host": "192.0.2.1"}
    made, why = sanitize_params(
        {**asked, "do_remote_prefill": True}, reads_back=False, trusted=TRUSTED
    )
    assert why is None and "trusted_peers (10.0.0.0/8)" in remote_blocks(made)
    made, why = sanitize_params(asked, reads_back=True, trusted=TRUSTED)
    assert made == {} and "trusted_peers (10.0.0.0/8)" in why


@pytest.mark.parametrize("reads_back", [False, True])
def test_blocks_of_the_last_turn_are_read_where_they_may_be(reads_back):
    """Elsewhere the request says nothing of them, and its producer still holds what it computes."""
    asked = {**SOUND, "do_remote_decode": True, "tp_size": 2}
    made, why = sanitize_params(asked, reads_back=reads_back)
    assert why is None
    assert made == (asked if reads_back else {"do_remote_decode": True, "tp_size": 2})
    assert without_source(made) == {"do_remote_decode": True, "tp_size": 2}


@pytest.mark.parametrize("params", [None, {}])
def test_request_without_parameters_has_none(params):
    """It is nobody else's."""
    assert sanitize_params(params, reads_back=True) == (params, None)
    assert not is_disaggregated(params) and not already_requested(params)
    assert offered_tokens(params) is None


@given(st.integers(0, 2**64 - 1))
def test_secret_survives_a_router(secret):
    """And is none where the parameters have none; what is read from elsewhere takes it along."""
    made = {**SOUND, "do_remote_decode": True, "remote_secret": write_secret(secret)}
    assert remote_blocks(json.loads(json.dumps(made))).secret == secret
    assert remote_blocks(SOUND).secret is None
    assert without_source(made) == {"do_remote_decode": True}


@pytest.mark.parametrize(
    ("count", "expected"), [(40, 40), (0, None), (-1, None), (None, None), ("40", None)]
)
def test_tokens_are_counted_where_they_are_said(count, expected):
    """Without a number they are the prompt's."""
    assert offered_tokens({"remote_num_tokens": count}) == expected


def test_request_of_another_engine_has_two_names():
    """Where there is nothing to read, or a fault, it has none."""
    assert remote_request(SOUND) == ("prefill", "p-a")
    assert remote_request({**SOUND, "remote_block_ids": []}) is None
    faulty, _ = sanitize_params({"do_remote_prefill": True}, reads_back=False)
    assert remote_request(faulty) is None

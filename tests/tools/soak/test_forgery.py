# SPDX-License-Identifier: Apache-2.0
"""Every forgery differs from what an engine returned, and leaves that as it was."""

from __future__ import annotations

import copy

from hypothesis import given
from hypothesis import strategies as st

from tools.soak.forgery import Forgery, forge

blocks = st.lists(st.lists(st.integers(0, 63), min_size=2, unique=True), min_size=1)


@given(st.sampled_from(Forgery), blocks, blocks)
def test_forged_parameters_are_others(forgery, own, others):
    """Nothing else is changed, and neither are the parameters that were given."""
    params, other = (
        {
            "do_remote_prefill": True,
            "remote_engine_id": "engine",
            "remote_request_id": request_id,
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "remote_block_ids": ids,
        }
        for request_id, ids in (("mine", own), ("yours", others))
    )
    before = copy.deepcopy((params, other))
    forged = forge(params, forgery, other)
    assert (params, other) == before
    assert forged["do_remote_prefill"] is True
    if forgery is not Forgery.OTHER_BLOCKS or own != others:
        assert forged != params

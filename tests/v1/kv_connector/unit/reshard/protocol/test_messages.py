# SPDX-License-Identifier: Apache-2.0
"""Notifications on the wire."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import RemoteLayoutError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    Done,
    Renew,
    decode_notification,
    encode_notification,
    renewals,
)


@given(
    notification=st.one_of(
        st.builds(Done, st.text(), st.text(), st.integers(1, 1000)),
        st.builds(Renew, st.lists(st.text())),
    )
)
def test_notification_survives_the_wire(notification):
    """What is read is what was written."""
    assert decode_notification(encode_notification(notification)) == notification


def test_renewals_do_not_depend_on_the_order_of_a_set():
    """Equal heartbeats are equal bytes."""
    assert decode_notification(renewals({"b", "a"})) == Renew(["a", "b"])


@given(data=st.binary(max_size=64))
def test_garbage_is_a_typed_error(data):
    """A stranger's bytes are refused and harm nobody."""
    try:
        decode_notification(data)
    except RemoteLayoutError as error:
        assert "the same version" in str(error)


@pytest.mark.parametrize(
    "data",
    [b"\x94\xa4done\xa1\xff\xa1a\x01", b"\x95\xa4done\xa1a\xa1a\x01" + b"\x91" * 60_000 + b"\x90"],
    ids=["no UTF-8", "nested deeply"],
)
def test_what_escapes_the_decoder_is_a_typed_error_too(data):
    """Bytes that make the decoder fail in its own ways do not reach the engine's thread."""
    with pytest.raises(RemoteLayoutError):
        decode_notification(data)


@pytest.mark.parametrize("data", [b"request-1:2", b"HB:a,b", b""])
def test_upstreams_notifications_are_refused(data):
    """Messages of upstream's connector are not mistaken for ours."""
    with pytest.raises(RemoteLayoutError):
        decode_notification(data)

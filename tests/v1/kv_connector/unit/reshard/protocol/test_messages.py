# SPDX-License-Identifier: Apache-2.0
"""Notifications on the wire."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import RemoteLayoutError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.fingerprint import (
    OfferFingerprint,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    MAX_NOTIFICATION_BYTES,
    Announcement,
    Done,
    DoneEntry,
    GaveUp,
    GaveUpEntry,
    Renew,
    decode_announcement,
    decode_notification,
    encode_announcement,
    encode_done,
    encode_gave_up,
    encode_notification,
    encode_renewals,
)

WORDS = st.integers(0, (1 << 64) - 1)
FINGERPRINTS = st.builds(OfferFingerprint, st.integers(0, (1 << 31) - 1), WORDS, WORDS)
IDS = st.text(max_size=1024)
RELEASES = st.builds(DoneEntry.of, IDS, st.integers(1, 1 << 16), FINGERPRINTS)
GIVEN_UP = st.builds(GaveUpEntry, IDS, st.integers(1, 1 << 16), WORDS)


@given(
    notification=st.one_of(
        st.builds(Done, st.text(), st.lists(RELEASES)),
        st.builds(GaveUp, st.text(), st.lists(GIVEN_UP)),
        st.builds(Renew, st.lists(IDS)),
    )
)
def test_notification_survives_the_wire(notification):
    """What is read is what was written."""
    assert decode_notification(encode_notification(notification)) == notification


@given(st.builds(Announcement, st.integers(0, 1 << 62), IDS, FINGERPRINTS))
def test_announcement_survives_the_wire(announcement):
    """Workers show readers the very words that the scheduler computed."""
    assert decode_announcement(encode_announcement(announcement)) == announcement


@given(request_id=IDS, num_notifiers=st.integers(1, 1 << 16), fingerprint=FINGERPRINTS)
def test_fingerprint_survives_a_release(request_id, num_notifiers, fingerprint):
    """The producer compares with the very words that the reader computed."""
    assert DoneEntry.of(request_id, num_notifiers, fingerprint).proof == fingerprint


def test_renewals_do_not_depend_on_the_order_of_a_set():
    """Equal heartbeats are equal bytes."""
    assert [decode_notification(each) for each in encode_renewals({"b", "a"})] == [
        Renew(["a", "b"])
    ]


@given(count=st.integers(0, 600), stem=st.text(min_size=1, max_size=1000), fingerprint=FINGERPRINTS)
def test_long_lists_are_cut(count, stem, fingerprint):
    """Nothing is lost, doubled or put in another order, and no notification is too long."""
    entries = [DoneEntry.of(f"{stem}{number}", 128, fingerprint) for number in range(count)]
    messages = encode_done("d0", entries)
    assert all(len(message) <= MAX_NOTIFICATION_BYTES for message in messages)
    told = [decode_notification(message) for message in messages]
    assert [release for done in told for release in done.releases] == entries
    assert {done.notifier for done in told} <= {"d0"}

    entries = [GaveUpEntry(each.request_id, 128, fingerprint.content) for each in entries]
    messages = encode_gave_up("d0", entries)
    assert all(len(message) <= MAX_NOTIFICATION_BYTES for message in messages)
    assert [each for part in map(decode_notification, messages) for each in part.releases] == (
        entries
    )

    ids = sorted(entry.request_id for entry in entries)
    messages = encode_renewals(ids)
    assert all(len(message) <= MAX_NOTIFICATION_BYTES for message in messages)
    assert [each for part in map(decode_notification, messages) for each in part.request_ids] == ids


def test_usual_turns_take_one_notification():
    """Eighty requests with ids as vLLM's own fit one."""
    request_ids = [f"cmpl-___prefill_addr_10.0.0.1:8100_{number:032d}" for number in range(80)]
    entries = [
        DoneEntry.of(each, 128, OfferFingerprint(32768, 1 << 63, 1 << 63)) for each in request_ids
    ]
    assert len(encode_done("engine/pp0tp0", entries)) == len(encode_renewals(request_ids)) == 1


@given(data=st.binary(max_size=64))
def test_garbage_is_a_typed_error(data):
    """A stranger's bytes are refused and harm nobody."""
    try:
        decode_notification(data)
    except RemoteLayoutError as error:
        assert "the same version" in str(error)


@pytest.mark.parametrize(
    "data",
    [
        b"\x93\xa4done\xa1a\x91\x95\xa1\xff\x01\x01\x01\x01",
        b"\x94\xa4done\xa1a\x90" + b"\x91" * 60_000 + b"\x90",
    ],
    ids=["no UTF-8", "nested deeply"],
)
def test_what_escapes_the_decoder_is_a_typed_error_too(data):
    """Bytes that make the decoder fail in its own ways do not reach the engine's thread."""
    with pytest.raises(RemoteLayoutError):
        decode_notification(data)


@pytest.mark.parametrize(
    "change", [{"num_notifiers": 0}, {"num_tokens": -1}, {"request_id": 1025 * "a"}]
)
def test_release_out_of_bounds_is_refused(change):
    """No reader's plan, prompt or parameters could have led to it."""
    release = structs.replace(DoneEntry("a", 1, 48, 1, 2), **change)
    with pytest.raises(RemoteLayoutError):
        decode_notification(encode_notification(Done("d0", [release])))


@pytest.mark.parametrize(
    "entry", [["a", 0, 7], ["a", 1, float(1 << 64)], ["a", 1, "7"], [1025 * "a", 1, 7]]
)
def test_secret_out_of_bounds_is_refused(entry):
    """No offer could have gone with it."""
    data = msgspec.msgpack.encode(["gave up", "d0", [entry]])
    with pytest.raises(RemoteLayoutError):
        decode_notification(data)


@pytest.mark.parametrize("data", [b"request-1:2", b"HB:a,b", b""])
def test_upstreams_notifications_are_refused(data):
    """Messages of upstream's connector are not mistaken for ours."""
    with pytest.raises(RemoteLayoutError):
        decode_notification(data)

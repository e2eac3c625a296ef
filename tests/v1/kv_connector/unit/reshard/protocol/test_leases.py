# SPDX-License-Identifier: Apache-2.0
"""The table of held requests, and what readers look for in it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.v1.kv_connector.unit.reshard.protocol.tables import entries, seen
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.fingerprint import (
    OfferFingerprint,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.leases import (
    BUCKET_BYTES,
    ENTRIES_PER_BUCKET,
    WORDS_PER_ENTRY,
    Entry,
    Held,
    LeaseTable,
    entry_of,
)

REQUEST_IDS = [f"request-{number}" for number in range(40)]
WORDS = st.integers(0, (1 << 64) - 1)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "publish", "remove"]),
            st.sampled_from(REQUEST_IDS),
            st.builds(OfferFingerprint, st.integers(1, 1 << 40), WORDS, WORDS),
        )
    ),
    st.integers(1, 4),
)
def test_table_says_what_was_entered_bound_and_not_struck(operations, num_buckets):
    """In any order and with any size, only requests without room are missing."""
    table = LeaseTable(num_buckets)
    held: dict[str, OfferFingerprint | None] = {}
    for operation, request_id, fingerprint in operations:
        if operation == "remove":
            table.remove(request_id)
            held.pop(request_id, None)
        elif operation == "publish":
            table.publish(request_id, fingerprint)
            if request_id in held:
                held[request_id] = fingerprint
        elif table.add(request_id):
            held.setdefault(request_id, None)
        else:
            bucket = entries(table.address)[entry_of(request_id, num_buckets).bucket]
            assert np.count_nonzero(bucket[:, 0]) == ENTRIES_PER_BUCKET
            assert request_id not in held
    for request_id in REQUEST_IDS:
        expected = (True, held[request_id]) if request_id in held else (False, None)
        assert seen(table.address, request_id) == expected
    assert np.count_nonzero(entries(table.address)[:, :, 0]) == len(held)


def test_name_that_is_used_again_is_not_bound_yet():
    """What the last request of that name offered is not what this one will."""
    table = LeaseTable(4)
    table.add("a")
    table.publish("a", OfferFingerprint(3, 1, 1))
    table.remove("a")
    table.add("a")
    assert seen(table.address, "a") == Held(True, None)


def test_what_is_said_again_is_not_written_again():
    """A reader that looks at that moment finds it bound."""
    table = LeaseTable(4)
    table.add("a")
    table.publish("a", OfferFingerprint(3, 1, 1 << 63))
    table._entries.flags.writeable = False
    table.publish("a", OfferFingerprint(3, 1, 1 << 63))
    with pytest.raises(ValueError, match="read-only"):
        table.publish("a", OfferFingerprint(4, 1, 1 << 63))


def test_address_is_where_the_words_are():
    """Peers read the words themselves, not a copy, and no entry crosses a cache line."""
    table = LeaseTable(4)
    words = entries(table.address)
    table.add("a")
    assert np.count_nonzero(words[:, :, 0]) == 1
    table.remove("a")
    assert not words.any()
    assert table.address.size_bytes == 4 * BUCKET_BYTES
    assert table.address.address % 64 == 0
    assert 64 % (8 * WORDS_PER_ENTRY) == 0


def test_entries_are_the_same_in_every_process():
    """Two engines agree on what stands for a request; no hash seed has a part in it."""
    assert entry_of("request", 1 << 14) == Entry(bucket=2397, name=17319101874132403447)


@given(st.text(), st.integers(1, 1 << 20))
def test_entries_are_never_free_places(request_id, num_buckets):
    """Any id leads to a bucket that exists, and to a name that a free place does not have."""
    bucket, name = entry_of(request_id, num_buckets)
    assert 0 <= bucket < num_buckets
    assert 0 < name < 1 << 64

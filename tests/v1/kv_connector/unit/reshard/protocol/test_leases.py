# SPDX-License-Identifier: Apache-2.0
"""The table of held requests, and what readers look for in it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.leases import (
    WORDS_PER_BUCKET,
    Entry,
    LeaseTable,
    entry_of,
)

REQUEST_IDS = [f"request-{number}" for number in range(40)]


def stands_in(table: LeaseTable, request_id: str) -> bool:
    """Look a request up as a reader does, in the memory at the table's address."""
    bucket, word = entry_of(request_id, table.address.num_buckets)
    return word in table._words[bucket].tolist()


@given(
    st.lists(st.tuples(st.booleans(), st.sampled_from(REQUEST_IDS))),
    st.integers(1, 4),
)
def test_table_holds_what_was_entered_and_not_struck(operations, num_buckets):
    """In any order and with any size, only requests without room are missing."""
    table, held = LeaseTable(num_buckets), set()
    for is_entry, request_id in operations:
        if not is_entry:
            table.strike(request_id)
            held.discard(request_id)
        elif table.enter(request_id):
            held.add(request_id)
        else:
            bucket = entry_of(request_id, num_buckets).bucket
            assert np.count_nonzero(table._words[bucket]) == WORDS_PER_BUCKET
            assert request_id not in held
    assert {each for each in REQUEST_IDS if stands_in(table, each)} == held
    assert np.count_nonzero(table._words) == len(held)


def test_address_is_where_the_words_are():
    """Peers read the words themselves, not a copy."""
    table = LeaseTable(4)
    assert table.address.address == table._words.ctypes.data
    assert table.address.size_bytes == table._words.nbytes


def test_entries_are_the_same_in_every_process():
    """Two engines agree on what stands for a request; no hash seed has a part in it."""
    assert entry_of("request", 1 << 14) == Entry(bucket=2397, word=17319101874132403447)


@given(st.text(), st.integers(1, 1 << 20))
def test_entries_are_never_free_words(request_id, num_buckets):
    """Any id leads to a bucket that exists, and to a word that a free place does not hold."""
    bucket, word = entry_of(request_id, num_buckets)
    assert 0 <= bucket < num_buckets
    assert 0 < word < 1 << 64

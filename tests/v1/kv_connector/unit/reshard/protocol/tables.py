# SPDX-License-Identifier: Apache-2.0
"""Tables of leases as readers see them: the memory at their address."""

from __future__ import annotations

import ctypes

import numpy as np

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.leases import (
    ENTRIES_PER_BUCKET,
    WORDS_PER_ENTRY,
    Held,
    LeaseTableAddress,
    entry_of,
    look_up,
)


def entries(table: LeaseTableAddress) -> np.ndarray:
    """The words of a table of this process, not a copy; shape (buckets, entries, words)."""
    memory = (ctypes.c_uint64 * (table.size_bytes // 8)).from_address(table.address)
    return np.ctypeslib.as_array(memory).reshape(-1, ENTRIES_PER_BUCKET, WORDS_PER_ENTRY)


def seen(table: LeaseTableAddress, request_id: str) -> Held:
    """What readers see of a request."""
    bucket, name = entry_of(request_id, table.num_buckets)
    return look_up(entries(table)[bucket].ravel(), name)


def strike(table: LeaseTableAddress, request_id: str) -> None:
    """Have readers see that a request is not held."""
    bucket, name = entry_of(request_id, table.num_buckets)
    words = entries(table)[bucket]
    words[words[:, 0] == name] = 0

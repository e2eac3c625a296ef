# SPDX-License-Identifier: Apache-2.0
"""Leases that a reader can check by itself, after it has read.

An engine holds a request's blocks until all readers were heard or a lease has run out, and then
uses them for something else. A reader whose bytes were under way at that moment cannot tell from
the bytes. So each worker of the holder keeps a table of the requests that it holds, in host memory
that peers can read as they read the cache:

    holder   enters a request before its first block is computed, and strikes it out *before* it
             says that the blocks may be freed; one that was aborted was never offered to readers
    reader   reads the blocks, and *then* the table: the request still stands in it, or the bytes
             may be another request's

which is a seqlock with a NIXL read in place of a load. It takes no time of the holder's, no clocks
that agree, and nothing that a router would have to pass on.

The table is a hash table with buckets of one cache line. A reader knows from the request's id which
bucket to read and which word to find there.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .ledgers import RequestId

WORDS_PER_BUCKET = 8
WORD_BYTES = 8
BUCKET_BYTES = WORDS_PER_BUCKET * WORD_BYTES

_NUM_BUCKETS = 1 << 14
"""1 MiB. With 16384 requests held at once, a bucket overflows for two in a hundred of them; with a
thousand, for none in a billion."""

_FREE = 0


class Entry(NamedTuple):
    """What stands for a request in a table.

    Attributes:
        bucket: Where.
        word: What; not 0.
    """

    bucket: int
    word: int


@dataclass(frozen=True, slots=True)
class LeaseTableAddress:
    """Where a worker's table lies.

    Attributes:
        address: Of its first word, in host memory.
        num_buckets: How many buckets there are.
    """

    address: int
    num_buckets: int

    @property
    def size_bytes(self) -> int:
        """Size of the table."""
        return self.num_buckets * BUCKET_BYTES


def entry_of(request_id: RequestId, num_buckets: int) -> Entry:
    """What stands for a request, the same in every process."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=16).digest()
    bucket = int.from_bytes(digest[:8], "little") % num_buckets
    return Entry(bucket, int.from_bytes(digest[8:], "little") or 1)


class LeaseTable:
    """The requests that a worker holds, for peers to look at. Belongs to the engine's thread.

    Args:
        num_buckets: Size of the table, in buckets.
    """

    def __init__(self, num_buckets: int = _NUM_BUCKETS) -> None:
        self._words = np.zeros((num_buckets, WORDS_PER_BUCKET), dtype=np.uint64)

    @property
    def address(self) -> LeaseTableAddress:
        """Where the table lies."""
        return LeaseTableAddress(self._words.ctypes.data, len(self._words))

    def enter(self, request_id: RequestId) -> bool:
        """Say that a request's blocks are its own.

        Returns:
            Whether there was room. Without, readers will take the request's lease for expired.
        """
        bucket, word = self._bucket(request_id)
        if word in bucket:
            return True
        free = np.flatnonzero(bucket == _FREE)
        if not len(free):
            return False
        bucket[free[0]] = word
        return True

    def strike(self, request_id: RequestId) -> None:
        """Say that a request's blocks may be another's from now on."""
        bucket, word = self._bucket(request_id)
        bucket[bucket == word] = _FREE

    def _bucket(self, request_id: RequestId) -> tuple[np.ndarray, np.uint64]:
        bucket, word = entry_of(request_id, len(self._words))
        return self._words[bucket], np.uint64(word)

# SPDX-License-Identifier: Apache-2.0
"""Leases that a reader can check by itself, after it has read.

An engine holds a request's blocks until all readers were heard or a lease has run out, and then
uses them for something else. A reader whose bytes were under way at that moment cannot tell from
the bytes. So each worker of the producer keeps a table of the requests that it holds, in host
memory that peers can read as they read the cache:

    producer   enters a request before its first block is computed, binds it to what it offers once
             that is known, and strikes it out *before* it says that the blocks may be freed; one
             that was aborted was never offered to readers
    reader   reads the blocks, and *then* the table: the request still stands in it, bound to what
             was read, or the bytes may be another request's

which is a seqlock with a NIXL read in place of a load. It takes no time of the producer's, no
clocks that agree, and nothing that a router would have to pass on.

The table is a hash table of small buckets. A reader knows from the request's id which bucket to
read and which word to find there. An entry is four words and never crosses a cache line:

    name      what stands for the request's id; 0 where the place is free
    tokens    how many tokens were offered; 0 until they were
    content   digest of these tokens
    blocks    digest of their blocks' ids

The producer writes `tokens` last and takes `name` away first. A read of the line
in one piece finds all four as they belong together; one that was torn finds something else than is
wanted, and is repeated.
"""

from __future__ import annotations

import hashlib
from dataclasses import astuple, dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .fingerprint import OfferFingerprint
from .ids import RequestId

ENTRIES_PER_BUCKET = 4
WORDS_PER_ENTRY = 4
WORDS_PER_BUCKET = ENTRIES_PER_BUCKET * WORDS_PER_ENTRY
WORD_BYTES = 8
BUCKET_BYTES = WORDS_PER_BUCKET * WORD_BYTES
_LINE_BYTES = 64

_NUM_BUCKETS = 1 << 15
"""4 MiB. With 16384 requests held at once, a request finds its bucket full once in five hundred
times; with a thousand, once in tens of millions."""

_FREE = 0
_NAME, _TOKENS, _CONTENT, _BLOCKS = range(WORDS_PER_ENTRY)


class Entry(NamedTuple):
    """What stands for a request in a table.

    Attributes:
        bucket: Where.
        name: What; not 0.
    """

    bucket: int
    name: int


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


class Held(NamedTuple):
    """What a reader finds under a request's name.

    Attributes:
        entered: The producer still holds it.
        fingerprint: What it offers under that name; None as long as it has not said so.
    """

    entered: bool
    fingerprint: OfferFingerprint | None


def entry_of(request_id: RequestId, num_buckets: int) -> Entry:
    """What stands for a request, the same in every process."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=16).digest()
    bucket = int.from_bytes(digest[:8], "little") % num_buckets
    return Entry(bucket, int.from_bytes(digest[8:], "little") or 1)


def look_up(bucket: npt.NDArray[np.uint64], name: int) -> Held:
    """What a bucket says of a request.

    Args:
        bucket: Its words, shape (`WORDS_PER_BUCKET`,).
        name: What stands for the request.
    """
    for entry in bucket.reshape(ENTRIES_PER_BUCKET, WORDS_PER_ENTRY).tolist():
        if entry[_NAME] == name:
            num_tokens, content, blocks = entry[_TOKENS:]
            return Held(True, OfferFingerprint(num_tokens, content, blocks) if num_tokens else None)
    return Held(False, None)


class LeaseTable:
    """The requests that a worker holds, for peers to look at. Belongs to the connector's thread.

    Args:
        num_buckets: Size of the table, in buckets.
    """

    def __init__(self, num_buckets: int = _NUM_BUCKETS) -> None:
        self._entries = _aligned_zeros(num_buckets)

    @property
    def address(self) -> LeaseTableAddress:
        """Where the table lies."""
        return LeaseTableAddress(self._entries.ctypes.data, len(self._entries))

    def add(self, request_id: RequestId) -> bool:
        """Say that a request's blocks are its own.

        Returns:
            Whether there was room. Without, readers will take the request's lease for expired.
        """
        bucket, name = self._bucket(request_id)
        if name in bucket[:, _NAME]:
            return True
        free = np.flatnonzero(bucket[:, _NAME] == _FREE)
        if not len(free):
            return False
        bucket[free[0], _NAME] = name
        return True

    def publish(self, request_id: RequestId, fingerprint: OfferFingerprint) -> None:
        """Say what is offered under the name of a request that was entered.

        Saying it again changes nothing, at no moment.
        """
        bucket, name = self._bucket(request_id)
        for place in np.flatnonzero(bucket[:, _NAME] == name):
            if tuple(bucket[place, _TOKENS:].tolist()) == astuple(fingerprint):
                continue
            bucket[place, _TOKENS] = 0
            bucket[place, _CONTENT:] = fingerprint.content, fingerprint.blocks
            bucket[place, _TOKENS] = fingerprint.num_tokens

    def remove(self, request_id: RequestId) -> None:
        """Say that a request's blocks may be another's from now on."""
        bucket, name = self._bucket(request_id)
        for place in np.flatnonzero(bucket[:, _NAME] == name):
            bucket[place, _NAME] = _FREE
            bucket[place, _TOKENS:] = 0

    def _bucket(self, request_id: RequestId) -> tuple[npt.NDArray[np.uint64], np.uint64]:
        bucket, name = entry_of(request_id, len(self._entries))
        return self._entries[bucket], np.uint64(name)


def _aligned_zeros(num_buckets: int) -> npt.NDArray[np.uint64]:
    """Words that begin with a cache line; shape (buckets, entries, words)."""
    size_bytes = num_buckets * BUCKET_BYTES
    raw = np.zeros(size_bytes + _LINE_BYTES, dtype=np.uint8)
    start = -raw.ctypes.data % _LINE_BYTES
    words = raw[start : start + size_bytes].view(np.uint64)
    return words.reshape(num_buckets, ENTRIES_PER_BUCKET, WORDS_PER_ENTRY)

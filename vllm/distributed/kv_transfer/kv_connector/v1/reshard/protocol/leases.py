# SPDX-License-Identifier: Apache-2.0
"""Leases that a reader can check by itself, after it has read the blocks.

An engine holds a request's blocks until all readers have notified it or a lease expires, and then
reuses them. A reader whose read was in flight at that moment cannot see this from the bytes. So
each worker of the producer keeps a table of the requests that it holds, in host memory that peers
can read like the cache:

    producer   adds a request before its first block is computed, binds it to its offer once that
             is known, and removes it *before* it reports that the blocks may be freed; an aborted
             request was never offered to readers
    reader   reads the blocks, and *then* the table: if the request is no longer in it, or is bound
             to something else, the bytes may be another request's

This is a seqlock with a NIXL read in place of a load. It costs the producer no time, and needs
neither synchronized clocks nor anything that a router would have to pass on.

The table is a hash table of small buckets. The request's id tells a reader which bucket to read and
which word to find there. An entry is four words and never crosses a cache line:

    name      digest of the request's id; 0 in a free entry
    tokens    number of tokens offered; 0 before the offer
    content   digest of these tokens
    blocks    digest of their blocks' ids

The producer writes `tokens` last and clears `name` first. A read that gets the cache line in one
piece finds a consistent entry; a torn read finds a mismatch, and is repeated.
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
"""4 MiB. With 16384 requests held at once, a request finds its bucket full one time in 500; with a
thousand, one time in tens of millions."""

_FREE = 0
_NAME, _TOKENS, _CONTENT, _BLOCKS = range(WORDS_PER_ENTRY)


class Entry(NamedTuple):
    """A request's key in a table.

    Attributes:
        bucket: Index of its bucket.
        name: Digest of its id; not 0.
    """

    bucket: int
    name: int


@dataclass(frozen=True, slots=True)
class LeaseTableAddress:
    """Location and size of a worker's table.

    Attributes:
        address: Address of its first word, in host memory.
        num_buckets: Number of buckets.
    """

    address: int
    num_buckets: int

    @property
    def size_bytes(self) -> int:
        """Size of the table."""
        return self.num_buckets * BUCKET_BYTES


class Held(NamedTuple):
    """A reader's view of a request in the table.

    Attributes:
        entered: True while the producer holds the request.
        fingerprint: Fingerprint of the offer; None until the producer publishes it.
    """

    entered: bool
    fingerprint: OfferFingerprint | None


def entry_of(request_id: RequestId, num_buckets: int) -> Entry:
    """Return a request's key, which is the same in every process."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=16).digest()
    bucket = int.from_bytes(digest[:8], "little") % num_buckets
    return Entry(bucket, int.from_bytes(digest[8:], "little") or 1)


def look_up(bucket: npt.NDArray[np.uint64], name: int) -> Held:
    """Look a request up in a bucket.

    Args:
        bucket: The bucket's words, shape (`WORDS_PER_BUCKET`,).
        name: Digest of the request's id.
    """
    for entry in bucket.reshape(ENTRIES_PER_BUCKET, WORDS_PER_ENTRY).tolist():
        if entry[_NAME] == name:
            num_tokens, content, blocks = entry[_TOKENS:]
            return Held(True, OfferFingerprint(num_tokens, content, blocks) if num_tokens else None)
    return Held(False, None)


class LeaseTable:
    """Table of the requests that a worker holds, read by peers. Owned by the connector's thread.

    Args:
        num_buckets: Size of the table, in buckets.
    """

    def __init__(self, num_buckets: int = _NUM_BUCKETS) -> None:
        self._entries = _aligned_zeros(num_buckets)

    @property
    def address(self) -> LeaseTableAddress:
        """Location and size of the table."""
        return LeaseTableAddress(self._entries.ctypes.data, len(self._entries))

    def add(self, request_id: RequestId) -> bool:
        """Add a request: its blocks are not reused while it is in the table.

        Returns:
            False if its bucket is full; readers will then take the request's lease for expired.
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
        """Bind a request in the table to its offer.

        Publishing the same offer again does not write to the entry, even briefly.
        """
        bucket, name = self._bucket(request_id)
        for place in np.flatnonzero(bucket[:, _NAME] == name):
            if tuple(bucket[place, _TOKENS:].tolist()) == astuple(fingerprint):
                continue
            bucket[place, _TOKENS] = 0
            bucket[place, _CONTENT:] = fingerprint.content, fingerprint.blocks
            bucket[place, _TOKENS] = fingerprint.num_tokens

    def remove(self, request_id: RequestId) -> None:
        """Remove a request: its blocks may be reused from now on."""
        bucket, name = self._bucket(request_id)
        for place in np.flatnonzero(bucket[:, _NAME] == name):
            bucket[place, _NAME] = _FREE
            bucket[place, _TOKENS:] = 0

    def _bucket(self, request_id: RequestId) -> tuple[npt.NDArray[np.uint64], np.uint64]:
        bucket, name = entry_of(request_id, len(self._entries))
        return self._entries[bucket], np.uint64(name)


def _aligned_zeros(num_buckets: int) -> npt.NDArray[np.uint64]:
    """Zeros that begin at a cache line; shape (buckets, entries, words)."""
    size_bytes = num_buckets * BUCKET_BYTES
    raw = np.zeros(size_bytes + _LINE_BYTES, dtype=np.uint8)
    start = -raw.ctypes.data % _LINE_BYTES
    words = raw[start : start + size_bytes].view(np.uint64)
    return words.reshape(num_buckets, ENTRIES_PER_BUCKET, WORDS_PER_ENTRY)

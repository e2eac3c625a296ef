# SPDX-License-Identifier: Apache-2.0
"""A producer's board: the states of requests that were sent to readers before they were computed.

A reader that receives a request at the same time as its producer knows neither the blocks nor the
producer's id of the request, but only a name that both share. So each worker of the producer keeps
a board in host memory, which readers read like the lease table:

    KNOWN       the producer has received the request
    LAST_CHUNK  the step that completes its prompt is being computed: it needs no more blocks there
    OFFERED     it is held for readers; a record has its id and its blocks
    ABORTED, EMPTY, AMBIGUOUS   it will not be offered, and why

If a prompt takes several steps, a second entry in the name's bucket has the number of tokens
computed so far, and a record their blocks. Builds without this feature do not find that entry.

The board guarantees nothing. A record has what a router would pass on otherwise, and a reader
trusts the blocks that it read only after the lease check: see `leases`.

Board and records are rows of one size, so a reader has one descriptor list for both. The buckets of
a hash table come first, as in `leases`. The rows of the records follow; each record is in adjacent
rows. An entry is four words:

    name      digest of the shared name; 0 in a free entry
    state     a `State`
    record    of an offer, first row and size in bytes of its record; else 0
    digest    digest of the record; it does not match a record that was read while it changed

The second entry has the number of tokens in place of the state. In a new entry the name is written
last, in an existing one the state, so a reader sees one state or the next until it is removed.

Clients may choose names. The digest includes the engine's id, which clients are not given, so that
they cannot choose names that fill a bucket.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from ..memory.arena import ArenaAllocator, Span
from .ids import EngineId, RequestId
from .leases import Entry, entry_of
from .quoting import one_line

ROW_BYTES = 512
_WORD_BYTES = 8
WORDS_PER_ROW = ROW_BYTES // _WORD_BYTES
_WORDS_PER_ENTRY = 4

NUM_BUCKETS = 1 << 10
"""16384 entries: with a thousand requests at the same time, no bucket is ever full."""

NUM_ROWS = NUM_BUCKETS + (1 << 13)
"""Rows of a board in all, 4.5 MiB, with room for records of a million block ids."""

MAX_RECORD_ROWS = 1 << 10
"""Limit of one request's record, 130000 block ids: readers have room for at least as many."""

MAX_GONE = 1 << 10
"""Requests that will not be offered and are still on the board; older ones are removed."""

_NAME, _STATE, _RECORD, _DIGEST = range(_WORDS_PER_ENTRY)

_COMPUTED = 0x9E3779B97F4A7C15
"""XORed to the name in the second entry."""

_LEFT_FREE = 4
"""Entries of a bucket that second entries leave free for first ones, which requests need."""


class State(IntEnum):
    """The state of a request at its producer."""

    KNOWN = 1
    LAST_CHUNK = 2
    OFFERED = 3
    ABORTED = 4
    EMPTY = 5
    AMBIGUOUS = 6

    @property
    def fault(self) -> str | None:
        """Why the request will not be offered; None if it may be, or is."""
        return _FAULTS.get(self)

    @property
    def is_computed(self) -> bool:
        """True while the request's prompt is not completely computed."""
        return self in (State.KNOWN, State.LAST_CHUNK)


_FAULTS = {
    State.ABORTED: "its prefill was aborted",
    State.EMPTY: "its prefill has ended with nothing that can be read",
    State.AMBIGUOUS: "several requests have its name there: give each an X-Request-Id of its own",
}


class BoardUpdate(msgspec.Struct, frozen=True, array_like=True, tag="board_update"):
    """A request's state, sent by a producer's scheduler to its workers.

    Attributes:
        number: Number of the update, counted by the scheduler.
        name: The shared name.
        state: The state; None to remove the request from the board.
        request_id: The producer's id of the request.
        record: Encoded record of the offer, or of what is computed so far; else empty.
        num_computed: Tokens computed so far, if the record is about these; else 0.
    """

    number: int
    name: str
    state: State | None
    request_id: RequestId = ""
    record: bytes = b""
    num_computed: int = 0


class Record(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that are offered or computed so far, and their blocks.

    Attributes:
        request_id: The producer's id of the request.
        num_tokens: Number of its tokens that the blocks hold.
        block_ids: Block ids of each KV-cache group, as 32-bit words. In a record of what is
            computed so far, groups that do not keep all tokens have none.
        first_token: The token sampled after these; None if the record does not have it.
        attempt: Number of the producer's attempt to compute a prompt. A preempted request starts
            again with another number, and the blocks of the earlier attempt may be gone.
    """

    request_id: Annotated[str, Meta(min_length=1, max_length=1 << 10)]
    num_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)]
    block_ids: Annotated[list[bytes], Meta(min_length=1, max_length=1 << 12)]
    first_token: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    attempt: Annotated[int, Meta(ge=0, lt=1 << 53)] = 0

    @classmethod
    def of(
        cls,
        request_id: RequestId,
        num_tokens: int,
        block_ids: Sequence[Sequence[int]],
        first_token: int | None = None,
        attempt: int = 0,
    ) -> Record:
        """Return the record of some tokens in some blocks."""
        words = [np.array(each, "<u4").tobytes() for each in block_ids]
        return cls(request_id, num_tokens, words, first_token, attempt)

    def blocks(self) -> list[list[int]]:
        """Return the block ids of each KV-cache group."""
        whole = (each[: len(each) // 4 * 4] for each in self.block_ids)
        return [np.frombuffer(each, "<u4").tolist() for each in whole]


class RecordPlace(NamedTuple):
    """The place of a record on a board.

    Attributes:
        first_row: First of its rows.
        size_bytes: Its size.
        digest: Digest that its bytes must have.
    """

    first_row: int
    size_bytes: int
    digest: int

    @property
    def num_rows(self) -> int:
        """Number of its rows."""
        return -(-self.size_bytes // ROW_BYTES)

    @property
    def rows(self) -> range:
        """Its rows."""
        return range(self.first_row, self.first_row + self.num_rows)

    @property
    def is_possible(self) -> bool:
        """True if a record can be there; checked because a peer may have written anything."""
        return (
            0 < self.num_rows <= MAX_RECORD_ROWS
            and self.first_row >= NUM_BUCKETS
            and self.rows.stop <= NUM_ROWS
        )


class Sighting(NamedTuple):
    """The entries that a reader finds on a board under a name.

    Attributes:
        state: The state; None if the board has none.
        offered: Place of an offer's record; None without one.
        num_computed: Tokens of an unfinished prompt that may be read; 0 if the board has none.
        computed: Place of the record of these tokens; None without one.
    """

    state: State | None
    offered: RecordPlace | None = None
    num_computed: int = 0
    computed: RecordPlace | None = None


_RECORD_DECODER = msgspec.msgpack.Decoder(Record)
_STATES = {state.value: state for state in State}


def encode_record(record: Record) -> bytes:
    """Write a record for a board."""
    return msgspec.msgpack.encode(record)


def read_record(data: bytes, digest: int) -> Record | str | None:
    """Decode a record that was read from a board.

    Returns:
        The record; or an error message if it is malformed; or None if it changed while it was read.
    """
    if digest_of(data) != digest:
        return None
    try:
        return _RECORD_DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return f"what is offered there cannot be understood: {one_line(error)}"


def digest_of(data: bytes) -> int:
    """Return a record's digest for its entry."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def board_entry(engine_id: EngineId, name: str) -> Entry:
    """Return a shared name's bucket and digest on an engine's boards."""
    return entry_of("/".join((engine_id, name)), NUM_BUCKETS)


def look_up(rows: npt.NDArray[np.uint64], names: Sequence[int]) -> list[Sighting]:
    """Find shared names in their buckets.

    Args:
        rows: Words of each name's bucket; shape (names, `WORDS_PER_ROW`).
        names: Digest of each name.
    """
    wanted = np.array(names, dtype=np.uint64)
    entries = rows.reshape(len(names), -1, _WORDS_PER_ENTRY)
    found = (
        _entries_of(entries, each).tolist() for each in (wanted, wanted ^ np.uint64(_COMPUTED))
    )
    return [
        _sighting(first[_STATE:], second[_STATE:]) for first, second in zip(*found, strict=True)
    ]


def _entries_of(
    entries: npt.NDArray[np.uint64], names: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """Return the entry of each name in its bucket; zeros if it has none."""
    is_its = entries[:, :, _NAME] == names[:, None]
    found: npt.NDArray[np.uint64] = entries[np.arange(len(names)), is_its.argmax(axis=1)]
    found[~is_its.any(axis=1)] = 0
    return found


def _sighting(words: Sequence[int], computed_words: Sequence[int]) -> Sighting:
    state = _STATES.get(words[0])
    if state is State.OFFERED:
        return Sighting(state, _place(*words[1:]))
    if state is None or not state.is_computed:
        return Sighting(state)
    place = _place(*computed_words[1:])
    num_computed = computed_words[0] & 0x7FFFFFFF if place is not None else 0
    return Sighting(state, None, num_computed, place)


def _place(record: int, digest: int) -> RecordPlace | None:
    place = RecordPlace(record >> 32, record & 0xFFFFFFFF, digest)
    return place if place.is_possible else None


@dataclass(slots=True)
class _Shown:
    """The entries of a name on our board.

    Attributes:
        request_id: The producer's id of the request.
        state: Its state.
        span: Span of its offer's record; None without one.
        computed: Span of the record of what is computed so far; None without one.
    """

    request_id: RequestId
    state: State
    span: Span | None = None
    computed: Span | None = None


class Board:
    """The board of one worker. Belongs to the connector's thread.

    Each update arrives with a step and, unless it is lost, ahead of that as an announcement. The
    board shows the newest update of each name.

    Args:
        engine_id: The engine's id.
    """

    def __init__(self, engine_id: EngineId) -> None:
        self._engine_id = engine_id
        raw = np.zeros(NUM_ROWS * ROW_BYTES + ROW_BYTES, dtype=np.uint8)
        start = -raw.ctypes.data % ROW_BYTES
        self._rows = raw[start : start + NUM_ROWS * ROW_BYTES].view(np.uint64)
        self._rows = self._rows.reshape(NUM_ROWS, WORDS_PER_ROW)
        self._records = ArenaAllocator((NUM_ROWS - NUM_BUCKETS) * ROW_BYTES)
        self._shown: dict[str, _Shown] = {}
        # Shared names of offered requests, by the producer's request id.
        self._offered: dict[RequestId, str] = {}
        # Names of requests that will not be offered, oldest first.
        self._gone: dict[str, None] = {}
        # By name, the newest announced update that has not arrived with a step.
        self._ahead: dict[str, int] = {}
        self._num_told = 0

    @property
    def address(self) -> int:
        """Address of the first row, in host memory."""
        return int(self._rows.ctypes.data)

    @property
    def size_bytes(self) -> int:
        """Size of all rows."""
        return int(self._rows.nbytes)

    def announce(self, update: BoardUpdate) -> None:
        """Show an update that also arrives with a later step."""
        if update.number > self._num_told:
            self._ahead[update.name] = update.number
            self._show(update)

    def tell(self, updates: Sequence[BoardUpdate]) -> None:
        """Show a step's updates in order, except those older than an announced one."""
        for update in updates:
            if update.number > self._ahead.get(update.name, 0):
                self._show(update)
            self._num_told = max(self._num_told, update.number)
        if updates:
            self._ahead = {
                name: number for name, number in self._ahead.items() if number > self._num_told
            }

    def release(self, request_id: RequestId) -> None:
        """Remove an offered request that is no longer held; its name may soon be reused."""
        name = self._offered.pop(request_id, None)
        if name is not None:
            self._forget(name)

    def _show(self, update: BoardUpdate) -> None:
        if update.state is None:
            self._forget(update.name)
            return
        bucket, name = self._bucket_of(update.name)
        entry = _entry(bucket, name)
        if entry is None:
            return
        before = self._shown.get(update.name)
        shown = self._shown[update.name] = _Shown(update.request_id, update.state)
        if before is not None:
            self._offered.pop(before.request_id, None)
            self._free(before.span)
            shown.computed = before.computed
        is_anothers = before is not None and before.request_id != update.request_id
        if is_anothers or not update.state.is_computed:
            self._hide_computed(bucket, name, shown)
        self._gone.pop(update.name, None)
        entry[_RECORD] = 0
        if update.state is State.OFFERED:
            if (span := self._write(entry, update.record)) is None:
                shown.state = State.EMPTY
            shown.span = span
            self._offered[update.request_id] = update.name
        entry[_STATE] = shown.state
        entry[_NAME] = name
        if update.num_computed:
            self._show_computed(bucket, name, shown, update)
        if shown.state.fault is not None:
            self._gone[update.name] = None
            if len(self._gone) > MAX_GONE:
                self._forget(next(iter(self._gone)))

    def _show_computed(
        self, bucket: npt.NDArray[np.uint64], name: int, shown: _Shown, update: BoardUpdate
    ) -> None:
        """Show what is computed so far if there is room; readers can do without it."""
        self._free(shown.computed)
        shown.computed = None
        entry = _entry(bucket, name ^ _COMPUTED, _LEFT_FREE)
        if entry is None:
            return
        if len(update.record) > self._records.free_bytes - self._records.size_bytes // 2:
            # Half of the room is reserved for offers.
            entry[:] = 0
            return
        shown.computed = self._write(entry, update.record)
        entry[_STATE] = update.num_computed
        entry[_NAME] = name ^ _COMPUTED

    def _hide_computed(self, bucket: npt.NDArray[np.uint64], name: int, shown: _Shown) -> None:
        _take_down(bucket, name ^ _COMPUTED)
        self._free(shown.computed)
        shown.computed = None

    def _write(self, entry: npt.NDArray[np.uint64], record: bytes) -> Span | None:
        """Write a record; return None if it is empty or there is no room for it."""
        size_bytes = -(-len(record) // ROW_BYTES) * ROW_BYTES
        span = None
        if 0 < size_bytes <= MAX_RECORD_ROWS * ROW_BYTES:
            span = self._records.allocate(size_bytes, ROW_BYTES)
        if span is None:
            entry[_RECORD] = 0
            return None
        first_row = NUM_BUCKETS + span.start_bytes // ROW_BYTES
        rows = self._rows[first_row:].reshape(-1).view(np.uint8)
        rows[: len(record)] = np.frombuffer(record, dtype=np.uint8)
        entry[_RECORD] = (first_row << 32) | len(record)
        entry[_DIGEST] = digest_of(record)
        return span

    def _bucket_of(self, name: str) -> tuple[npt.NDArray[np.uint64], int]:
        """Return the entries of a name's bucket, and the name's digest."""
        bucket, wanted = board_entry(self._engine_id, name)
        entries: npt.NDArray[np.uint64] = self._rows[bucket].reshape(-1, _WORDS_PER_ENTRY)
        return entries, wanted

    def _forget(self, name: str) -> None:
        shown = self._shown.pop(name, None)
        if shown is None:
            return
        bucket, word = self._bucket_of(name)
        self._hide_computed(bucket, word, shown)
        _take_down(bucket, word)
        self._offered.pop(shown.request_id, None)
        self._free(shown.span)
        self._gone.pop(name, None)

    def _free(self, span: Span | None) -> None:
        if span is not None:
            self._records.free(span)


def _entry(
    bucket: npt.NDArray[np.uint64], word: int, num_left: int = 0
) -> npt.NDArray[np.uint64] | None:
    """Return a name's entry, or a free one if more than `num_left` are free; else None."""
    for looked_for, more_than in ((word, 0), (0, num_left)):
        places = np.flatnonzero(bucket[:, _NAME] == np.uint64(looked_for))
        if len(places) > more_than:
            found: npt.NDArray[np.uint64] = bucket[places[0]]
            return found
    return None


def _take_down(bucket: npt.NDArray[np.uint64], word: int) -> None:
    """Clear the entry of a name, if there is one."""
    bucket[bucket[:, _NAME] == np.uint64(word)] = 0

# SPDX-License-Identifier: Apache-2.0
"""What a producer says of requests that readers were sent to before their prompt was computed.

A reader that was sent a request at the same time as its producer knows no blocks, and not what the
producer calls the request. It knows a name that both have. So each worker of the producer keeps a
board in host memory, which readers look into as into the table of leases:

    KNOWN       the producer has the request
    LAST_CHUNK  the step that completes its prompt is computed: it needs no more blocks there
    OFFERED     it is held for readers; a record says under which id, and in which blocks
    ABORTED, EMPTY, AMBIGUOUS   it will not be offered, and why

Of a prompt that takes several steps, a second entry in the name's bucket tells how many tokens are
computed, and a record in which blocks. Builds that do not know of it do not find it.

The board binds nothing. What a record says is what routers pass on otherwise, and a reader believes
what it has read only once it has found the lease: see `leases`.

Board and records are rows of one size, so that a reader has one list of them. First the buckets of
a hash table, as in `leases`, then the rows that records lie in, each in adjoining ones. An entry is
four words:

    name      what stands for the shared name; 0 where the place is free
    state     a `State`
    record    of an offer, its first row, and its size in bytes; of a last chunk, how many tokens
              its step computes, of all requests
    digest    of the record: what was read while it was changed has another one

In the second entry the tokens stand in the place of the state. The name is written last where it is
new, and the state last where it is not: an entry says one state or the next until it is taken down.

Clients may choose names. What stands for one is made with the engine's id, which they are not told:
else they could choose some that fill a bucket.
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
"""16384 entries; with a thousand requests at once, no bucket is ever full."""

NUM_ROWS = NUM_BUCKETS + (1 << 13)
"""Rows of a board in all, 4.5 MiB: records for a million block ids."""

MAX_RECORD_ROWS = 1 << 10
"""Of one request, 130000 block ids: a reader has room for as many."""

MAX_GONE = 1 << 10
"""So many requests that will not be offered are told of, the last ones."""

_NAME, _STATE, _RECORD, _DIGEST = range(_WORDS_PER_ENTRY)

_COMPUTED = 0x9E3779B97F4A7C15
"""By which the name differs in the second entry."""

_LEFT_FREE = 4
"""So many places of a bucket are left to requests that would not be found without one."""


class State(IntEnum):
    """How far a producer has come with a request."""

    KNOWN = 1
    LAST_CHUNK = 2
    OFFERED = 3
    ABORTED = 4
    EMPTY = 5
    AMBIGUOUS = 6

    @property
    def fault(self) -> str | None:
        """Why the request will not be offered; None where it may be, or is."""
        return _FAULTS.get(self)

    @property
    def is_computed(self) -> bool:
        """Whether the request's prompt is still being computed."""
        return self in (State.KNOWN, State.LAST_CHUNK)


_FAULTS = {
    State.ABORTED: "its prefill was aborted",
    State.EMPTY: "its prefill has ended with nothing that can be read",
    State.AMBIGUOUS: "several requests have its name there: give each an X-Request-Id of its own",
}


class BoardUpdate(msgspec.Struct, frozen=True, array_like=True, tag="board_update"):
    """A request's state, on its way from a producer's scheduler to its workers.

    Attributes:
        number: Which of the scheduler's updates.
        name: The shared name.
        state: The state; None where the request is told of no more.
        request_id: What the producer calls it.
        record: What is offered, or what is computed so far, encoded; else empty.
        step_tokens: How many tokens the step computes that completes the prompt; 0 in other states.
        num_computed: How many tokens are computed so far, of which the record tells; else 0.
    """

    number: int
    name: str
    state: State | None
    request_id: RequestId = ""
    record: bytes = b""
    step_tokens: int = 0
    num_computed: int = 0


class Record(msgspec.Struct, frozen=True, array_like=True):
    """What is offered, or is computed so far, and where.

    Attributes:
        request_id: What the producer calls the request.
        num_tokens: How many of its tokens the blocks hold.
        block_ids: The blocks of each KV-cache group, as 32-bit words. Of what is computed so far,
            none of groups that do not keep all tokens.
        first_token: The token that was sampled behind these; None where it is not told.
        attempt: Which of its producer's attempts to compute a prompt. One that was preempted is
            begun anew with another one, and what was computed before may be there no more.
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
        """The record of some tokens in some blocks."""
        words = [np.array(each, "<u4").tobytes() for each in block_ids]
        return cls(request_id, num_tokens, words, first_token, attempt)

    def blocks(self) -> list[list[int]]:
        """The blocks of each KV-cache group."""
        whole = (each[: len(each) // 4 * 4] for each in self.block_ids)
        return [np.frombuffer(each, "<u4").tolist() for each in whole]


class RecordPlace(NamedTuple):
    """Where a record lies.

    Attributes:
        first_row: Where it begins.
        size_bytes: Its size.
        digest: What it must give.
    """

    first_row: int
    size_bytes: int
    digest: int

    @property
    def num_rows(self) -> int:
        """How many rows it takes."""
        return -(-self.size_bytes // ROW_BYTES)

    @property
    def rows(self) -> range:
        """These rows."""
        return range(self.first_row, self.first_row + self.num_rows)

    @property
    def is_possible(self) -> bool:
        """Whether a record can be there: a peer may have written anything."""
        return (
            0 < self.num_rows <= MAX_RECORD_ROWS
            and self.first_row >= NUM_BUCKETS
            and self.rows.stop <= NUM_ROWS
        )


class Sighting(NamedTuple):
    """What a reader finds on a board under a name.

    Attributes:
        state: The state; None where nothing is said.
        offered: Where the record of an offer is; None without one.
        step_tokens: How many tokens its last chunk's step computes; 0 in other states.
        num_computed: How many tokens of a prompt that is computed may be read; 0 where that is not
            said.
        computed: Where the record of these is.
    """

    state: State | None
    offered: RecordPlace | None = None
    step_tokens: int = 0
    num_computed: int = 0
    computed: RecordPlace | None = None


_RECORD_DECODER = msgspec.msgpack.Decoder(Record)
_STATES = {state.value: state for state in State}


def encode_record(record: Record) -> bytes:
    """Write a record for a board."""
    return msgspec.msgpack.encode(record)


def read_record(data: bytes, digest: int) -> Record | str | None:
    """A record as it was written.

    Returns:
        It; what is wrong with it; or None where it was changed while it was read.
    """
    if digest_of(data) != digest:
        return None
    try:
        return _RECORD_DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return f"what is offered there cannot be understood: {one_line(error)}"


def digest_of(data: bytes) -> int:
    """What a record's entry says of it."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def board_entry(engine_id: EngineId, name: str) -> Entry:
    """What stands for a shared name on an engine's boards."""
    return entry_of("/".join((engine_id, name)), NUM_BUCKETS)


def look_up(rows: npt.NDArray[np.uint64], names: Sequence[int]) -> list[Sighting]:
    """What buckets say of shared names.

    Args:
        rows: The words of a bucket for each name, shape (names, `WORDS_PER_ROW`).
        names: What stands for each.
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
    """The entry of each name in its bucket; zeros where there is none."""
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
    step_tokens = words[1] & 0x7FFFFFFF if state is State.LAST_CHUNK else 0
    place = _place(*computed_words[1:])
    num_computed = computed_words[0] & 0x7FFFFFFF if place is not None else 0
    return Sighting(state, None, step_tokens, num_computed, place)


def _place(record: int, digest: int) -> RecordPlace | None:
    place = RecordPlace(record >> 32, record & 0xFFFFFFFF, digest)
    return place if place.is_possible else None


@dataclass(slots=True)
class _Shown:
    """What stands under a name.

    Attributes:
        request_id: What the producer calls the request.
        state: Its state.
        span: Where its record lies, if it has one.
        computed: Where the record lies of what is computed so far, if there is one.
    """

    request_id: RequestId
    state: State
    span: Span | None = None
    computed: Span | None = None


class Board:
    """The board of one worker. Belongs to the connector's thread.

    Updates come twice: announced, perhaps, and with a step, surely. The announced ones are ahead
    of steps, or lost; each name keeps the newest that was said of it.

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
        # Shared names by what the producer calls the requests that are offered.
        self._offered: dict[RequestId, str] = {}
        # Those that will not be, the oldest first.
        self._gone: dict[str, None] = {}
        # The newest update of each name that was announced and that no step has told of.
        self._ahead: dict[str, int] = {}
        self._num_told = 0

    @property
    def address(self) -> int:
        """Of the first row, in host memory."""
        return int(self._rows.ctypes.data)

    @property
    def size_bytes(self) -> int:
        """Size of all rows."""
        return int(self._rows.nbytes)

    def announce(self, update: BoardUpdate) -> None:
        """Show what a later step tells as well."""
        if update.number > self._num_told:
            self._ahead[update.name] = update.number
            self._show(update)

    def tell(self, updates: Sequence[BoardUpdate]) -> None:
        """Show what a step tells, in order, as far as it is news."""
        for update in updates:
            if update.number > self._ahead.get(update.name, 0):
                self._show(update)
            self._num_told = max(self._num_told, update.number)
        if updates:
            self._ahead = {
                name: number for name, number in self._ahead.items() if number > self._num_told
            }

    def release(self, request_id: RequestId) -> None:
        """A request that was offered is held no more: its name may be another's soon."""
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
        entry[_RECORD] = update.step_tokens
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
        """Say what is computed so far, where there is room: readers can do without."""
        self._free(shown.computed)
        shown.computed = None
        entry = _entry(bucket, name ^ _COMPUTED, _LEFT_FREE)
        if entry is None:
            return
        if len(update.record) > self._records.free_bytes - self._records.size_bytes // 2:
            # Half of the room is for offers.
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
        """Write a record; None where there is no room for it, or nothing to read."""
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
        """The entries of a name's bucket, and what stands for it there."""
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
    """The entry of a name, or a free one, where more than `num_left` are; None without one."""
    for looked_for, more_than in ((word, 0), (0, num_left)):
        places = np.flatnonzero(bucket[:, _NAME] == np.uint64(looked_for))
        if len(places) > more_than:
            found: npt.NDArray[np.uint64] = bucket[places[0]]
            return found
    return None


def _take_down(bucket: npt.NDArray[np.uint64], word: int) -> None:
    """Empty the entry of a name, if there is one."""
    bucket[bucket[:, _NAME] == np.uint64(word)] = 0

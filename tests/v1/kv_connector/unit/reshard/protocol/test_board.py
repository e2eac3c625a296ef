# SPDX-License-Identifier: Apache-2.0
"""Boards: what is written is what readers find, however it came."""

from __future__ import annotations

import itertools
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.v1.kv_connector.unit.reshard.protocol.board_rows import rows_of
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.arena import ArenaAllocator
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol import board as board_module
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.board import (
    MAX_RECORD_ROWS,
    NUM_BUCKETS,
    NUM_ROWS,
    ROW_BYTES,
    Board,
    BoardUpdate,
    Record,
    RecordPlace,
    Sighting,
    State,
    board_entry,
    encode_record,
    look_up,
    read_record,
)

ENGINE = "prefill"
NAMES = [f"cmpl-{number}" for number in range(5)]


def open_board() -> tuple[Board, ArenaAllocator]:
    """A board, and what gives its records room."""
    records: list[ArenaAllocator] = []

    def allocator(size_bytes: int) -> ArenaAllocator:
        records.append(ArenaAllocator(size_bytes))
        return records[-1]

    with mock.patch.object(board_module, "ArenaAllocator", allocator):
        board = Board(ENGINE)
    return board, *records


def sighting(board: Board, name: str) -> Sighting:
    """What a reader finds under a name."""
    entry = board_entry(ENGINE, name)
    (found,) = look_up(rows_of(board)[[entry.bucket]], [entry.name])
    return found


def record_of(board: Board, name: str) -> Record | None:
    """The record that a reader finds, if there is one."""
    return record_at(board, sighting(board, name).offered)


def record_at(board: Board, place: RecordPlace | None) -> Record | None:
    """The record at a place, if there is one."""
    if place is None:
        return None
    rows = rows_of(board)[list(place.rows)]
    return read_record(rows.tobytes()[: place.size_bytes], place.digest)


def test_record_says_what_is_offered():
    """Byte by byte, also where it takes several rows and groups differ."""
    board = Board(ENGINE)
    blocks = [[5, 2, 9], [], list(range(1000, 1500))]
    record = Record.of("cmpl-x-0-aaaaaaaa", 40, blocks)
    board.tell([BoardUpdate(1, "x", State.OFFERED, record.request_id, encode_record(record))])
    found = record_of(board, "x")
    assert found == record and found.blocks() == blocks
    place = sighting(board, "x").offered
    assert place is not None and place.num_rows > 1
    assert sighting(board, "y") == Sighting(None)


def computed(number: int, num_tokens: int, request_id: str = "a", name: str = "x") -> BoardUpdate:
    """A update of what is computed of a prompt."""
    record = encode_record(Record.of(request_id, num_tokens, [[*range(num_tokens)]]))
    return BoardUpdate(number, name, State.KNOWN, request_id, record, num_computed=num_tokens)


def test_readers_find_what_is_computed_so_far():
    """It stays beside the state until the prompt is through, and is another record each time."""
    board, records = open_board()
    board.tell([BoardUpdate(1, "x", State.KNOWN, "a")])
    assert sighting(board, "x") == Sighting(State.KNOWN)
    for number, num_tokens in ((2, 16), (3, 400)):
        board.tell([computed(number, num_tokens)])
        found = sighting(board, "x")
        assert (found.state, found.num_computed) == (State.KNOWN, num_tokens)
        record = record_at(board, found.computed)
        assert record is not None and record.blocks() == [[*range(num_tokens)]]
    board.tell([BoardUpdate(4, "x", State.LAST_CHUNK, "a")])
    found = sighting(board, "x")
    assert (found.state, found.num_computed) == (State.LAST_CHUNK, 400)
    board.tell([BoardUpdate(5, "x", State.OFFERED, "a", encode_record(Record.of("a", 4, [[1]])))])
    found = sighting(board, "x")
    assert found.offered is not None and not found.num_computed and found.computed is None
    board.release("a")
    assert records.free_bytes == records.size_bytes
    assert not rows_of(board)[:NUM_BUCKETS].any()


def test_what_is_computed_is_no_other_requests():
    """A name that is another request's says nothing of the one before."""
    board = Board(ENGINE)
    board.tell([computed(1, 16), BoardUpdate(2, "x", State.KNOWN, "b")])
    assert sighting(board, "x") == Sighting(State.KNOWN)


def test_what_is_computed_takes_no_place_that_a_request_needs(monkeypatch):
    """A request without an entry would not be found, where readers can do without this one."""
    board = Board(ENGINE)
    monkeypatch.setattr(board_module, "board_entry", lambda _, name: (0, 1 + NAMES.index(name)))
    monkeypatch.setattr(board_module, "_LEFT_FREE", 12)
    board.tell([BoardUpdate(n + 1, name, State.KNOWN, name) for n, name in enumerate(NAMES)])
    board.tell([computed(9, 16, name=NAMES[0], request_id=NAMES[0])])
    entries = rows_of(board)[0].reshape(-1, 4)
    assert np.count_nonzero(entries[:, 0]) == len(NAMES)


def test_half_of_the_room_is_for_offers():
    """One without room for its record fails, where what is computed so far can be done without."""
    board, records = open_board()
    long = [list(range(100_000))]
    names = [f"x{number}" for number in range(30)]
    for number, name in enumerate(names):
        record = encode_record(Record.of(name, 1 << 20, long))
        board.tell([BoardUpdate(number + 1, name, State.KNOWN, name, record, num_computed=1 << 20)])
    told = [name for name in names if sighting(board, name).num_computed]
    assert 0 < len(told) < len(names)
    assert records.free_bytes >= records.size_bytes // 2
    for number, name in enumerate(names[:4]):
        record = encode_record(Record.of(name, 1 << 20, long))
        board.tell([BoardUpdate(100 + number, name, State.OFFERED, name, record)])
        assert sighting(board, name).state is State.OFFERED


def test_builds_that_know_nothing_of_it_are_not_misled():
    """They look for the name alone, and find what it always said."""
    board = Board(ENGINE)
    board.tell([BoardUpdate(1, "x", State.LAST_CHUNK, "a"), computed(2, 16)])
    bucket, name = board_entry(ENGINE, "x")
    entries = rows_of(board)[bucket].reshape(-1, 4)
    (words,) = entries[entries[:, 0] == np.uint64(name)].tolist()
    assert words == [name, State.KNOWN, 0, 0]


def test_buckets_cannot_be_told_from_names():
    """Who wants to fill one has to know the engine's id."""
    names = [f"x{number}" for number in range(1000)]
    entries = [{board_entry(engine, name) for name in names} for engine in (ENGINE, "another")]
    assert not entries[0] & entries[1]


def test_entry_is_there_while_it_goes_from_state_to_state(monkeypatch):
    """A reader that looks at any moment finds the one or the next."""
    bucket, name = board_entry(ENGINE, "x")
    zeros, seen = np.zeros, []

    class Watched(np.ndarray):
        """Memory that a reader looks at whenever a word was written."""

        def __setitem__(self, key, value):
            super().__setitem__(key, value)
            (found,) = look_up(rows_of(board)[[bucket]], [name])
            seen.append(found.state)

    with monkeypatch.context() as patch:
        patch.setattr(np, "zeros", lambda *args, **kwargs: zeros(*args, **kwargs).view(Watched))
        board = Board(ENGINE)
    for number, state in enumerate((State.KNOWN, State.LAST_CHUNK, State.OFFERED, State.KNOWN)):
        record = encode_record(Record.of("a", 4, [[1]])) if state is State.OFFERED else b""
        board.tell([BoardUpdate(number + 1, "x", state, "a", record)])
    states = [state for state, _ in itertools.groupby(seen)]
    assert states == [None, State.KNOWN, State.LAST_CHUNK, State.OFFERED, State.KNOWN]


def test_board_is_aligned():
    """No entry crosses a cache line."""
    assert Board(ENGINE).address % ROW_BYTES == 0


def test_release_takes_an_offer_down():
    """Its rows are another's, and its name, too; another request under that name stays."""
    board = Board(ENGINE)
    board.tell([BoardUpdate(1, "x", State.OFFERED, "a", encode_record(Record.of("a", 4, [[1]])))])
    board.release("b")
    assert record_of(board, "x") is not None
    board.release("a")
    assert sighting(board, "x").state is None
    board.tell([BoardUpdate(2, "x", State.KNOWN, "b")])
    board.release("a")
    assert sighting(board, "x").state is State.KNOWN


def test_what_is_too_long_to_be_named_is_empty():
    """A reader has room for so many rows and no more."""
    board = Board(ENGINE)
    blocks = [list(range(MAX_RECORD_ROWS * ROW_BYTES // 4))]
    long = encode_record(Record.of("a", 1 << 20, blocks))
    board.tell([BoardUpdate(1, "x", State.OFFERED, "a", long)])
    assert sighting(board, "x").state is State.EMPTY


def test_only_the_last_that_are_gone_are_told_of(monkeypatch):
    """Or a board would fill up."""
    monkeypatch.setattr(board_module, "MAX_GONE", 2)
    board = Board(ENGINE)
    board.tell([BoardUpdate(n + 1, name, State.ABORTED, name) for n, name in enumerate(NAMES)])
    states = [sighting(board, name).state for name in NAMES]
    assert states == [None, None, None, State.ABORTED, State.ABORTED]


def test_announcement_is_ahead_of_its_step_and_never_behind():
    """What a step has told is not taken back by what was announced before."""
    board = Board(ENGINE)
    begun, offered = (
        BoardUpdate(2, "x", State.LAST_CHUNK, "a"),
        BoardUpdate(3, "x", State.OFFERED, "a", encode_record(Record.of("a", 4, [[1]]))),
    )
    board.announce(offered)
    board.tell([BoardUpdate(1, "x", State.KNOWN, "a"), begun])
    assert sighting(board, "x").state is State.OFFERED
    board.tell([offered])
    board.release("a")
    board.announce(offered)
    assert sighting(board, "x").state is None


@pytest.mark.parametrize(
    "place",
    [
        (0, 8),
        (NUM_ROWS, 8),
        (NUM_ROWS - 1, 2 * ROW_BYTES),
        (NUM_BUCKETS, 1 << 31),
        (NUM_BUCKETS, 0),
    ],
)
def test_record_that_cannot_be_is_none(place):
    """A peer may have written anything: no row outside of the board is read."""
    assert not RecordPlace(*place, digest=0).is_possible


@given(st.binary(max_size=64), st.integers(0, (1 << 64) - 1))
def test_bytes_that_are_no_record(data, digest):
    """Nothing is raised over what another engine has written."""
    assert read_record(data, digest) is None
    found = read_record(data, board_module.digest_of(data))
    assert isinstance(found, Record) or "cannot be understood" in found


STATES = st.sampled_from([*State, None])


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_readers_find_what_was_said_last(data):
    """Announcements are lost, early or late; steps tell everything, in order, in any pieces."""
    (board, records), now = open_board(), {}
    updates = []
    for number in range(1, data.draw(st.integers(1, 30)) + 1):
        name, state = data.draw(st.sampled_from(NAMES)), data.draw(STATES)
        record, num_computed = b"", 0
        is_computed = state is not None and state.is_computed and data.draw(st.booleans())
        if state is State.OFFERED or is_computed:
            blocks = [data.draw(st.lists(st.integers(0, 99), max_size=300))]
            record = encode_record(Record.of(f"r{number}", number, blocks))
            num_computed = number if is_computed else 0
        updates.append(
            BoardUpdate(number, name, state, f"r{number}", record, num_computed=num_computed)
        )
        now[name] = updates[-1]
    announced = told = 0
    while told < len(updates):
        if announced < len(updates) and data.draw(st.booleans()):
            if data.draw(st.booleans()):
                board.announce(updates[announced])
            announced += 1
            continue
        upto = data.draw(st.integers(told + 1, len(updates)))
        board.tell(updates[told:upto])
        told = upto
    for late in updates[announced:]:
        board.announce(late)
    for name, update in now.items():
        assert sighting(board, name).state is update.state
        found = sighting(board, name)
        assert found.num_computed == update.num_computed
        if update.record:
            record = record_at(board, found.computed if found.num_computed else found.offered)
            assert record is not None and encode_record(record) == update.record
        board.tell([BoardUpdate(1000 + NAMES.index(name), name, None)])
    assert records.free_bytes == records.size_bytes
    assert not rows_of(board)[:NUM_BUCKETS].any()

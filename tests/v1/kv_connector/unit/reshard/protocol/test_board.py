# SPDX-License-Identifier: Apache-2.0
"""Boards: what is written is what readers find, however it came."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol import board as board_module
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.board import (
    MAX_RECORD_ROWS,
    NUM_BUCKETS,
    NUM_ROWS,
    ROW_BYTES,
    WORDS_PER_ROW,
    Board,
    Posting,
    Record,
    Sighting,
    State,
    board_entry,
    encode_record,
    look_up,
    read_record,
)

ENGINE = "prefill"
NAMES = [f"cmpl-{number}" for number in range(5)]


def rows_of(board: Board) -> np.ndarray:
    """A board's memory, as a reader would read it."""
    data = ctypes.string_at(board.address, board.size_bytes)
    return np.frombuffer(data, np.uint64).reshape(NUM_ROWS, WORDS_PER_ROW)


def sighting(board: Board, name: str) -> Sighting:
    """What a reader finds under a name."""
    entry = board_entry(ENGINE, name)
    (found,) = look_up(rows_of(board)[[entry.bucket]], [entry.name])
    return found


def record_of(board: Board, name: str) -> Record | None:
    """The record that a reader finds, if there is one."""
    found = sighting(board, name)
    if not found.has_record:
        return None
    rows = rows_of(board)[found.first_row : found.first_row + found.num_rows]
    return read_record(rows.tobytes()[: found.size_bytes], found.digest)


def test_record_says_what_is_offered():
    """Byte by byte, also where it takes several rows and groups differ."""
    board = Board(ENGINE)
    blocks = [[5, 2, 9], [], list(range(1000, 1500))]
    record = Record.of("cmpl-x-0-aaaaaaaa", 40, blocks)
    board.tell([Posting(1, "x", State.OFFERED, record.request_id, encode_record(record))])
    found = record_of(board, "x")
    assert found == record and found.blocks() == blocks
    assert sighting(board, "x").num_rows > 1
    assert sighting(board, "y") == Sighting(None)


def test_step_that_completes_a_prompt_says_how_long_it_is():
    """Readers look when it should be over."""
    board = Board(ENGINE)
    board.tell([Posting(1, "x", State.LAST_CHUNK, "a", step_tokens=8192)])
    assert sighting(board, "x") == Sighting(State.LAST_CHUNK, step_tokens=8192)


def test_buckets_cannot_be_told_from_names():
    """Who wants to fill one has to know the engine's id."""
    names = [f"x{number}" for number in range(1000)]
    entries = [{board_entry(engine, name) for name in names} for engine in (ENGINE, "another")]
    assert not entries[0] & entries[1]


def test_entry_is_there_while_it_goes_from_state_to_state(monkeypatch):
    """A reader that looks at any moment finds the one or the next."""
    board, seen = Board(ENGINE), []
    bucket, name = board_entry(ENGINE, "x")
    kept = board._rows

    class Watched(np.ndarray):
        """Rows that a reader looks at whenever a word was written."""

        def __setitem__(self, key, value):
            super().__setitem__(key, value)
            (found,) = look_up(np.asarray(kept)[[bucket]], [name])
            seen.append(found.state)

    board._rows = kept.view(Watched)
    for number, state in enumerate((State.KNOWN, State.LAST_CHUNK, State.OFFERED, State.KNOWN)):
        record = encode_record(Record.of("a", 4, [[1]])) if state is State.OFFERED else b""
        board.tell([Posting(number + 1, "x", state, "a", record)])
    states = [state for state, _ in itertools.groupby(seen)]
    assert states == [None, State.KNOWN, State.LAST_CHUNK, State.OFFERED, State.KNOWN]


def test_board_is_aligned():
    """No entry crosses a cache line."""
    assert Board(ENGINE).address % ROW_BYTES == 0


def test_release_takes_an_offer_down():
    """Its rows are another's, and its name, too; another request under that name stays."""
    board = Board(ENGINE)
    board.tell([Posting(1, "x", State.OFFERED, "a", encode_record(Record.of("a", 4, [[1]])))])
    board.release("b")
    assert record_of(board, "x") is not None
    board.release("a")
    assert sighting(board, "x").state is None
    board.tell([Posting(2, "x", State.KNOWN, "b")])
    board.release("a")
    assert sighting(board, "x").state is State.KNOWN


def test_what_is_too_long_to_be_named_is_empty():
    """A reader has room for so many rows and no more."""
    board = Board(ENGINE)
    blocks = [list(range(MAX_RECORD_ROWS * ROW_BYTES // 4))]
    long = encode_record(Record.of("a", 1 << 20, blocks))
    board.tell([Posting(1, "x", State.OFFERED, "a", long)])
    assert sighting(board, "x").state is State.EMPTY


def test_only_the_last_that_are_gone_are_told_of(monkeypatch):
    """Or a board would fill up."""
    monkeypatch.setattr(board_module, "MAX_GONE", 2)
    board = Board(ENGINE)
    board.tell([Posting(n + 1, name, State.ABORTED, name) for n, name in enumerate(NAMES)])
    states = [sighting(board, name).state for name in NAMES]
    assert states == [None, None, None, State.ABORTED, State.ABORTED]


def test_announcement_is_ahead_of_its_step_and_never_behind():
    """What a step has told is not taken back by what was announced before."""
    board = Board(ENGINE)
    begun, offered = (
        Posting(2, "x", State.LAST_CHUNK, "a", step_tokens=4),
        Posting(3, "x", State.OFFERED, "a", encode_record(Record.of("a", 4, [[1]]))),
    )
    board.announce(offered)
    board.tell([Posting(1, "x", State.KNOWN, "a"), begun])
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
    assert not Sighting(State.OFFERED, *place).has_record


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
    board, now = Board(ENGINE), {}
    postings = []
    for number in range(1, data.draw(st.integers(1, 30)) + 1):
        name, state = data.draw(st.sampled_from(NAMES)), data.draw(STATES)
        record = b""
        if state is State.OFFERED:
            blocks = [data.draw(st.lists(st.integers(0, 99), max_size=300))]
            record = encode_record(Record.of(f"r{number}", number, blocks))
        postings.append(Posting(number, name, state, f"r{number}", record))
        now[name] = postings[-1]
    announced = told = 0
    while told < len(postings):
        if announced < len(postings) and data.draw(st.booleans()):
            if data.draw(st.booleans()):
                board.announce(postings[announced])
            announced += 1
            continue
        upto = data.draw(st.integers(told + 1, len(postings)))
        board.tell(postings[told:upto])
        told = upto
    for late in postings[announced:]:
        board.announce(late)
    for name, posting in now.items():
        assert sighting(board, name).state is posting.state
        if posting.state is State.OFFERED:
            found = record_of(board, name)
            assert found is not None and encode_record(found) == posting.record
        board.tell([Posting(1000 + NAMES.index(name), name, None)])
    assert board._records.free_bytes == board._records.size_bytes
    assert not rows_of(board)[:NUM_BUCKETS].any()

# SPDX-License-Identifier: Apache-2.0
"""Windows that a holder packs, over all that readers may ask for, return, repeat and forget."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import RemoteLayoutError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.packing import PACK_UNIT_BYTES
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol import packing
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import Pack, PackEntry
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.packing import (
    _RETURNED_WITHIN_S,
    MOST_ASKED,
    NUM_ROWS,
    Packer,
    Packing,
    entered,
    key_of,
)

UNITS = 8
"""Of the arena."""

NAMES = [bytes([each]) * 16 for each in range(4)]
TICKETS = st.integers(0, 9)


def entry(ticket: int, units: int) -> PackEntry:
    """A window of so many units, which stand in its blocks."""
    return PackEntry(ticket, "r", 1, 2, 3, 0, 1, 0, 4, False, b"\0\0", bytes([units, 0, 0, 0]))


def gather_of(asked: PackEntry) -> SimpleNamespace:
    """What an entry asks for; of none of 0 units, and none that it may have of 9."""
    units = asked.block_ids[0]
    if units > UNITS:
        raise RemoteLayoutError("there is no such window")
    return SimpleNamespace(size_bytes=units * PACK_UNIT_BYTES - 1) if units else None


class Readers(RuleBasedStateMachine):
    """A packer, its readers, and all windows that have room."""

    def __init__(self) -> None:
        super().__init__()
        self.packer = Packer(UNITS * PACK_UNIT_BYTES)
        self.now_s = 0.0
        # Being gathered, and in the table.
        self.copying: list[Packing] = []
        self.shown: list[Packing] = []

    @property
    def with_room(self) -> list[Packing]:
        """Windows whose room is nobody else's."""
        return self.copying + [each for each in self.shown if each.row is not None]

    @rule(
        name=st.sampled_from(NAMES),
        asked=st.lists(st.tuples(TICKETS, st.integers(0, UNITS + 1)), max_size=3),
        returned=st.lists(TICKETS, max_size=3),
    )
    def hear(self, name, asked, returned):
        """A reader asks and returns, perhaps for the second time, or what it never asked for."""
        pack = Pack(name, [entry(*each) for each in asked], returned)
        self.packer.hear(pack, self.now_s)
        for each in self.copying:
            if each.reader == name and each.ticket in returned:
                assert each.is_over
        for each in self.shown:
            if each.reader == name and each.ticket in returned:
                assert each.row is None

    @rule()
    def pack(self):
        """The next window is given room."""
        before = self.with_room
        others = {each.reader for each in before}
        try:
            following = self.packer.next(gather_of)
        except RemoteLayoutError:
            return
        if following is None:
            return
        held = [each for each in before if each.reader == following.reader]
        room_bytes = sum(each.span.size_bytes for each in [*held, following])
        # All who have room are served, and perhaps others who wait.
        most_bytes = UNITS * PACK_UNIT_BYTES // len({*others, following.reader})
        assert not held or room_bytes <= most_bytes
        self.copying.append(following)

    @precondition(lambda self: self.copying)
    @rule(fails=st.booleans())
    def copied(self, fails):
        """A window is gathered, or cannot be."""
        first = self.copying.pop(0)
        if fails:
            self.packer.end(first)
        else:
            self.packer.enter(first, self.now_s)
            assert (first.row is None) == first.is_over
            self.shown.append(first)

    @rule(for_s=st.sampled_from([0.0, 0.1, 0.6, 1.1]))
    def wait(self, for_s):
        """Time passes."""
        self.now_s += for_s
        self.packer.expire(self.now_s)
        for each in self.shown:
            assert each.row is None or self.now_s < each.since_s + _RETURNED_WITHIN_S

    @invariant()
    def rooms_are_apart(self):
        """No byte is in two windows that may be written or read."""
        spans = sorted((each.span.start_bytes, each.span.stop_bytes) for each in self.with_room)
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
        assert all(start >= 0 and stop <= UNITS * PACK_UNIT_BYTES for start, stop in spans)

    @invariant()
    def table_shows_what_is_packed(self):
        """Each window where it is, and no other."""
        found = entered(self.packer.table.words)
        shown = {
            key_of(each.reader, each.ticket): each.span.start_bytes // PACK_UNIT_BYTES
            for each in self.shown
            if each.row is not None
        }
        assert {key: each.place for key, each in found.items()} == shown
        assert len({each.number for each in found.values()}) == len(found)

    def teardown(self):
        """Without another word from readers, all of it ends."""
        while self.copying:
            self.copied(fails=False)
        self.wait(_RETURNED_WITHIN_S)
        self.packer.expire(self.now_s)
        assert not len(self.packer) and not entered(self.packer.table.words)
        self.packer.hear(Pack(NAMES[0], [entry(0, UNITS)], []), self.now_s)
        assert self.packer.next(gather_of) is not None, "some of its arena is lost"


TestReaders = Readers.TestCase
TestReaders.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.fixture
def packer() -> Packer:
    """A packer of a small arena."""
    return Packer(UNITS * PACK_UNIT_BYTES)


def ask(packer: Packer, name: bytes, tickets: range, units: int = 1) -> None:
    """A reader asks for windows, one a message."""
    for ticket in tickets:
        packer.hear(Pack(name, [entry(ticket, units)], []), 0.0)


def pack_all(packer: Packer) -> list[Packing]:
    """Give room to all windows that may have it."""
    packed = []
    while (following := packer.next(gather_of)) is not None:
        packed.append(following)
    return packed


def test_readers_take_turns_and_have_equal_shares(packer):
    """However much the first has asked for; and one window each, whatever its size."""
    ask(packer, NAMES[0], range(20))
    ask(packer, NAMES[1], range(20))
    packed = pack_all(packer)
    assert [each.reader for each in packed] == 4 * [NAMES[0], NAMES[1]]
    for each in packed[1:]:
        packer.end(each)
    ask(packer, NAMES[2], range(3), units=UNITS - 1)
    assert [each.reader for each in pack_all(packer)].count(NAMES[2]) <= 1


def test_large_window_of_a_reader_that_has_none_may_exceed_its_share(packer):
    """Or it would never be packed."""
    ask(packer, NAMES[0], range(1))
    ask(packer, NAMES[1], range(2), units=UNITS - 1)
    assert [each.reader for each in pack_all(packer)] == NAMES[:2]


def test_no_more_windows_wait_than_a_reader_may_ask_for(packer):
    """What is beyond that is not heard."""
    ask(packer, NAMES[0], range(MOST_ASKED + 5))
    tickets = []
    while packed := pack_all(packer):
        tickets += [each.ticket for each in packed]
        for each in packed:
            packer.end(each)
    assert tickets == list(range(MOST_ASKED)) and not len(packer)


def test_no_more_readers_are_served_than_there_may_be(packer, monkeypatch):
    """Until one of them has ended."""
    monkeypatch.setattr(packing, "_MOST_READERS", 2)
    for name in NAMES[:3]:
        ask(packer, name, range(1))
    packed = pack_all(packer)
    assert [each.reader for each in packed] == NAMES[:2]
    packer.end(packed[0])
    ask(packer, NAMES[2], range(1))
    assert [each.reader for each in pack_all(packer)] == [NAMES[2]]


def test_no_more_windows_are_packed_than_the_table_has_rows():
    """In a large arena of small windows."""
    packer = Packer(2 * NUM_ROWS * PACK_UNIT_BYTES)
    for name in NAMES[:2]:
        ask(packer, name, range(NUM_ROWS))
    packed = pack_all(packer)
    assert len(packed) == NUM_ROWS
    for each in packed:
        packer.enter(each, 0.0)
    assert len(entered(packer.table.words)) == NUM_ROWS


def test_return_of_what_nobody_asked_for_makes_no_reader(packer):
    """Nothing is kept for whoever says nothing else."""
    packer.hear(Pack(NAMES[0], [], [1, 2]), 0.0)
    assert not len(packer)

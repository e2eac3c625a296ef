# SPDX-License-Identifier: Apache-2.0
"""Windows that a reader asks another worker for, with a table that the test writes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tests.v1.kv_connector.unit.reshard.transport.rows import Agent
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.leg import Selection
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.packing import PackedLeg, Slice
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.staging import Window
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.fingerprint import (
    OfferFingerprint,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    Pack,
    decode_notification,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.packing import (
    TABLE_BYTES,
    PackTable,
    key_of,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import (
    Prepared,
    Transfer,
    TransferState,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.lease_check import RowBuffer
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.packed_windows import (
    _LOOK_HANGS_S,
    PACKED_WITHIN_S,
    Claim,
    PackedWindow,
    PackedWindows,
    PackState,
)

TABLE, ARENA, LOCAL = Prepared("peer", "table"), Prepared("peer", "arena"), Prepared(None, "local")
CLAIM = Claim("r", OfferFingerprint(8, 1, 2))
LEG = PackedLeg(Slice(0, 1, 4, token_major=False), np.array([3, 5]), np.zeros(2, np.int64))
WINDOW = Window(Selection(SimpleNamespace(src_blocks=np.array([7, 9])), np.array([0, 1])), 64)


class Holder:
    """A worker that packs when the test says so, and what its table is read with."""

    def __init__(self) -> None:
        self.table = PackTable()
        self.heard: list[Pack] = []
        self.state = TransferState.DONE
        self.num_posted = self.num_released = 0
        buffer = RowBuffer(Agent(), 2, TABLE_BYTES // 8)
        self._buffer = buffer
        self.windows = PackedWindows(buffer, self, TABLE, ARENA, LOCAL, self._hear)

    def read(self, local, local_indices, remote, remote_indices) -> Transfer:
        """Read the table, as it is now."""
        self.num_posted += 1
        self._buffer.rows[local_indices] = self.table.words.ravel()
        return Transfer(remote.peer, None)

    def poll(self, transfer) -> TransferState:
        """Look at a read."""
        return self.state

    def release(self, transfer) -> None:
        """Give it back."""
        self.num_released += 1

    def ask(self, now_s: float = 0.0) -> PackedWindow:
        """Ask for a window, and tell the holder."""
        asked = self.windows.ask(CLAIM, LEG, WINDOW, now_s)
        self.windows.send(now_s)
        return asked

    def turn(self, now_s: float = 0.0) -> None:
        """A poll of the reader's."""
        self.windows.look(now_s)
        self.windows.send(now_s)

    def pack(self, place: int) -> int:
        """Enter the window that was asked for last; return its row."""
        return self.table.enter(
            key_of(self.heard[-1].reader, self.heard[-1].asked[0].ticket), place
        )

    def _hear(self, message: bytes) -> None:
        pack = decode_notification(message)
        assert isinstance(pack, Pack)
        self.heard.append(pack)


@pytest.fixture
def holder() -> Holder:
    """A worker that packs."""
    return Holder()


def test_window_counts_once_it_is_seen_after_it_was_read(holder):
    """And not by a look that was posted before."""
    asked = holder.ask()
    assert np.frombuffer(holder.heard[0].asked[0].planes, "<u2").tolist() == [3, 5]
    holder.pack(6)
    holder.turn()
    assert asked.state is PackState.ASKED
    holder.turn()
    assert asked.state is PackState.PACKED
    asked.state = PackState.READ
    holder.turn()
    assert asked.state is PackState.READ
    holder.turn()
    assert asked.state is PackState.CONFIRMED


def test_window_whose_room_was_used_again_is_lost(holder):
    """Its row is gone, or it is another one's."""
    asked = holder.ask()
    row = holder.pack(6)
    holder.turn()
    holder.turn()
    asked.state = PackState.READ
    holder.table.remove(row)
    holder.table.enter(key_of(b"somebody else's.", 0), 6)
    holder.turn()
    holder.turn()
    assert asked.state is PackState.LOST


def test_window_that_was_packed_twice_at_one_place_is_lost(holder):
    """As it may have been another one's in between: messages may come twice."""
    asked = holder.ask()
    row = holder.pack(6)
    holder.turn()
    holder.turn()
    asked.state = PackState.READ
    holder.table.remove(row)
    holder.pack(6)
    holder.turn()
    holder.turn()
    assert asked.state is PackState.LOST


def test_window_that_is_not_packed_in_time_is_lost(holder):
    """And nothing more is asked of its worker for a while."""
    asked = holder.ask()
    holder.turn(PACKED_WITHIN_S)
    assert asked.state is PackState.LOST and not holder.windows.serves(PACKED_WITHIN_S)
    holder.windows.give_back(asked)
    holder.turn(PACKED_WITHIN_S)
    assert holder.heard[-1].returned == [asked.ticket]


def test_window_is_waited_for_while_others_are_packed(holder):
    """Its worker has many readers, and is at this one's windows: direct would be slower."""
    first = holder.ask()
    holder.pack(6)
    second = holder.ask()
    holder.turn(PACKED_WITHIN_S / 2)
    holder.turn(PACKED_WITHIN_S)
    assert first.state is PackState.PACKED and second.state is PackState.ASKED
    holder.turn(PACKED_WITHIN_S * 1.25)
    assert second.state is PackState.ASKED and holder.windows.serves(PACKED_WITHIN_S * 1.25)
    holder.turn(PACKED_WITHIN_S * 2)
    assert second.state is PackState.LOST


def test_look_that_hangs_is_polled_until_it_ends(holder):
    """What was asked for is read direct; the lane of the look can be closed once it ends."""
    asked = holder.ask()
    holder.state = TransferState.IN_FLIGHT
    holder.turn(_LOOK_HANGS_S)
    assert asked.state is PackState.LOST and not holder.windows.serves(_LOOK_HANGS_S)
    holder.turn(60.0)
    assert holder.windows.is_busy and holder.num_released == 0
    holder.state = TransferState.DONE
    holder.turn(61.0)
    assert not holder.windows.is_busy and holder.num_released == 1
    assert holder.windows.serves(61.0)

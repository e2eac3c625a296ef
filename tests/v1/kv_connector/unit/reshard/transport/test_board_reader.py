# SPDX-License-Identifier: Apache-2.0
"""Rows of a board: where they land, and what becomes of those whose reads go wrong."""

from __future__ import annotations

import numpy as np
import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import InDoubtError, TransferError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.board import (
    NUM_ROWS,
    WORDS_PER_ROW,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import (
    Prepared,
    Transfer,
    TransferState,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.board_reader import (
    BoardReader,
    RowBuffer,
    prepare_board,
)


class Agent:
    """An agent that prepares lists."""

    def register(self, regions, memory) -> None:
        """Anything may be read into."""

    def prepare(self, rows, peer=None, memory=None) -> Prepared:
        """A list, with its rows."""
        return Prepared(peer, rows)


class Reads:
    """Reads that end when the test says so, with what their rows' numbers are."""

    def __init__(self, buffer: RowBuffer) -> None:
        self.buffer = buffer
        self.refuses_with: TransferError | None = None
        self.state = TransferState.IN_FLIGHT
        self.num_released = 0

    def read(self, local, local_indices, remote, remote_indices) -> Transfer:
        """Post a read."""
        if self.refuses_with is not None:
            raise self.refuses_with
        self.buffer.rows[local_indices] = remote_indices[:, None].astype(np.uint64)
        return Transfer(remote.peer, None)

    def poll(self, transfer) -> TransferState:
        """Look at it."""
        return self.state

    def release(self, transfer) -> None:
        """Give it back."""
        self.num_released += 1


@pytest.fixture
def parts() -> tuple[RowBuffer, Reads, BoardReader]:
    """A buffer, the reads into it, and the reader."""
    agent = Agent()
    buffer = RowBuffer(agent)
    reads = Reads(buffer)
    return buffer, reads, BoardReader(buffer, reads, prepare_board(agent, 4096, "peer"))


def test_list_has_all_rows_of_a_board():
    """They adjoin each other."""
    ((address, size, _, stride, count),) = prepare_board(Agent(), 4096, "peer").handle.tolist()
    assert (address, size, stride, count) == (4096, 512, 512, NUM_ROWS)


def test_rows_come_in_the_order_that_was_asked_for(parts):
    """Where they have landed is free again after that."""
    buffer, reads, reader = parts
    before = reader.num_free
    look = reader.post([7, 3, 7])
    assert reader.num_free == before - 3 and reader.take(look) is None
    reads.state = TransferState.DONE
    rows = reader.take(look)
    assert rows.shape == (3, WORDS_PER_ROW) and rows[:, 0].tolist() == [7, 3, 7]
    assert reader.num_free == before and reads.num_released == 1
    buffer.rows[:] = 0
    assert rows.any()


def test_rows_of_a_failed_read_are_given_to_no_other(parts):
    """It may still write."""
    _, reads, reader = parts
    before = reader.num_free
    look = reader.post([1])
    reads.state = TransferState.FAILED
    with pytest.raises(TransferError, match="the board of peer could not be read"):
        reader.take(look)
    assert reader.num_free == before - 1 and not reads.num_released


@pytest.mark.parametrize(("error", "kept"), [(TransferError("no"), 0), (InDoubtError("began"), 1)])
def test_rows_of_a_refused_read_are_free_unless_it_had_begun(parts, error, kept):
    """NIXL says which of them it is."""
    _, reads, reader = parts
    before, reads.refuses_with = reader.num_free, error
    with pytest.raises(TransferError):
        reader.post([1])
    assert reader.num_free == before - kept

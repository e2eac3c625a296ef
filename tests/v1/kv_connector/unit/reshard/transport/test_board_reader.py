# SPDX-License-Identifier: Apache-2.0
"""Rows of a board: where they land, and what becomes of those whose reads go wrong."""

from __future__ import annotations

import pytest

from tests.v1.kv_connector.unit.reshard.transport.rows import Agent, Reads
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import TransferError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.board import (
    NUM_ROWS,
    WORDS_PER_ROW,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import TransferState
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.board_reader import (
    BoardReader,
    board_buffer,
    prepare_board,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.row_buffer import RowBuffer


@pytest.fixture
def parts() -> tuple[RowBuffer, Reads, BoardReader]:
    """A buffer, the reads into it, and the reader."""
    agent = Agent()
    buffer = board_buffer(agent)
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

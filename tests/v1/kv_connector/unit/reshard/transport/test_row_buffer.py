# SPDX-License-Identifier: Apache-2.0
"""Rows of a buffer: each is one read's, until nothing can write there any more."""

from __future__ import annotations

import pytest

from tests.v1.kv_connector.unit.reshard.transport.rows import Agent, Reads
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import InDoubtError, TransferError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import Prepared
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.row_buffer import RowBuffer

TABLE = Prepared("peer", None)


@pytest.fixture
def reads() -> Reads:
    """Reads into a buffer of three rows of eight words."""
    return Reads(RowBuffer(Agent(), 3, 8))


def test_reads_land_beside_each_other(reads):
    """What one has brought stays when the rows are given to another one."""
    buffer = reads.buffer
    first, second = buffer.post(reads, TABLE, [7]), buffer.post(reads, TABLE, [3, 5])
    assert buffer.num_free == 0
    rows = buffer.landed(second)
    assert rows.shape == (2, 8) and rows[:, 0].tolist() == [3, 5]
    buffer.free(reads, second)
    assert buffer.num_free == 2 and reads.num_released == 1
    buffer.post(reads, TABLE, [9, 9])
    assert rows[:, 0].tolist() == [3, 5] and buffer.landed(first)[:, 0].tolist() == [7]


@pytest.mark.parametrize(("error", "kept"), [(TransferError("no"), 0), (InDoubtError("began"), 1)])
def test_rows_of_a_refused_read_are_free_unless_it_had_begun(reads, error, kept):
    """NIXL says which of them it is."""
    reads.refuses_with = error
    with pytest.raises(TransferError):
        reads.buffer.post(reads, TABLE, [1])
    assert reads.buffer.num_free == 3 - kept

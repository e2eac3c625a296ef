# SPDX-License-Identifier: Apache-2.0
"""Reads of rows of another engine's board: see `protocol.board`.

Everything here belongs to the connector's thread of the reading worker.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..errors import TransferError
from ..memory.leg import side_by_side
from ..protocol.board import MAX_RECORD_ROWS, NUM_ROWS, ROW_BYTES, WORDS_PER_ROW
from ..protocol.quoting import quote
from .agent import NixlAgent, Prepared, TransferState
from .row_buffer import Reads, RowBuffer, RowRead

_ROOM_ROWS = 2 * MAX_RECORD_ROWS
"""Rows that can be read with one agent at the same time: 1 MiB for each lane."""


class BoardReader:
    """Reads the board of one worker.

    Args:
        buffer: Buffer that rows are read into.
        reads: Connection with the worker's engine.
        board: Descriptor list of the board's rows.
    """

    def __init__(self, buffer: RowBuffer, reads: Reads, board: Prepared) -> None:
        self._buffer, self._reads, self._board = buffer, reads, board

    @property
    def num_free(self) -> int:
        """Number of rows that can be read now."""
        return self._buffer.num_free

    def post(self, rows: Sequence[int]) -> RowRead:
        """Post a read of some rows, at most `num_free`.

        Raises:
            TransferError: NIXL refused the read.
        """
        return self._buffer.post(self._reads, self._board, rows)

    def take(self, read: RowRead) -> npt.NDArray[np.uint64] | None:
        """Return the rows of a read, in the order requested; None while it is in flight.

        Raises:
            TransferError: The read failed.
        """
        state = self._reads.poll(read.transfer)
        if state is TransferState.IN_FLIGHT:
            return None
        if state is not TransferState.DONE:
            raise TransferError(f"the board of {quote(read.transfer.peer)} could not be read")
        rows = self._buffer.landed(read)
        self._buffer.free(self._reads, read)
        return rows


def board_buffer(agent: NixlAgent) -> RowBuffer:
    """Return a buffer for rows of boards that are read with an agent.

    Raises:
        TransferError: The memory cannot be registered.
    """
    return RowBuffer(agent, _ROOM_ROWS, WORDS_PER_ROW)


def prepare_board(agent: NixlAgent, address: int, peer: str) -> Prepared:
    """Prepare a peer's board to be read.

    Raises:
        TransferError: NIXL does not know the peer, or this memory of the peer.
    """
    return agent.prepare(side_by_side(address, ROW_BYTES, 0, NUM_ROWS), peer, "DRAM")

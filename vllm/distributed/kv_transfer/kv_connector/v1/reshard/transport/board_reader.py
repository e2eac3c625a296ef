# SPDX-License-Identifier: Apache-2.0
"""Reads rows of another engine's board: see `protocol.board`.

Everything here belongs to the connector's thread of the worker that reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..errors import TransferError
from ..memory.leg import side_by_side
from ..protocol.board import MAX_RECORD_ROWS, NUM_ROWS, ROW_BYTES, WORDS_PER_ROW
from ..protocol.quoting import quote
from .agent import NixlAgent, Prepared, TransferState
from .row_buffer import RowBuffer, RowRead

if TYPE_CHECKING:
    from .connection import PeerConnection

_ROOM_ROWS = 2 * MAX_RECORD_ROWS
"""1 MiB for each lane: what is looked at with one agent at the same time."""


class BoardReader:
    """Reads the board of one worker.

    Args:
        buffer: Where rows land.
        reads: The connection with its engine.
        board: The list of its rows.
    """

    def __init__(self, buffer: RowBuffer, reads: PeerConnection, board: Prepared) -> None:
        self._buffer, self._reads, self._board = buffer, reads, board

    @property
    def num_free(self) -> int:
        """How many rows can be read now."""
        return self._buffer.num_free

    def post(self, rows: Sequence[int]) -> RowRead:
        """Read some rows, no more than `num_free`.

        Raises:
            TransferError: NIXL could not begin.
        """
        return self._buffer.post(self._reads, self._board, rows)

    def take(self, read: RowRead) -> npt.NDArray[np.uint64] | None:
        """What was read, in the order that was asked for; None while that is under way.

        Raises:
            TransferError: The read has failed.
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
    """Where the rows of boards land that are read with an agent.

    Raises:
        TransferError: The memory cannot be registered.
    """
    return RowBuffer(agent, _ROOM_ROWS, WORDS_PER_ROW)


def prepare_board(agent: NixlAgent, address: int, peer: str) -> Prepared:
    """Prepare a peer's board to be read.

    Raises:
        TransferError: NIXL does not know the peer, or not this memory of its.
    """
    return agent.prepare(side_by_side(address, ROW_BYTES, 0, NUM_ROWS), peer, "DRAM")

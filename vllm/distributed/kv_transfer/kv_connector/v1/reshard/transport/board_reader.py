# SPDX-License-Identifier: Apache-2.0
"""Reads rows of another engine's board: see `protocol.board`.

Everything here belongs to the connector's thread of the worker that reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import InDoubtError, TransferError
from ..memory.leg import side_by_side
from ..protocol.board import MAX_RECORD_ROWS, NUM_ROWS, ROW_BYTES, WORDS_PER_ROW
from ..protocol.quoting import quote
from .agent import NixlAgent, Prepared, Transfer, TransferState
from .lease_check import Reads

_ROOM_ROWS = 2 * MAX_RECORD_ROWS
"""1 MiB for each lane: what is looked at with one agent at the same time."""


class RowBuffer:
    """Where the rows land that are read with one agent.

    Rows of a read that has failed are given to no other one until the agent is closed.

    Args:
        agent: The agent; the buffer is registered with it.

    Attributes:
        rows: Shape (rows, `WORDS_PER_ROW`).
        local: Their list.
        free: Those that no read may write into.
    """

    def __init__(self, agent: NixlAgent) -> None:
        self.rows = np.zeros((_ROOM_ROWS, WORDS_PER_ROW), dtype=np.uint64)
        address = self.rows.ctypes.data
        agent.register([(address, self.rows.nbytes, 0)], "DRAM")
        self.local = agent.prepare(side_by_side(address, ROW_BYTES, 0, _ROOM_ROWS), memory="DRAM")
        self.free = deque(range(_ROOM_ROWS))


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """Rows that are being read.

    Attributes:
        landed_in: Where.
        transfer: The read.
    """

    landed_in: npt.NDArray[np.int32]
    transfer: Transfer


class BoardReader:
    """Reads the board of one worker.

    Args:
        buffer: Where rows land.
        reads: The connection with its engine.
        board: The list of its rows.
    """

    def __init__(self, buffer: RowBuffer, reads: Reads, board: Prepared) -> None:
        self._buffer, self._reads, self._board = buffer, reads, board

    @property
    def num_free(self) -> int:
        """How many rows can be read now."""
        return len(self._buffer.free)

    def post(self, rows: Sequence[int]) -> Look:
        """Read some rows, no more than `num_free`.

        Raises:
            TransferError: NIXL could not begin.
        """
        free = self._buffer.free
        landed_in = np.array([free.popleft() for _ in rows], dtype=np.int32)
        wanted = np.array(rows, dtype=np.int32)
        try:
            transfer = self._reads.read(self._buffer.local, landed_in, self._board, wanted)
        except TransferError as error:
            if not isinstance(error, InDoubtError):
                free.extend(landed_in.tolist())
            raise
        return Look(landed_in, transfer)

    def take(self, look: Look) -> npt.NDArray[np.uint64] | None:
        """What was read, in the order that was asked for; None while that is under way.

        Raises:
            TransferError: The read has failed.
        """
        state = self._reads.poll(look.transfer)
        if state is TransferState.IN_FLIGHT:
            return None
        if state is not TransferState.DONE:
            raise TransferError(f"the board of {quote(look.transfer.peer)} could not be read")
        rows = self._buffer.rows[look.landed_in]
        self._buffer.free.extend(look.landed_in.tolist())
        self._reads.release(look.transfer)
        return rows


def prepare_board(agent: NixlAgent, address: int, peer: str) -> Prepared:
    """Prepare a peer's board to be read.

    Raises:
        TransferError: NIXL does not know the peer, or not this memory of its.
    """
    return agent.prepare(side_by_side(address, ROW_BYTES, 0, NUM_ROWS), peer, "DRAM")

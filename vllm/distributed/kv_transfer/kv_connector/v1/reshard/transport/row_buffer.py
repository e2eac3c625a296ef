# SPDX-License-Identifier: Apache-2.0
"""Where small reads land: some rows of a table that another engine's worker shows.

Lease tables and boards are read so. A row is given to one read at a time. A read that has failed,
or was refused after it had begun, may still write: its rows are given to no other one until the
agent is closed.

Everything here belongs to the connector's thread of the worker that reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..errors import InDoubtError, TransferError
from ..memory.leg import side_by_side
from .agent import NixlAgent, Prepared, Transfer

if TYPE_CHECKING:
    from .connection import PeerConnection

_WORD_BYTES = 8


@dataclass(frozen=True, slots=True, eq=False)
class RowRead:
    """Rows that are being read.

    Attributes:
        landed_in: Where, in the order that was asked for.
        transfer: The read.
    """

    landed_in: npt.NDArray[np.int32]
    transfer: Transfer


class RowBuffer:
    """Where the rows land that are read with one agent.

    Args:
        agent: The agent; the buffer is registered with it.
        num_rows: How many can be read at the same time.
        words_per_row: Of 8 bytes each.

    Attributes:
        rows: Shape (num_rows, words_per_row).

    Raises:
        TransferError: The memory cannot be registered.
    """

    def __init__(self, agent: NixlAgent, num_rows: int, words_per_row: int) -> None:
        self.rows = np.zeros((num_rows, words_per_row), dtype=np.uint64)
        address, row_bytes = self.rows.ctypes.data, words_per_row * _WORD_BYTES
        agent.register([(address, self.rows.nbytes, 0)], "DRAM")
        self._local = agent.prepare(side_by_side(address, row_bytes, 0, num_rows), memory="DRAM")
        self._free = deque(range(num_rows))

    @property
    def num_free(self) -> int:
        """How many rows can be read now."""
        return len(self._free)

    def post(self, reads: PeerConnection, table: Prepared, rows: Sequence[int]) -> RowRead:
        """Read some rows of a table, no more than `num_free`.

        Raises:
            TransferError: NIXL could not begin.
        """
        # Those of a read that may have begun are not given back.
        landed_in = np.array([self._free.popleft() for _ in rows], dtype=np.int32)
        wanted = np.array(rows, dtype=np.int32)
        try:
            transfer = reads.read(self._local, landed_in, table, wanted)
        except TransferError as error:
            if not isinstance(error, InDoubtError):
                self._free.extend(landed_in.tolist())
            raise
        return RowRead(landed_in, transfer)

    def landed(self, read: RowRead) -> npt.NDArray[np.uint64]:
        """What a read that is done has brought; shape (rows, words_per_row), a copy."""
        return self.rows[read.landed_in]

    def free(self, reads: PeerConnection, read: RowRead) -> None:
        """Give the rows of a read back that is done."""
        self._free.extend(read.landed_in.tolist())
        reads.release(read.transfer)

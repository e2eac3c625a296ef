# SPDX-License-Identifier: Apache-2.0
"""Buffers for small reads: rows of a lease table of another engine's worker.

A row is used by one read at a time. A read that failed, or was refused after it had begun, may
still write, so its rows are not used again until the agent is closed.

Everything here belongs to the connector's thread of the reading worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..errors import InDoubtError, TransferError
from ..memory.leg import Indices, side_by_side
from .agent import NixlAgent, Prepared, Transfer, TransferState

_WORD_BYTES = 8


class Reads(Protocol):
    """What rows are read over: a connection, which counts its reads."""

    def read(
        self,
        local: Prepared,
        local_indices: Indices,
        remote: Prepared,
        remote_indices: Indices,
    ) -> Transfer:
        """Post a read; raises TransferError."""

    def poll(self, transfer: Transfer) -> TransferState:
        """Return a posted read's state."""

    def release(self, transfer: Transfer) -> None:
        """Release a completed read."""


@dataclass(frozen=True, slots=True, eq=False)
class RowRead:
    """Rows that are being read.

    Attributes:
        landed_in: Rows of the buffer that it reads into, in the order requested.
        transfer: The read.
    """

    landed_in: npt.NDArray[np.int32]
    transfer: Transfer


class RowBuffer:
    """A registered buffer for rows that are read with one agent.

    Args:
        agent: Agent to register the buffer with.
        num_rows: Number of rows that can be read at the same time.
        words_per_row: Size of a row, in words of 8 bytes.

    Attributes:
        rows: The buffer; shape (num_rows, words_per_row).

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
        """Number of rows that can be read now."""
        return len(self._free)

    def post(self, reads: Reads, table: Prepared, rows: Sequence[int]) -> RowRead:
        """Post a read of some rows of a table, at most `num_free`.

        Raises:
            TransferError: NIXL refused the read.
        """
        # If the read may have begun, these rows are not freed.
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
        """Return a copy of the rows of a completed read; shape (rows, words_per_row)."""
        return self.rows[read.landed_in]

    def free(self, reads: Reads, read: RowRead) -> None:
        """Free the rows of a completed read, and release it."""
        self._free.extend(read.landed_in.tolist())
        reads.release(read.transfer)

# SPDX-License-Identifier: Apache-2.0
"""Boards as readers see them."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.board import (
    NUM_ROWS,
    WORDS_PER_ROW,
    Board,
)


def rows_of(board: Board) -> npt.NDArray[np.uint64]:
    """A board's memory, as a reader would read it."""
    data = ctypes.string_at(board.address, board.size_bytes)
    return np.frombuffer(data, np.uint64).reshape(NUM_ROWS, WORDS_PER_ROW)

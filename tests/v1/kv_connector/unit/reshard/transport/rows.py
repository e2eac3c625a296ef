# SPDX-License-Identifier: Apache-2.0
"""Rows that are read without NIXL, in reads that end when the test says so."""

from __future__ import annotations

import numpy as np

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import TransferError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import (
    Prepared,
    Transfer,
    TransferState,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.lease_check import RowBuffer


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

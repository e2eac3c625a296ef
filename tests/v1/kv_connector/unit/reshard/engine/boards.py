# SPDX-License-Identifier: Apache-2.0
"""Boards of other engines that say what a test has them say, and engines that are connected."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tests.v1.kv_connector.unit.reshard.protocol.board_rows import rows_of
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.connecting.peers import Peer
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import TransferError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.board import (
    WORDS_PER_ROW,
    Board,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    RemoteEngineAddress,
)


class Reader:
    """Reads a board, when the test says so.

    Attributes:
        board: What is read; None for an empty one.
        lands: Looks are over when they are asked about.
        fails: They fail then.
        num_taken: Looks that were over.
        num_posted: Those that were begun.
    """

    num_free = 1000

    def __init__(self) -> None:
        self.board: Board | None = None
        self.lands = self.fails = False
        self.num_taken = self.num_posted = 0

    def post(self, rows: Sequence[int]) -> Sequence[int]:
        """Begin a look."""
        self.num_posted += 1
        return list(rows)

    def take(self, look: Sequence[int]) -> npt.NDArray[np.uint64] | None:
        """End it."""
        if self.fails:
            raise TransferError("the board could not be read")
        if not self.lands:
            return None
        self.num_taken += 1
        if self.board is None:
            return np.zeros((len(look), WORDS_PER_ROW), dtype=np.uint64)
        return rows_of(self.board)[np.array(look)]


class Connection:
    """A connection with an engine."""

    is_connected = True

    def __init__(self) -> None:
        self.reader = Reader()

    def board(self) -> Reader:
        """What its board is read with."""
        return self.reader


class Peers:
    """Engines that are all connected.

    Attributes:
        connections: By engine.
        broken_off: Connections that were given up.
        num_asked: How often one was wanted.
    """

    def __init__(self) -> None:
        self.connections: dict[RemoteEngineAddress, Connection] = {}
        self.broken_off: list[Connection] = []
        self.num_asked = 0
        self._peers: dict[RemoteEngineAddress, Peer] = {}

    def get_or_connect(self, address: RemoteEngineAddress, now_s: float) -> Peer:
        """The engine at an address."""
        self.num_asked += 1
        peer = self._peers.setdefault(address, Peer(address, now_s))
        peer.connection = self.connections.setdefault(address, Connection())
        return peer

    def connected_at(self, address: RemoteEngineAddress) -> RemoteEngineAddress | None:
        """The engine that is connected at a place."""
        return address if address in self.connections else None

    def break_off(self, connection: Connection, now_s: float) -> None:
        """Give a connection up."""
        self.broken_off.append(connection)

# SPDX-License-Identifier: Apache-2.0
"""Connections that remember what they were told."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import TransferError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.fingerprint import (
    OfferFingerprint,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.lifetimes import Lifetime
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    Receive,
    RemoteEngineAddress,
    decode_notification,
)

OFFER = OfferFingerprint(48, 1, 2)
RELEASES = (("p0", 1), ("p1", 3))


def read_of(request_id: str) -> Receive:
    """A request whose producers are told that it was read."""
    source = RemoteEngineAddress("p", "p.example", 5600)
    return Receive(source, request_id, [[1]], [[1]], 0, 48, fingerprint=OFFER)


class RecordingConnection:
    """A connection with an engine, some of whose workers can be reached."""

    unreached = frozenset()

    def __init__(self, *unreachable: str, releases: Sequence[tuple[str, int]] = RELEASES) -> None:
        self.releases = releases
        self.unreachable = unreachable
        self.sent: list[tuple[str, object]] = []
        self.lifetime = Lifetime(60.0)

    def notify(self, peer: str, message: bytes) -> None:
        """Send a notification."""
        if peer in self.unreachable:
            raise TransferError(f"{peer} cannot be told")
        self.sent.append((peer, decode_notification(message)))


class Producers:
    """An engine with one connection after the other."""

    def __init__(self, *connections: RecordingConnection) -> None:
        self._connections = list(connections)

    @property
    def connection(self) -> RecordingConnection:
        """The one that is in use."""
        return self._connections[0]

    def get_or_connect(self, source: RemoteEngineAddress, now_s: float) -> Producers:
        """What stands for the engine in the table of peers."""
        return self

    def break_off(self, connection: RecordingConnection, now_s: float) -> None:
        """Use the next one."""
        if connection in self._connections:
            self._connections.remove(connection)

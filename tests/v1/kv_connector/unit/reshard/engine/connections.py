# SPDX-License-Identifier: Apache-2.0
"""Connections that remember what they were told."""

from __future__ import annotations

from types import SimpleNamespace

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import TransferError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.fingerprint import (
    OfferFingerprint,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    decode_notification,
)

OFFER = OfferFingerprint(48, 1, 2)
ENGINE = SimpleNamespace(releases=[("p0", 1), ("p1", 3)])


class RecordingConnection:
    """A connection with an engine, some of whose workers can be reached."""

    def __init__(self, *unreachable: str, engine: SimpleNamespace = ENGINE) -> None:
        self.engine = engine
        self.unreachable = unreachable
        self.sent: list[tuple[str, object]] = []
        self.lane = self
        self.agent = SimpleNamespace(is_open=True)
        self.talks_until_s, self.looks = 0.0, 0

    def progress(self) -> None:
        """Count a look at what was sent."""
        self.looks += 1

    def notify(self, peer: str, message: bytes) -> None:
        """Send a notification."""
        if peer in self.unreachable:
            raise TransferError(f"{peer} cannot be told")
        self.sent.append((peer, decode_notification(message)))

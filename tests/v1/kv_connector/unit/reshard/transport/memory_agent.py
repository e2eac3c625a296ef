# SPDX-License-Identifier: Apache-2.0
"""An agent that copies within the process, for tests that decide what happens when.

It passes the same conformance suite as NIXL's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import TransferError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import (
    Prepared,
    Transfer,
    TransferState,
)


@dataclass
class _Copy:
    """A posted read; nothing is copied before somebody looks at it for the second time."""

    pairs: np.ndarray
    state: TransferState = TransferState.IN_FLIGHT
    looks: int = 0


class MemoryAgent:
    """`NixlAgent`'s interface over memory of this process.

    Args:
        name: Unique among all agents.
        options: What NIXL would be told; means nothing here.

    Attributes:
        regions: Memory that is known, each from its first address to behind its last.
        inbox: Messages that were not taken, each with its sender.
    """

    _agents: ClassVar[dict[str, MemoryAgent]] = {}
    _MAGIC = b"memory agent "

    def __init__(self, name: str, **options: object) -> None:
        self.name = name
        self.regions: list[tuple[int, int]] = []
        self._peers: set[str] = set()
        self.inbox: list[tuple[str, bytes]] = []
        self._lists: set[Prepared] = set()
        self._agents[name] = self

    @property
    def is_open(self) -> bool:
        """Whether it has not been closed."""
        return self.name in self._agents

    def register(self, regions: Sequence[tuple[int, int, int]], memory: str | None = None) -> None:
        """Make memory known."""
        self.regions += [(address, address + size) for address, size, _ in regions]

    def metadata(self) -> bytes:
        """What a peer needs to connect."""
        return self._MAGIC + self.name.encode()

    def connect(self, metadata: bytes) -> str:
        """Make a peer known."""
        name = metadata.removeprefix(self._MAGIC).decode()
        if not metadata.startswith(self._MAGIC) or name not in self._agents:
            raise TransferError(f"no agent accepts a peer's metadata: {metadata!r}")
        self._peers.add(name)
        return name

    def disconnect(self, peer: str) -> None:
        """Forget a peer, whose lists were given back."""
        assert not any(each.peer == peer for each in self._lists)
        self._peers.remove(peer)

    def prepare(
        self, rows: np.ndarray, peer: str | None = None, memory: str | None = None
    ) -> Prepared:
        """Prepare strided descriptors."""
        owner = self._owner(peer)
        for address, size, _, stride, count in rows.tolist():
            stop = address + (count - 1) * stride + size
            if not any(low <= address and stop <= high for low, high in owner.regions):
                raise TransferError(f"{owner.name} has not registered [{address}, {stop})")
        prepared = Prepared(peer, rows)
        self._lists.add(prepared)
        return prepared

    def release_prepared(self, prepared: Prepared) -> None:
        """Give a prepared list back."""
        self._lists.remove(prepared)

    def read(
        self,
        local: Prepared,
        local_indices: np.ndarray,
        remote: Prepared,
        remote_indices: np.ndarray,
    ) -> Transfer:
        """Post a read."""
        assert remote.peer is not None
        self._owner(remote.peer)
        ends = [
            _locate(prepared.handle, indices)
            for prepared, indices in ((local, local_indices), (remote, remote_indices))
        ]
        if ends[0].shape != ends[1].shape or (ends[0][:, 1] != ends[1][:, 1]).any():
            raise TransferError(f"{remote.peer}'s descriptors are not ours in number or size")
        return Transfer(remote.peer, _Copy(np.hstack(ends)))

    def poll(self, transfer: Transfer) -> TransferState:
        """Look at a posted read."""
        copy: _Copy = transfer.handle
        copy.looks += 1
        if copy.state is TransferState.IN_FLIGHT and copy.looks > 1:
            for to, size, source, _ in copy.pairs.tolist():
                ctypes.memmove(to, source, size)
            copy.state = TransferState.DONE
        return copy.state

    def telemetry(self, transfer: Transfer) -> None:
        """Nothing is measured."""

    def release(self, transfer: Transfer) -> None:
        """Give a read back that is done."""
        assert transfer.handle.state is TransferState.DONE

    def notify(self, peer: str, message: bytes) -> None:
        """Send a peer a message."""
        self._owner(peer).inbox.append((self.name, message))

    def take_notifications(self) -> list[tuple[str, bytes]]:
        """Messages that arrived since the last call."""
        inbox, self.inbox = self.inbox, []
        return inbox

    def close(self) -> None:
        """Leave the network."""
        self._lists.clear()
        self._agents.pop(self.name, None)

    def _owner(self, peer: str | None) -> MemoryAgent:
        if peer is None:
            return self
        if peer not in self._peers or peer not in self._agents:
            raise TransferError(f"cannot notify or read {peer}: it is not connected")
        return self._agents[peer]


def _locate(rows: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Address and size of some descriptors; shape (descriptors, 2)."""
    counts = rows[:, 4].astype(np.int64)
    first = np.concatenate([[0], np.cumsum(counts)])
    row = np.searchsorted(first, indices, side="right") - 1
    if len(indices) and not (indices.min() >= 0 and indices.max() < first[-1]):
        raise TransferError(f"descriptor {indices.max()} is none of {first[-1]}")
    addresses = rows[row, 0] + (indices - first[row]).astype(np.uint64) * rows[row, 3]
    return np.stack([addresses, rows[row, 1]], axis=1)

# SPDX-License-Identifier: Apache-2.0
"""The device that a worker's caches are on: who chooses it, and what it has still to do."""

from __future__ import annotations

import torch

from .metadata import ReshardConnectorMetadata
from .transfer_engine import Event


class CacheDevice:
    """Where a worker's caches are.

    Args:
        on_cpu: They are in host memory, and what is computed is so at once.

    Attributes:
        place: The caches' device; None until they are registered.
    """

    def __init__(self, *, on_cpu: bool) -> None:
        self._on_cpu = on_cpu
        self.place: torch.device | None = None

    def choose(self) -> None:
        """Have the calling thread compute, and NIXL register, where the caches are.

        A thread begins with the first of its process's devices, whichever this worker's is.
        """
        if self.place is not None and self.place.type == "cuda":
            torch.cuda.set_device(self.place)

    def computed_before(self, metadata: ReshardConnectorMetadata) -> Event | None:
        """What the device has still to do, and may write into blocks that this step reads into.

        That is an earlier step, where the scheduler does not keep its blocks until it is over, and
        what is put into new blocks before this one computes: zeros, and copies of shared blocks.
        """
        if self._on_cpu or not metadata.receive:
            return None
        event = torch.cuda.Event()
        event.record()
        computed: Event = event
        return computed

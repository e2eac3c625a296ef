# SPDX-License-Identifier: Apache-2.0
"""The device of a worker's caches: making it current, and waiting for its pending work."""

from __future__ import annotations

import torch

from .metadata import ReshardConnectorMetadata
from .transfer_engine import Event


class CacheDevice:
    """The device that a worker's caches are on.

    Args:
        on_cpu: Whether the caches are in host memory, where work is complete when its call returns.

    Attributes:
        place: The caches' device; None until they are registered.
    """

    def __init__(self, *, on_cpu: bool) -> None:
        self._on_cpu = on_cpu
        self.place: torch.device | None = None

    def choose(self) -> None:
        """Make the caches' device current for the calling thread and for NIXL's registrations.

        A thread starts with the process's first device, whichever this worker's is.
        """
        if self.place is not None and self.place.type == "cuda":
            torch.cuda.set_device(self.place)

    def computed_before(self, metadata: ReshardConnectorMetadata) -> Event | None:
        """Record an event after device work that may write into blocks that this step reads into.

        That is an earlier step, where the scheduler does not keep its blocks until it is over, and
        what new blocks receive before this step computes: zeros, and copies of shared blocks.
        Return None where there is nothing to wait for.
        """
        if self._on_cpu or not metadata.receive:
            return None
        event = torch.cuda.Event()
        event.record()
        computed: Event = event
        return computed

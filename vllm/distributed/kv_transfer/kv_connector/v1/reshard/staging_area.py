# SPDX-License-Identifier: Apache-2.0
"""The arena of a worker: its memory, known to NIXL, and what copies out of it."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from vllm.logger import init_logger

from .agent import NixlAgent
from .arena import ArenaAllocator
from .lowering import Rows
from .scatter import DeviceScatterer, HostScatterer, Scatterer
from .strategy import CostModel

logger = init_logger(__name__)

_LARGEST_BYTES = 256 << 20
_PART_OF_FREE_MEMORY = 16


@dataclass(slots=True)
class StagingArea:
    """Where staged reads stop over. It belongs to the engine's thread.

    Attributes:
        memory: The arena; uint8, contiguous.
        scatterer: Brings what has landed to where it belongs.
        spans: Which bytes of the arena are in use.
        costs: Decides which reads are staged; None for all of them.
    """

    memory: torch.Tensor
    scatterer: Scatterer
    spans: ArenaAllocator = field(init=False)
    costs: CostModel | None = None

    def __post_init__(self) -> None:
        self.spans = ArenaAllocator(self.memory.nbytes)

    def rows(self, descriptor_bytes: int) -> Rows:
        """The arena as descriptors of one size, side by side; shape (1, 5), as in `lowering`."""
        count = self.memory.nbytes // descriptor_bytes
        row = (
            self.memory.data_ptr(),
            descriptor_bytes,
            max(self.memory.get_device(), 0),
            descriptor_bytes,
            count,
        )
        return np.array([row], dtype=np.uint64)


def open_area(
    agent: NixlAgent,
    caches: Iterable[torch.Tensor],
    size_bytes: int | None,
    cores: Collection[int] | None = None,
) -> StagingArea | None:
    """Allocate the arena and make it known to NIXL.

    Args:
        agent: This worker's agent.
        caches: The KV cache; the arena is on the same device.
        size_bytes: Size of the arena; None for a sixteenth of the memory that is free, but no more
            than 256 MiB.
        cores: Where the thread may run that copies on the host; None for where this one may.

    Returns:
        The area; None where its size is 0, or there is no memory for it. Reads go direct then.
    """
    tensors = list(caches)
    device = tensors[0].device
    if size_bytes is None:
        size_bytes = min(_free_bytes(device) // _PART_OF_FREE_MEMORY, _LARGEST_BYTES)
    try:
        memory = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        logger.warning(
            "There is no memory for a staging arena of %d bytes, so that all reads go direct: set "
            "staging_arena_bytes in kv_connector_extra_config to less (%s)",
            size_bytes,
            error,
        )
        return None
    if not size_bytes:
        return None
    agent.register([(memory.data_ptr(), memory.nbytes, max(memory.get_device(), 0))])
    return StagingArea(memory, make_scatterer(memory, tensors, cores))


def make_scatterer(
    arena: torch.Tensor, caches: Iterable[torch.Tensor], cores: Collection[int] | None = None
) -> Scatterer:
    """What copies from an arena to caches, all of them on one device.

    Args:
        arena: The arena; uint8, contiguous.
        caches: What the KV cache lies in.
        cores: Where the thread may run that copies on the host; None for where this one may.
    """
    if arena.device.type == "cpu":
        return HostScatterer(arena, caches, cores)
    return DeviceScatterer(arena, caches)


def _free_bytes(device: torch.device) -> int:
    """Memory of a device that nobody uses."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

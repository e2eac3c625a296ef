# SPDX-License-Identifier: Apache-2.0
"""The arena of a worker: its memory, known to NIXL, and what copies out of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import psutil
import torch
from vllm.logger import init_logger

from ..errors import LocalLayoutError
from ..memory.arena import ArenaAllocator
from ..memory.leg import MAX_DESCRIPTORS, Rows, side_by_side
from ..memory.strategy import LARGEST_ARENA_BYTES, StagingPolicy
from ..protocol.quoting import one_line
from .scatter import DeviceScatterer, HostScatterer, Scatterer

logger = init_logger(__name__)

_PART_OF_FREE_MEMORY = 16


@dataclass(slots=True)
class StagingArea:
    """Where staged reads stop over. It belongs to the connector's thread.

    Attributes:
        memory: The arena; uint8, contiguous.
        scatterer: Brings what has landed to where it belongs.
        policy: Which reads are staged; None for all of them.
        spans: Which bytes of the arena are in use. That of a read that has failed is, until the
            agent which has posted it is gone.
    """

    memory: torch.Tensor
    scatterer: Scatterer
    policy: StagingPolicy | None = None
    spans: ArenaAllocator = field(init=False)

    def __post_init__(self) -> None:
        self.spans = ArenaAllocator(self.memory.nbytes)

    @property
    def region(self) -> tuple[int, int, int]:
        """What an agent that reads registers: address, size in bytes, device id."""
        return self.memory.data_ptr(), self.memory.nbytes, max(self.memory.get_device(), 0)

    def rows(self, descriptor_bytes: int) -> Rows:
        """The arena as descriptors of one size, side by side; shape (1, 5).

        Raises:
            LocalLayoutError: It would be more descriptors than NIXL's indices can count.
        """
        address, size_bytes, device_id = self.region
        count = size_bytes // descriptor_bytes
        if count > MAX_DESCRIPTORS:
            raise LocalLayoutError(
                f"an arena of {size_bytes} bytes is {count} descriptors of "
                f"{descriptor_bytes} bytes, more than one transfer list can hold, "
                f"{MAX_DESCRIPTORS}: set staging_arena_bytes in kv_connector_extra_config to at "
                f"most {MAX_DESCRIPTORS * descriptor_bytes}"
            )
        return side_by_side(address, descriptor_bytes, device_id, count)


def open_area(
    caches: Iterable[torch.Tensor],
    size_bytes: int | None,
    *,
    policy: StagingPolicy | None = None,
    cores: Collection[int] | None = None,
    announce: Callable[[], None] | None = None,
) -> StagingArea | None:
    """Allocate the arena.

    Args:
        caches: The KV cache; the arena is on the same device.
        size_bytes: Size of the arena; None for a sixteenth of the memory that is free, but no more
            than 256 MiB.
        policy: Which reads are staged; None for all of them.
        cores: Where the thread may run that copies on the host; None for where this one may.
        announce: Called by that thread when something was copied; never on a device.

    Returns:
        The area; None where its size is 0, or there is no such memory. Reads go direct then.
    """
    tensors = list(caches)
    device = tensors[0].device
    if device.type not in ("cpu", "cuda"):
        return None
    if size_bytes is None:
        size_bytes = min(_free_bytes(device) // _PART_OF_FREE_MEMORY, LARGEST_ARENA_BYTES)
    if not size_bytes:
        return None
    try:
        memory = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    except Exception as error:
        logger.warning(
            "There is no memory for a staging arena of %d bytes, so that all reads go direct: set "
            "staging_arena_bytes in kv_connector_extra_config to less (%s)",
            size_bytes,
            one_line(error),
        )
        return None
    return StagingArea(memory, make_scatterer(memory, tensors, cores, announce), policy)


def make_scatterer(
    arena: torch.Tensor,
    caches: Iterable[torch.Tensor],
    cores: Collection[int] | None = None,
    announce: Callable[[], None] | None = None,
) -> Scatterer:
    """What copies from an arena to caches, all of them on one device.

    Args:
        arena: The arena; uint8, contiguous.
        caches: What the KV cache lies in.
        cores: Where the thread may run that copies on the host; None for where this one may.
        announce: Called by that thread when something was copied.
    """
    if arena.device.type == "cpu":
        return HostScatterer(arena, caches, cores, announce)
    return DeviceScatterer(arena, caches)


def _free_bytes(device: torch.device) -> int:
    """Free memory of a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)

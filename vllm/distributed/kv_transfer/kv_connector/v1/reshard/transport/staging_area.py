# SPDX-License-Identifier: Apache-2.0
"""A worker's staging arena: its memory, registered with NIXL, and the copies out of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import psutil
import torch
from vllm.logger import init_logger

from ..errors import LocalLayoutError
from ..memory.arena import ArenaAllocator
from ..memory.leg import MAX_DESCRIPTORS, Rows, side_by_side
from ..memory.strategy import LARGEST_ARENA_BYTES, StagingPolicy
from ..protocol.quoting import one_line
from .arena_copies import ArenaCopier

logger = init_logger(__name__)

_PART_OF_FREE_MEMORY = 16


@dataclass(slots=True)
class StagingArea:
    """The arena through which staged reads go. It belongs to the connector's thread.

    Attributes:
        memory: The arena; uint8, contiguous.
        copier: Copies what has landed to its place in the caches.
        policy: Decides which reads are staged; None to stage all.
        spans: Allocator of the arena's bytes. A failed read keeps its span until the agent that
            posted it is gone.
    """

    memory: torch.Tensor
    copier: ArenaCopier
    policy: StagingPolicy | None = None
    spans: ArenaAllocator = field(init=False)

    def __post_init__(self) -> None:
        self.spans = ArenaAllocator(self.memory.nbytes)

    @property
    def region(self) -> tuple[int, int, int]:
        """What a reading agent registers: address, size in bytes, device id."""
        return self.memory.data_ptr(), self.memory.nbytes, max(self.memory.get_device(), 0)

    def rows(self, descriptor_bytes: int) -> Rows:
        """Return the arena as adjacent descriptors of one size; shape (1, 5).

        Raises:
            LocalLayoutError: There would be more descriptors than NIXL's indices can count.
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
) -> StagingArea | None:
    """Allocate the arena.

    Args:
        caches: The KV cache; the arena is on the same device.
        size_bytes: Size of the arena; None for a sixteenth of the free memory, but at most 256 MiB.
        policy: Decides which reads are staged; None to stage all.

    Returns:
        The area; None where its size is 0, or there is no such memory. All reads go direct then.
    """
    tensors = list(caches)
    option = "staging_arena_bytes"
    memory = allocate_arena(tensors[0].device, size_bytes, LARGEST_ARENA_BYTES, option)
    return None if memory is None else StagingArea(memory, ArenaCopier(memory, tensors), policy)


def allocate_arena(
    device: torch.device, size_bytes: int | None, largest_bytes: int, option: str
) -> torch.Tensor | None:
    """Allocate the memory of an arena: uint8, contiguous.

    Args:
        device: Where the KV cache is.
        size_bytes: Its size; None for a sixteenth of the free memory.
        largest_bytes: Its largest size if none is given.
        option: Option that gives its size.

    Returns:
        The memory; None where its size is 0, or there is no such memory.
    """
    if device.type not in ("cpu", "cuda"):
        return None
    if size_bytes is None:
        size_bytes = min(_free_bytes(device) // _PART_OF_FREE_MEMORY, largest_bytes)
    if not size_bytes:
        return None
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)
    except Exception as error:
        logger.warning(
            "There is no memory for an arena of %d bytes, so that reads go direct: set %s in "
            "kv_connector_extra_config to less (%s)",
            size_bytes,
            one_line(option),
            one_line(error),
        )
        return None


def _free_bytes(device: torch.device) -> int:
    """Return the free memory of a device, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)

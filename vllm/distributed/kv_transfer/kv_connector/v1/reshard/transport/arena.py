# SPDX-License-Identifier: Apache-2.0
"""A reader's arena, registered with NIXL, and copies between an arena and the KV cache.

A *scatter* puts what was read into an arena in its places in the cache, a *gather* puts what is to
be read from the cache into an arena. Either takes one indexed copy per stretch of memory that holds
the KV cache. On a device it is one copy per allocation, on a stream of its own, so that no thread
waits for it. On the host it is a single copy, which the connector's thread makes itself; it holds
the GIL only at its start and its end.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import psutil
import torch
from vllm.logger import init_logger

from ..errors import LocalLayoutError, one_line
from ..memory.leg import MAX_DESCRIPTORS, Rows, side_by_side
from ..memory.staging import LARGEST_ARENA_BYTES, ArenaAllocator, ArenaCopy, StagingPolicy

_WORDS = {
    16: torch.complex128,
    8: torch.int64,
    4: torch.int32,
    2: torch.int16,
    1: torch.int8,
}
"""Types that are copied bit for bit, by size in bytes: the widest that fits is the fastest."""


class ArenaCopier:
    """Makes copies, one after the other.

    Belongs to the connector's thread, which has the arena's device selected.

    Args:
        arena: The arena; uint8, contiguous.
        caches: Tensors of the KV cache, on the arena's device.
    """

    def __init__(self, arena: torch.Tensor, caches: Iterable[torch.Tensor]) -> None:
        self._arena = arena
        # Of the lowest priority, which is the default.
        self._stream = torch.cuda.Stream(arena.device) if arena.is_cuda else None
        # Host memory is referred to by address, which does not keep it.
        self._caches = list(caches)
        self._memories = (host_memory if self._stream is None else device_memory)(self._caches)

    def scatter(self, copy: ArenaCopy) -> torch.cuda.Event | None:
        """Copy from the arena to the cache, on the host, or queue that on the device.

        Returns:
            An event that is recorded after the copy; None if it has been made.

        Raises:
            Exception: It could not be made, and writes nothing any more.
        """
        return self._make(scatter, copy)

    def gather(self, copy: ArenaCopy) -> torch.cuda.Event | None:
        """Copy from the cache to the arena; as `scatter`."""
        return self._make(gather, copy)

    def differing(self, copy: ArenaCopy) -> npt.NDArray[np.int64]:
        """Return the chunks that are not the same in the arena and in the cache.

        On a device it waits for that, but for nothing that the model computes.

        Returns:
            Their positions in the copy, ascending; shape (chunks,).
        """
        with torch.cuda.stream(self._stream):
            parts = list(_by_memory(copy, self._memories))
            # Waited for once.
            differ = torch.cat([part.differ(self._arena) for part in parts]).cpu().numpy()
        return np.sort(np.concatenate([part.numbers for part in parts])[differ])

    def close(self) -> None:
        """Wait for all copies."""
        if self._stream is not None:
            self._stream.synchronize()

    def _make(self, make: Callable[..., None], copy: ArenaCopy) -> torch.cuda.Event | None:
        if self._stream is None:
            make(copy, self._arena, self._memories)
            return None
        # Kernels of earlier steps that used the blocks have ended: a read waited for them, and an
        # offer is made when its step has ended.
        try:
            with torch.cuda.stream(self._stream):
                make(copy, self._arena, self._memories)
                event = torch.cuda.Event()
                event.record(self._stream)
        except Exception:
            # Some of it may still run, and its span will be reused.
            self._stream.synchronize()
            raise
        return event


@dataclass(frozen=True, slots=True)
class MemoryStretch:
    """A stretch of memory.

    Attributes:
        address: Its first address.
        flat: All of its bytes; uint8.
    """

    address: int
    flat: torch.Tensor


def host_memory(caches: Iterable[torch.Tensor]) -> tuple[MemoryStretch, ...]:
    """Return the host memory from the first cache to the last, including any gaps between them.

    The gaps are never touched. A copy for each allocation would wait for the GIL each time.
    """
    flats = [_flat(each) for each in caches]
    start = min(flat.data_ptr() for flat in flats)
    start -= start % max(_WORDS)
    stop = max(flat.data_ptr() + flat.nbytes for flat in flats)
    size_bytes = stop - start
    buffer = (ctypes.c_uint8 * size_bytes).from_address(start)
    return (MemoryStretch(start, torch.frombuffer(buffer, dtype=torch.uint8)),)


def device_memory(caches: Iterable[torch.Tensor]) -> tuple[MemoryStretch, ...]:
    """Return every allocation that holds a cache, sorted by address."""
    flats = {flat.data_ptr(): flat for flat in map(_flat, caches)}
    return tuple(MemoryStretch(address, flats[address]) for address in sorted(flats))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return all bytes of the allocation that holds a tensor."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def scatter(copy: ArenaCopy, arena: torch.Tensor, memories: Sequence[MemoryStretch]) -> None:
    """Copy all chunks from an arena to the cache, with one copy per memory."""
    for part in _by_memory(copy, memories):
        values = part.regular(arena)
        if values is None:
            values = part.in_arena(arena).index_select(0, part.arena_indices)
        part.in_cache().index_copy_(0, part.cache_indices, values)


def gather(copy: ArenaCopy, arena: torch.Tensor, memories: Sequence[MemoryStretch]) -> None:
    """Copy all chunks from the cache to an arena, with one copy per memory."""
    for part in _by_memory(copy, memories):
        values = part.regular(arena)
        # Torch copies once only into what is contiguous.
        if values is not None and (order := _contiguous_order(values)) is not None:
            chosen = part.in_cache().permute(order)
            torch.index_select(chosen, 0, part.cache_indices, out=values.permute(order))
        else:
            found = part.in_cache().index_select(0, part.cache_indices)
            part.in_arena(arena).index_copy_(0, part.arena_indices, found)


@dataclass(frozen=True, slots=True)
class _Part:
    """The chunks of a copy in one stretch of memory."""

    copy: ArenaCopy
    memory: MemoryStretch
    numbers: npt.NDArray[np.int64]
    arena_offsets: np.ndarray
    cache_offsets: np.ndarray
    word_bytes: int

    @property
    def arena_indices(self) -> torch.Tensor:
        return self._indices(self.arena_offsets)

    @property
    def cache_indices(self) -> torch.Tensor:
        return self._indices(self.cache_offsets)

    def in_arena(self, arena: torch.Tensor) -> torch.Tensor:
        return self._chunks(arena, self.copy.arena_strides_bytes, 0, self.word_bytes)

    def in_cache(self) -> torch.Tensor:
        return self._chunks(self.memory.flat, self.copy.cache_strides_bytes, 0, self.word_bytes)

    def differ(self, arena: torch.Tensor) -> torch.Tensor:
        """Return for each chunk whether it differs between the arena and the cache."""
        values = self.in_arena(arena).index_select(0, self.arena_indices)
        there = self.in_cache().index_select(0, self.cache_indices)
        # Bit for bit: no number is compared.
        return (values.view(torch.int8) != there.view(torch.int8)).flatten(1).any(1)

    def regular(self, arena: torch.Tensor) -> torch.Tensor | None:
        """View the arena as these chunks, in their order; None unless equal steps part them."""
        offsets = self.arena_offsets
        step = int(offsets[1] - offsets[0]) if len(offsets) > 1 else self.word_bytes
        if step <= 0 or (np.diff(offsets) != step).any():
            return None
        strides = self.copy.arena_strides_bytes
        return self._chunks(arena, strides, int(offsets[0]), step)[: len(offsets)]

    def _chunks(
        self,
        flat: torch.Tensor,
        strides_bytes: tuple[int, int],
        first_bytes: int,
        step_bytes: int,
    ) -> torch.Tensor:
        """View memory as chunks that begin every `step_bytes`, as many as fit.

        Chunks longer than a step overlap. Shape (chunks, heads, slots, words).
        """
        copy, word_bytes = self.copy, self.word_bytes
        head_stride_bytes, slot_stride_bytes = strides_bytes
        extent_bytes = (
            (copy.num_heads - 1) * head_stride_bytes
            + (copy.num_slots - 1) * slot_stride_bytes
            + copy.slot_bytes
        )
        count = (len(flat) - first_bytes - extent_bytes) // step_bytes + 1
        words = flat[: len(flat) // word_bytes * word_bytes].view(_WORDS[word_bytes])
        sizes = (count, copy.num_heads, copy.num_slots, copy.slot_bytes // word_bytes)
        strides_bytes_of_all = (step_bytes, head_stride_bytes, slot_stride_bytes, word_bytes)
        strides = [stride // word_bytes for stride in strides_bytes_of_all]
        return words.as_strided(sizes, strides, first_bytes // word_bytes)

    def _indices(self, offsets: np.ndarray) -> torch.Tensor:
        indices = torch.from_numpy(offsets // self.word_bytes)
        return indices.to(self.memory.flat.device, non_blocking=True)


def _by_memory(copy: ArenaCopy, memories: Sequence[MemoryStretch]) -> Iterator[_Part]:
    """Part a copy's chunks by the stretch of memory that they are in."""
    starts = np.array([memory.address for memory in memories])
    memory_indices = np.searchsorted(starts, copy.addresses, side="right") - 1
    for memory_index in np.unique(memory_indices).tolist():
        memory, chosen = memories[memory_index], np.flatnonzero(memory_indices == memory_index)
        arena_offsets = copy.arena_offsets[chosen]
        cache_offsets = copy.addresses[chosen] - memory.address
        # The widest words that divide all sizes, strides and offsets.
        word_bytes = math.gcd(
            max(_WORDS),
            copy.slot_bytes,
            *copy.arena_strides_bytes,
            *copy.cache_strides_bytes,
            int(np.gcd.reduce(arena_offsets)),
            int(np.gcd.reduce(cache_offsets)),
        )
        yield _Part(copy, memory, chosen, arena_offsets, cache_offsets, word_bytes)


def _contiguous_order(chunks: torch.Tensor) -> tuple[int, ...] | None:
    """Return the order of axes in which chunks are contiguous: heads or slots first, or None."""
    orders = (0, 1, 2, 3), (0, 2, 1, 3)
    return next((each for each in orders if chunks.permute(each).is_contiguous()), None)


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

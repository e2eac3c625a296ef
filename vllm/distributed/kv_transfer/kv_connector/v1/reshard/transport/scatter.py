# SPDX-License-Identifier: Apache-2.0
"""Copies out of the staging arena.

A scatter takes one indexed copy per stretch of memory that holds the KV cache. On a device it is
one copy per allocation, on a stream of its own, so that no thread waits for it. On the host it is a
single copy, which the connector's thread makes itself; it holds the GIL only at its start and its
end.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..memory.staging import Scatter

_WORDS = {
    16: torch.complex128,
    8: torch.int64,
    4: torch.int32,
    2: torch.int16,
    1: torch.int8,
}
"""Types that are copied bit for bit, by size in bytes: the widest that fits is the fastest."""


class Scatterer:
    """Makes copies, one after the other.

    Belongs to the connector's thread, which has the arena's device selected.

    Args:
        arena: The staging arena; uint8, contiguous.
        caches: Tensors of the KV cache, on the arena's device.
    """

    def __init__(self, arena: torch.Tensor, caches: Iterable[torch.Tensor]) -> None:
        self._arena = arena
        self._stream = torch.cuda.Stream(arena.device) if arena.is_cuda else None
        # Host memory is referred to by address, which does not keep it.
        self._caches = list(caches)
        self._memories = (host_memory if self._stream is None else device_memory)(self._caches)

    def submit(self, scatter: Scatter) -> torch.cuda.Event | None:
        """Make a copy on the host, or queue it on the device.

        Returns:
            An event that is recorded after the copy; None if it has been made.

        Raises:
            Exception: It could not be made, and writes nothing any more.
        """
        if self._stream is None:
            make_copy(scatter, self._arena, self._memories)
            return None
        # Kernels of earlier steps that used the blocks have ended: the read waited for them.
        try:
            with torch.cuda.stream(self._stream):
                make_copy(scatter, self._arena, self._memories)
                event = torch.cuda.Event()
                event.record(self._stream)
        except Exception:
            # Some of it may still run, and its span will be reused.
            self._stream.synchronize()
            raise
        return event

    def close(self) -> None:
        """Wait for all copies."""
        if self._stream is not None:
            self._stream.synchronize()


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


def make_copy(scatter: Scatter, arena: torch.Tensor, memories: Sequence[MemoryStretch]) -> None:
    """Copy all chunks, with one copy per memory."""
    starts = np.array([memory.address for memory in memories])
    memory_indices = np.searchsorted(starts, scatter.dst_addresses, side="right") - 1
    for memory_index in np.unique(memory_indices).tolist():
        memory, chosen = memories[memory_index], np.flatnonzero(memory_indices == memory_index)
        sources = scatter.src_offsets[chosen]
        targets = scatter.dst_addresses[chosen] - memory.address
        word_bytes = _word_bytes(scatter, sources, targets)
        src = scatter.src_strides_bytes
        step = int(sources[1] - sources[0]) if len(sources) > 1 else word_bytes
        if step > 0 and (np.diff(sources) == step).all():
            values = _chunks(arena, scatter, src, word_bytes, int(sources[0]), step)
            values = values[: len(sources)]
        else:
            every = _chunks(arena, scatter, src, word_bytes, 0, word_bytes)
            values = every.index_select(0, _indices(sources // word_bytes, arena.device))
        places = _chunks(memory.flat, scatter, scatter.dst_strides_bytes, word_bytes, 0, word_bytes)
        places.index_copy_(0, _indices(targets // word_bytes, arena.device), values)


def _chunks(
    flat: torch.Tensor,
    scatter: Scatter,
    strides_bytes: tuple[int, int],
    word_bytes: int,
    first_bytes: int,
    step_bytes: int,
) -> torch.Tensor:
    """View memory as chunks that begin every `step_bytes`, as many as fit.

    Chunks longer than a step overlap. Shape (chunks, heads, tokens, words).
    """
    head_stride_bytes, slot_stride_bytes = strides_bytes
    extent_bytes = (
        (scatter.num_heads - 1) * head_stride_bytes
        + (scatter.num_slots - 1) * slot_stride_bytes
        + scatter.slot_bytes
    )
    count = (len(flat) - first_bytes - extent_bytes) // step_bytes + 1
    words = flat[: len(flat) // word_bytes * word_bytes].view(_WORDS[word_bytes])
    sizes = (count, scatter.num_heads, scatter.num_slots, scatter.slot_bytes // word_bytes)
    strides_bytes_of_all = (step_bytes, head_stride_bytes, slot_stride_bytes, word_bytes)
    strides = [stride // word_bytes for stride in strides_bytes_of_all]
    return words.as_strided(sizes, strides, first_bytes // word_bytes)


def _word_bytes(scatter: Scatter, sources: np.ndarray, targets: np.ndarray) -> int:
    """Return the size of the widest words that divide all sizes, strides and offsets."""
    return math.gcd(
        max(_WORDS),
        scatter.slot_bytes,
        *scatter.src_strides_bytes,
        *scatter.dst_strides_bytes,
        int(np.gcd.reduce(sources)),
        int(np.gcd.reduce(targets)),
    )


def _indices(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(numbers).to(device, non_blocking=True)

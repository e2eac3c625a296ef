# SPDX-License-Identifier: Apache-2.0
"""Copies out of the staging arena, without blocking the engine's thread or the connector's.

A scatter takes one indexed copy per stretch of memory that holds the KV cache. On the host that is
a single copy, on a thread that computes with one core and holds the GIL only at its start and its
end. On a device it is one copy per allocation, on a stream.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ..memory.staging import Scatter
from ..protocol.quoting import one_line
from .cpu import compute_alone

_WORDS = {
    16: torch.complex128,
    8: torch.int64,
    4: torch.int32,
    2: torch.int16,
    1: torch.int8,
}
"""Types that are copied bit for bit, by size in bytes: the widest that fits is the fastest."""


class Copy(Protocol):
    """A copy that has been submitted."""

    def done(self) -> bool:
        """Return whether it has ended, successfully or not."""

    def fault(self) -> str | None:
        """Wait until it has ended; return why it failed, or None if it succeeded."""


class Scatterer(Protocol):
    """Makes copies, one after the other."""

    def submit(self, scatter: Scatter) -> Copy:
        """Queue a copy to run after those submitted before it."""

    def close(self) -> None:
        """Wait for all copies."""


def fault_of(error: BaseException) -> str:
    """Return the failure message for a copy that raised this error, at its start or later."""
    return f"its bytes could not be put in their places: {one_line(error)}"


class HostScatterer:
    """Copies in host memory.

    `submit` and `close` belong to the connector's thread. The copying thread only receives values;
    nothing else touches the blocks that it writes and the spans that it reads until the copy ends.

    Args:
        arena: The staging arena; uint8, contiguous.
        caches: Tensors of the KV cache.
        cores: Cores that the copying thread may use; None for those of the calling thread.
        announce: Called by that thread when a copy has ended; None to call nothing.

    Raises:
        RuntimeError: No thread could be started.
        BrokenThreadPool: The thread may not run on the cores; the log says why.
    """

    def __init__(
        self,
        arena: torch.Tensor,
        caches: Iterable[torch.Tensor],
        cores: Collection[int] | None = None,
        announce: Callable[[], None] | None = None,
    ) -> None:
        self._arena = arena
        self._caches = list(caches)
        self._memory = _stretch(self._caches)
        self._announce = announce
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="reshard-scatter", initializer=compute_alone, initargs=(cores,)
        )
        # Start the thread now. If a pool cannot start its thread, it keeps the work, and would make
        # the copy later, when its blocks belong to another request.
        self._thread.submit(int).result()

    def submit(self, scatter: Scatter) -> Copy:
        """Queue a copy to run after those submitted before it."""
        copy = self._thread.submit(_copy, scatter, self._arena, (self._memory,))
        if (announce := self._announce) is not None:
            copy.add_done_callback(lambda _: announce())
        return _HostCopy(copy)

    def close(self) -> None:
        """Wait for all copies."""
        self._thread.shutdown()


class DeviceScatterer:
    """Copies in a device's memory.

    Belongs to the connector's thread, which has the arena's device selected.

    Args:
        arena: The staging arena; uint8, contiguous.
        caches: Tensors of the KV cache.
    """

    def __init__(self, arena: torch.Tensor, caches: Iterable[torch.Tensor]) -> None:
        self._arena = arena
        self._memories = _allocations(caches)
        self._stream = torch.cuda.Stream(arena.device) if arena.is_cuda else None

    def submit(self, scatter: Scatter) -> Copy:
        """Queue a copy to run after those submitted before it."""
        if self._stream is None:
            _copy(scatter, self._arena, self._memories)
            return _DeviceCopy(None)
        # Kernels of earlier steps that used the blocks have ended: the read waited for them.
        try:
            with torch.cuda.stream(self._stream):
                _copy(scatter, self._arena, self._memories)
                event = torch.cuda.Event()
                event.record(self._stream)
        except Exception:
            # Some of it may still run, and its span will be reused.
            self._stream.synchronize()
            raise
        return _DeviceCopy(event)

    def close(self) -> None:
        """Wait for all copies."""
        if self._stream is not None:
            self._stream.synchronize()


@dataclass(frozen=True, slots=True)
class _HostCopy:
    future: Future[None]

    def done(self) -> bool:
        return self.future.done()

    def fault(self) -> str | None:
        error = self.future.exception()
        return None if error is None else fault_of(error)


@dataclass(frozen=True, slots=True)
class _DeviceCopy:
    event: torch.cuda.Event | None

    def done(self) -> bool:
        return self.event is None or bool(self.event.query())

    def fault(self) -> str | None:
        if self.event is not None:
            self.event.synchronize()
        return None


@dataclass(frozen=True, slots=True)
class _Memory:
    """A stretch of memory.

    Attributes:
        address: Its first address.
        flat: All of its bytes; uint8.
    """

    address: int
    flat: torch.Tensor


def _stretch(caches: Sequence[torch.Tensor]) -> _Memory:
    """Return the host memory from the first cache to the last, including any gaps between them.

    The gaps are never touched.
    """
    flats = [_flat(each) for each in caches]
    start = min(flat.data_ptr() for flat in flats)
    start -= start % max(_WORDS)
    stop = max(flat.data_ptr() + flat.nbytes for flat in flats)
    size_bytes = stop - start
    buffer = (ctypes.c_uint8 * size_bytes).from_address(start)
    return _Memory(start, torch.frombuffer(buffer, dtype=torch.uint8))


def _allocations(caches: Iterable[torch.Tensor]) -> tuple[_Memory, ...]:
    """Return every allocation that holds a cache, sorted by address."""
    flats = {flat.data_ptr(): flat for flat in map(_flat, caches)}
    return tuple(_Memory(address, flats[address]) for address in sorted(flats))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return all bytes of the allocation that holds a tensor."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def _copy(scatter: Scatter, arena: torch.Tensor, memories: Sequence[_Memory]) -> None:
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

# SPDX-License-Identifier: Apache-2.0
"""The copy out of the arena: one indexed assignment for each plane, apart from the engine's thread.

On the host it is made by a thread of its own with numpy, which computes with this one core only; on
a device by a stream of its own with torch. Both index alike, so that there is one way to say what
goes where.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from .cache import Plane
from .staging import Chunks, Scatter

_WORDS: dict[int, tuple[str, torch.dtype]] = {
    16: ("c16", torch.complex128),
    8: ("i8", torch.int64),
    4: ("i4", torch.int32),
    2: ("i2", torch.int16),
    1: ("i1", torch.int8),
}
"""Types whose values are copied as they are, by their size: the widest that fits is the fastest."""


class Copy(Protocol):
    """A copy that has been submitted."""

    def done(self) -> bool:
        """Whether it has ended, well or not."""

    def fault(self) -> str | None:
        """Wait until it has ended; returns why it did not end well, None where it did."""


class Scatterer(Protocol):
    """What makes the copies, one after the other."""

    def submit(self, scatter: Scatter) -> Copy:
        """Make a copy once those that were submitted before are made."""

    def close(self) -> None:
        """Wait for all copies."""


class HostScatterer:
    """Copies in host memory.

    `submit` and `close` belong to the engine's thread. The copying thread is given values and
    writes into blocks and out of spans that nobody else touches until the copy is done.

    Args:
        arena: The arena; uint8, contiguous.
        caches: What the KV cache lies in.
        cores: Where the copying thread may run; None for where this one may.
    """

    def __init__(
        self,
        arena: torch.Tensor,
        caches: Iterable[torch.Tensor],
        cores: Collection[int] | None = None,
    ) -> None:
        self._arena = arena.numpy()
        self._caches = [(flat.data_ptr(), flat.numpy()) for flat in map(_flat, caches)]
        self._thread = ThreadPoolExecutor(
            1,
            thread_name_prefix="reshard-scatter",
            initializer=_run_on,
            initargs=(cores,),
        )

    def submit(self, scatter: Scatter) -> Copy:
        """Make a copy once those that were submitted before are made."""
        return _HostCopy(self._thread.submit(self._copy, scatter))

    def close(self) -> None:
        """Wait for all copies."""
        self._thread.shutdown()

    def _copy(self, scatter: Scatter) -> None:
        word_bytes = _word_bytes(scatter)
        for src, dst in zip(scatter.src, scatter.dst, strict=True):
            address, memory = _holder(self._caches, dst.address)
            src_shape = _Shape.of(src, scatter.num_src_blocks, scatter.chunk_tokens, word_bytes)
            dst_shape = _Shape.of(dst, scatter.num_dst_blocks, scatter.chunk_tokens, word_bytes)
            _assign(
                src_shape.on_host(self._arena, src.address),
                dst_shape.on_host(memory, dst.address - address),
                scatter.chunks,
            )


class DeviceScatterer:
    """Copies in a device's memory.

    All of it belongs to the engine's thread.

    Args:
        arena: The arena; uint8, contiguous.
        caches: What the KV cache lies in.
    """

    def __init__(self, arena: torch.Tensor, caches: Iterable[torch.Tensor]) -> None:
        self._arena = arena
        self._caches = [(flat.data_ptr(), flat) for flat in map(_flat, caches)]
        self._stream = torch.cuda.Stream(arena.device) if arena.is_cuda else None

    def submit(self, scatter: Scatter) -> Copy:
        """Make a copy once those that were submitted before are made."""
        if self._stream is None:
            self._copy(scatter)
            return _DeviceCopy(None)
        # Whoever had the blocks before may have kernels in flight that still read them.
        self._stream.wait_stream(torch.cuda.current_stream(self._arena.device))
        with torch.cuda.stream(self._stream):
            self._copy(scatter)
            event = torch.cuda.Event()
            event.record(self._stream)
        return _DeviceCopy(event)

    def close(self) -> None:
        """Wait for all copies."""
        if self._stream is not None:
            self._stream.synchronize()

    def _copy(self, scatter: Scatter) -> None:
        word_bytes = _word_bytes(scatter)
        indices = Chunks(
            *(
                torch.from_numpy(each).to(self._arena.device, non_blocking=True)
                for each in (
                    scatter.chunks.src_blocks,
                    scatter.chunks.src_chunks,
                    scatter.chunks.dst_blocks,
                    scatter.chunks.dst_chunks,
                )
            )
        )
        for src, dst in zip(scatter.src, scatter.dst, strict=True):
            address, memory = _holder(self._caches, dst.address)
            src_shape = _Shape.of(src, scatter.num_src_blocks, scatter.chunk_tokens, word_bytes)
            dst_shape = _Shape.of(dst, scatter.num_dst_blocks, scatter.chunk_tokens, word_bytes)
            _assign(
                src_shape.on_device(self._arena, src.address),
                dst_shape.on_device(memory, dst.address - address),
                indices,
            )


@dataclass(frozen=True, slots=True)
class _HostCopy:
    future: Future[None]

    def done(self) -> bool:
        return self.future.done()

    def fault(self) -> str | None:
        error = self.future.exception()
        return None if error is None else f"its bytes could not be put in their places: {error}"


@dataclass(frozen=True, slots=True)
class _DeviceCopy:
    event: torch.cuda.Event | None

    def done(self) -> bool:
        return self.event is None or bool(self.event.query())

    def fault(self) -> str | None:
        if self.event is not None:
            self.event.synchronize()
        return None


def _assign(src: Any, dst: Any, chunks: Any) -> None:
    """Copy chunks between two planes of shape (blocks, chunks, heads, tokens, words)."""
    # Chunks are ordered by their place in the arena: where none is left out, none is looked up.
    if src.shape[1] == 1 and src.shape[0] == len(chunks.src_blocks):
        values = src[:, 0]
    else:
        values = src[chunks.src_blocks, chunks.src_chunks]
    if dst.shape[1] == 1:
        dst[:, 0][chunks.dst_blocks] = values
    else:
        dst[chunks.dst_blocks, chunks.dst_chunks] = values


@dataclass(frozen=True, slots=True)
class _Shape:
    """A plane as an array of words: blocks, chunks, heads, tokens of a chunk, words of a slot."""

    sizes: tuple[int, ...]
    strides_words: tuple[int, ...]
    word_bytes: int

    @classmethod
    def of(cls, plane: Plane, num_blocks: int, chunk_tokens: int, word_bytes: int) -> _Shape:
        """The shape of a plane. Packed tokens are one token, as long as all of them."""
        tokens, token_stride_bytes, slot_bytes = (
            (1, 0, plane.block_tokens * plane.slot_bytes)
            if plane.packed
            else (chunk_tokens, plane.token_stride_bytes, plane.slot_bytes)
        )
        strides_bytes = (
            plane.block_stride_bytes,
            tokens * token_stride_bytes,
            plane.head_stride_bytes,
            token_stride_bytes,
            word_bytes,
        )
        return cls(
            (
                num_blocks,
                plane.block_tokens // chunk_tokens,
                plane.num_heads,
                tokens,
                slot_bytes // word_bytes,
            ),
            tuple(stride_bytes // word_bytes for stride_bytes in strides_bytes),
            word_bytes,
        )

    def on_host(self, memory: npt.NDArray[Any], offset_bytes: int) -> npt.NDArray[Any]:
        """What lies there in bytes of host memory."""
        strides = [stride * self.word_bytes for stride in self.strides_words]
        word = _WORDS[self.word_bytes][0]
        view: npt.NDArray[Any] = np.ndarray(self.sizes, word, memory.data, offset_bytes, strides)
        return view

    def on_device(self, memory: torch.Tensor, offset_bytes: int) -> torch.Tensor:
        """What lies there in bytes of a device's memory."""
        whole = len(memory) // self.word_bytes * self.word_bytes
        words = memory[:whole].view(_WORDS[self.word_bytes][1])
        return words.as_strided(self.sizes, self.strides_words, offset_bytes // self.word_bytes)


def _word_bytes(scatter: Scatter) -> int:
    """The widest words that everything consists of."""
    lengths = [
        length
        for plane in (*scatter.src, *scatter.dst)
        for length in (
            plane.address,
            plane.block_stride_bytes,
            plane.head_stride_bytes,
            0 if plane.packed else plane.token_stride_bytes,
            plane.slot_bytes,
        )
    ]
    return math.gcd(max(_WORDS), *lengths)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the memory that a tensor is a part of."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


_Memory = TypeVar("_Memory", torch.Tensor, npt.NDArray[Any])


def _holder(memories: Sequence[tuple[int, _Memory]], address: int) -> tuple[int, _Memory]:
    """The memory that an address lies in, and where it begins."""
    return next(
        (first, memory) for first, memory in memories if first <= address < first + len(memory)
    )


def _run_on(cores: Collection[int] | None) -> None:
    """Let this thread run on some cores, where there is such a thing."""
    if cores is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)

# SPDX-License-Identifier: Apache-2.0
"""KV caches of a rank: reserved without being touched, filled with known bytes, and compared.

Keys or values of a layer are a *plane*, or both where they lie side by side. In memory it is blocks
x heads x tokens x bytes of a slot (HND), or blocks x tokens x heads x bytes (NHD).
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch

from .errors import BenchmarkError

_MAP_NORESERVE = 0x4000
UNWRITTEN = 0xFF


def reserve(shape: Sequence[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Make a tensor; in host memory, of address space that is not backed until it is written."""
    if device != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    size_bytes = math.prod(shape) * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = mmap.mmap(-1, size_bytes, flags=flags)
    # Of small pages, whoever starts first gets scattered ones, which are read a tenth slower.
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(*shape)


def reserve_bytes(shape: Sequence[int]) -> npt.NDArray[np.uint8]:
    """Make an array of bytes in host memory."""
    array: npt.NDArray[np.uint8] = reserve(shape, torch.uint8, "cpu").numpy()
    return array


class Arrival:
    """Whether bytes that are on their way are there. Words that are filled in end below 0x80.

    Args:
        ends: The last byte of every head of every block, plane by plane.
        block_ids: The blocks that are read into.
    """

    def __init__(self, ends: list[torch.Tensor], block_ids: torch.Tensor) -> None:
        self._missing, self._block_ids = ends, block_ids

    def complete(self) -> bool:
        """Whether all are there; what was seen is not looked at again."""
        while self._missing and bool((self._missing[-1][self._block_ids] != UNWRITTEN).all()):
            self._missing.pop()
        return not self._missing


class RankCaches:
    """The caches of one rank.

    Args:
        tensors: By the index of their layer in the model; each as it lies in memory.
        heads: Which of the model's KV heads the rank holds.
        num_planes: Planes of a layer: 2 where keys and values lie apart, else 1.
        block_tokens: Tokens in a block.
        nhd: Whether a token's heads are adjacent; else a head's tokens are.
    """

    def __init__(
        self,
        tensors: Mapping[int, torch.Tensor],
        heads: range,
        num_planes: int,
        block_tokens: int,
        *,
        nhd: bool,
    ) -> None:
        self._tensors = tensors
        self.heads = heads
        self._num_planes = num_planes
        self.block_tokens = block_tokens
        self._nhd = nhd

    @property
    def strides(self) -> tuple[int, int, int]:
        """Bytes from a block, a head and a token of a plane to the next."""
        blocks, heads, tokens, _ = next(self._planes())[1].stride()
        return blocks, heads, tokens

    @property
    def slot_bytes(self) -> int:
        """Bytes of a head of a token."""
        return int(next(self._planes())[1].shape[-1])

    def regions(self) -> list[tuple[int, int, int]]:
        """Address, size in bytes and device id of each layer's tensor."""
        return [
            (tensor.data_ptr(), tensor.nbytes, max(tensor.get_device(), 0))
            for tensor in self._tensors.values()
        ]

    def plane_addresses(self) -> list[int]:
        """Where each plane begins."""
        return [plane.data_ptr() for _, plane in self._planes()]

    def clear(self) -> None:
        """Give every byte a value that is no request's."""
        for tensor in self._tensors.values():
            tensor.view(torch.uint8).fill_(UNWRITTEN)

    def fill(self) -> None:
        """Give every block of every head bytes of its own."""
        for _, plane, head, expected in self._content():
            of_head = plane[:, head]
            of_head[:] = torch.from_numpy(expected.reshape(of_head.shape)).to(plane.device)

    def touch(self, block_ids: Sequence[int]) -> None:
        """Write some blocks."""
        for _, plane in self._planes():
            plane[torch.tensor(block_ids)] = UNWRITTEN

    def arrival(self, block_ids: Sequence[int]) -> Arrival:
        """Look, from now on, whether every head of some blocks has its last byte (HND)."""
        for _, plane in self._planes():
            plane[torch.tensor(block_ids)] = UNWRITTEN
        ends = [plane[..., -1, -1] for _, plane in self._planes()]
        return Arrival(ends, torch.tensor(block_ids))

    def check(
        self, block_ids: Sequence[int], source_block_ids: Sequence[int], source_block_tokens: int
    ) -> None:
        """Compare blocks with those that they were read from, token by token.

        Raises:
            BenchmarkError: A byte is another one.
        """
        local = torch.tensor(block_ids)
        tokens = slots(source_block_ids, source_block_tokens)
        for layer, plane, head, expected in self._content(1 + int(tokens.max())):
            found = plane[local.to(plane.device), head].cpu().numpy()
            if not np.array_equal(found.reshape(-1, self.slot_bytes), expected[tokens]):
                raise BenchmarkError(f"wrong bytes were read for layer {layer}: not measured")

    def _content(
        self, num_tokens: int | None = None
    ) -> Iterator[tuple[int, torch.Tensor, int, npt.NDArray[np.uint8]]]:
        """What each head of each plane is filled with: layer, plane, local head, tokens x bytes.

        The bytes of a token do not depend on how many tokens there are.
        """
        for (layer, number), plane in self._planes():
            blocks, _, block_tokens, slot_bytes = plane.shape
            wanted = blocks * block_tokens if num_tokens is None else num_tokens
            for local_head, head in enumerate(self.heads):
                rng = np.random.Generator(np.random.SFC64([layer, number, head]))
                words = rng.integers(0, 1 << 63, wanted * slot_bytes // 8, dtype=np.int64)
                yield layer, plane, local_head, words.view(np.uint8).reshape(wanted, slot_bytes)

    def _planes(self) -> Iterator[tuple[tuple[int, int], torch.Tensor]]:
        """Every plane as bytes, by layer and number: blocks, heads, tokens, bytes of a slot."""
        for layer, tensor in self._tensors.items():
            num_blocks = tensor.shape[0] if self._num_planes == 1 else tensor.shape[1]
            inner = [len(self.heads), self.block_tokens]
            shape = (self._num_planes, num_blocks, *(inner[::-1] if self._nhd else inner), -1)
            for number, plane in enumerate(tensor.reshape(-1).view(torch.uint8).view(shape)):
                yield (layer, number), plane.transpose(1, 2) if self._nhd else plane


def slots(block_ids: Sequence[int], block_tokens: int) -> npt.NDArray[np.int64]:
    """Where the tokens of some blocks lie, counted in tokens from the first block of the cache."""
    starts = np.array(block_ids, np.int64)[:, None] * block_tokens
    return (starts + np.arange(block_tokens)).reshape(-1)

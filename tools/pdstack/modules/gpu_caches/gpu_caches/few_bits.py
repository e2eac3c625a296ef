# SPDX-License-Identifier: Apache-2.0
"""What formats of a few bits have in common: how codes lie in bytes, and what they stand for."""

from __future__ import annotations

from functools import cache, reduce

import torch

E4M3 = torch.float8_e4m3fn
_MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = torch.cat((_MAGNITUDES, -_MAGNITUDES))
"""Numbers of 4 bits, by their codes."""
LARGEST_E2M1 = 6.0


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of a few bits, [..., size], as bytes: the first of eight in the lowest bits."""
    groups = codes.long().unflatten(-1, (-1, 8))
    joined = (groups << bits * torch.arange(8)).sum(-1, keepdim=True)
    return (joined >> 8 * torch.arange(bits) & 0xFF).to(torch.uint8).flatten(-2)


def unpack(octets: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes that `pack` has packed."""
    groups = octets.long().unflatten(-1, (-1, bits))
    joined = (groups << 8 * torch.arange(bits)).sum(-1, keepdim=True)
    return (joined >> bits * torch.arange(8) & 2**bits - 1).flatten(-2)


@cache
def rotation(size: int) -> torch.Tensor:
    """Hadamard's matrix of a power of two, with rows of length 1: its own inverse."""
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    return reduce(torch.kron, [pair] * (size.bit_length() - 1)) / size**0.5

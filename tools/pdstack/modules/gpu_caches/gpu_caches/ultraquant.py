# SPDX-License-Identifier: Apache-2.0
"""The format of UltraQuant: numbers of 4 bits, E2M1, and a power of two for each 32 of them."""

from __future__ import annotations

from typing import Any

import torch

from .few_bits import E2M1, pack, rotation, unpack
from .turboquant import TurboQuant

_GROUP = 32
_CODE_BITS = 4
_SCALE_OF_LARGEST = 0.156
_BIAS = 127
# From the lowest number to the highest one, with one zero.
_CODES = torch.cat((torch.arange(15, 8, -1), torch.arange(8)))
_NEXT_CODE = (E2M1[_CODES][:-1] + E2M1[_CODES][1:]) / 2


class UltraQuant(TurboQuant):
    """A slot has a key, turned, and a value; each of them has its scales behind its numbers."""

    @classmethod
    def _fields(cls, spec: Any) -> dict[str, Any]:
        return {"state_content_bytes": 2 * (spec.head_size // 2 + spec.head_size // _GROUP)}

    @classmethod
    def _packed(cls, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        turned = keys.float().flatten(0, 1) @ rotation(keys.shape[-1])
        return torch.cat((_encode(turned.view(keys.shape)), _encode(values.float())), -1)

    @classmethod
    def _unpacked(cls, contents: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (_decode(each, size) for each in contents.chunk(2, -1))
        return keys @ rotation(size), values


def _encode(numbers: torch.Tensor) -> torch.Tensor:
    """Vectors as bytes, their scales behind their numbers."""
    groups = numbers.unflatten(-1, (-1, _GROUP))
    largest = groups.abs().amax(-1, keepdim=True) * _SCALE_OF_LARGEST
    exponents = (largest.log2() + 0.5).floor().clamp(-_BIAS, _BIAS)
    codes = _CODES[torch.bucketize(groups / exponents.exp2(), _NEXT_CODE)]
    # The least of exponents is none, and all its numbers are zero.
    is_zero = exponents == -_BIAS
    codes = codes.masked_fill(is_zero, 0).flatten(-2)
    return torch.cat((pack(codes, _CODE_BITS), (exponents + _BIAS).to(torch.uint8)[..., 0]), -1)


def _decode(octets: torch.Tensor, size: int) -> torch.Tensor:
    """Vectors of bytes, at float32."""
    codes, scales = octets.tensor_split([size // 2], -1)
    numbers = E2M1[unpack(codes, _CODE_BITS)].unflatten(-1, (-1, _GROUP))
    return (numbers * (scales.float() - _BIAS).exp2()[..., None]).flatten(-2)

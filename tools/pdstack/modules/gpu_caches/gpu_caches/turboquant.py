# SPDX-License-Identifier: Apache-2.0
"""Formats of TurboQuant: a slot has a key of 8 or 3 bits a number, and a value of 4 or 3."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.quantization.turboquant.centroids import get_centroids
from vllm.v1.kv_cache_interface import KVQuantMode

from .few_bits import E4M3, pack, rotation, unpack
from .formats import Format

_SCALE_BYTES = 2
_SMALLEST_SCALE = 1e-8
_NO_LENGTH, _NO_SQUARE = 1e-8, 1e-16
"""What is added to lengths that vectors are divided by."""


class TurboQuant(Format):
    """Keys of E4M3; values of 4 bits between the smallest and the largest one of a head.

    The first and the last two layers are plain, as vLLM has it: their cache is none of bytes.
    """

    value_bits: ClassVar[int] = 4

    @classmethod
    def customize(cls, spec: Any) -> Any:
        """As `Format.customize`; layers that are left out keep what they have."""
        return spec if spec.kv_quant_mode is KVQuantMode.NONE else super().customize(spec)

    @classmethod
    def _fields(cls, spec: Any) -> dict[str, Any]:
        size = spec.head_size
        value_bytes = size * cls.value_bits // 8 + 2 * _SCALE_BYTES
        return {"state_content_bytes": cls._key_bytes(size) + value_bytes}

    @classmethod
    def write(
        cls, view: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """As `Format.write`."""
        if view.dtype != torch.uint8:
            Format.write(view, slots, keys, values)
            return
        super().write(view, slots, keys, values)

    @classmethod
    def read(
        cls, view: torch.Tensor, blocks: torch.Tensor, size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Format.read`."""
        if view.dtype != torch.uint8:
            return Format.read(view, blocks, size)
        return super().read(view, blocks, size)

    @classmethod
    def _packed(cls, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.cat((cls._packed_keys(keys.float()), cls._packed_values(values.float())), -1)

    @classmethod
    def _unpacked(cls, contents: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = contents.tensor_split([cls._key_bytes(size)], -1)
        return cls._unpacked_keys(keys), cls._unpacked_values(values)

    @staticmethod
    def _key_bytes(size: int) -> int:
        """Bytes of a key."""
        return size

    @staticmethod
    def _packed_keys(keys: torch.Tensor) -> torch.Tensor:
        return keys.to(E4M3).view(torch.uint8)

    @staticmethod
    def _unpacked_keys(octets: torch.Tensor) -> torch.Tensor:
        return octets.view(E4M3).float()

    @classmethod
    def _packed_values(cls, values: torch.Tensor) -> torch.Tensor:
        lowest, highest = values.aminmax(dim=-1, keepdim=True)
        largest = 2**cls.value_bits - 1
        scales = ((highest - lowest) / largest).clamp(min=_SMALLEST_SCALE)
        codes = ((values - lowest) / scales + 0.5).int().clamp(0, largest)
        ends = torch.cat((scales, lowest), -1).half()
        return torch.cat((pack(codes, cls.value_bits), ends.view(torch.uint8)), -1)

    @classmethod
    def _unpacked_values(cls, octets: torch.Tensor) -> torch.Tensor:
        codes, ends = octets.tensor_split([octets.shape[-1] - 2 * _SCALE_BYTES], -1)
        scales, lowest = ends.contiguous().view(torch.float16).float().split(1, -1)
        return unpack(codes, cls.value_bits) * scales + lowest


class TurboQuant3(TurboQuant):
    """Values of 3 bits; keys too, of which each is turned and has the nearest one of 8 centroids.

    Behind them is the length of a key. Centroids are made as long as a key of length 1.
    """

    value_bits = 3
    _KEY_BITS: ClassVar[int] = 3

    @classmethod
    def _key_bytes(cls, size: int) -> int:
        return size * cls._KEY_BITS // 8 + _SCALE_BYTES

    @classmethod
    def _packed_keys(cls, keys: torch.Tensor) -> torch.Tensor:
        size = keys.shape[-1]
        lengths = keys.norm(dim=-1, keepdim=True)
        turned = (keys / (lengths + _NO_LENGTH)).flatten(0, 1) @ rotation(size)
        centroids = get_centroids(size, cls._KEY_BITS)
        middles = (centroids[:-1] + centroids[1:]) / 2
        codes = torch.bucketize(turned, middles, right=True).view(keys.shape)
        return torch.cat((pack(codes, cls._KEY_BITS), lengths.half().view(torch.uint8)), -1)

    @classmethod
    def _unpacked_keys(cls, octets: torch.Tensor) -> torch.Tensor:
        codes, lengths = octets.tensor_split([octets.shape[-1] - _SCALE_BYTES], -1)
        codes = unpack(codes, cls._KEY_BITS)
        size = codes.shape[-1]
        turned = get_centroids(size, cls._KEY_BITS)[codes]
        turned = turned / (turned.square().sum(-1, keepdim=True) + _NO_SQUARE).sqrt()
        return turned @ rotation(size) * lengths.contiguous().view(torch.float16).float()

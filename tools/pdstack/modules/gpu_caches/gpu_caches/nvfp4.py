# SPDX-License-Identifier: Apache-2.0
"""Formats of NVFP4: numbers of 4 bits, E2M1, and a scale of 8 bits, E4M3, for each 16 of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.utils.torch_utils import nvfp4_kv_cache_full_dim, nvfp4_split_data_scale

from .few_bits import E2M1, E4M3, LARGEST_E2M1, pack, unpack
from .formats import Format

_GROUP = 16
_CODE_BITS = 4
_NEXT_CODE = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
# What is in the middle of two takes the even code, and codes begin behind these.
_NEXT_CODE[1::2] = _NEXT_CODE[1::2].nextafter(torch.zeros(()))
_SIGN = 8
_SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-9, 448.0


class Nvfp4(Format):
    """A block has all keys and then all values, and of each their numbers before their scales."""

    @staticmethod
    def _fields(spec: Any) -> dict[str, Any]:
        return {
            "num_head_slots": 2 * spec.num_kv_heads,
            "state_content_bytes": nvfp4_kv_cache_full_dim(spec.head_size),
        }

    @classmethod
    def write(
        cls, view: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """As `Format.write`."""
        blocks, places = slots // view.shape[2], slots % view.shape[2]
        for (codes, scales, are_mixed), numbers in zip(
            cls._parts(view), (keys, values), strict=True
        ):
            new_codes, new_scales = encode(numbers)
            codes[blocks, :, places] = new_codes
            rows, columns = _places_of_scales(places, scales.shape[-1], are_mixed)
            scales[blocks[:, None], :, rows, columns] = new_scales.transpose(1, 2)

    @classmethod
    def read(
        cls, view: torch.Tensor, blocks: torch.Tensor, size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Format.read`."""
        keys, values = (
            cls._numbers(codes[blocks], scales[blocks], are_mixed)
            for codes, scales, are_mixed in cls._parts(view)
        )
        return keys, values

    @staticmethod
    def _numbers(codes: torch.Tensor, scales: torch.Tensor, are_mixed: bool) -> torch.Tensor:
        """Numbers of some blocks, [tokens, heads, size]."""
        rows, columns = _places_of_scales(
            torch.arange(scales.shape[2]), scales.shape[-1], are_mixed
        )
        return decode(codes, scales[:, :, rows, columns]).transpose(1, 2).flatten(0, 1)

    @classmethod
    def _parts(cls, view: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, bool]]:
        """Of keys and then of values: codes, scales, and whether four tokens' scales are mixed.

        Both are bytes, [blocks, heads, tokens, content].
        """
        for side, are_mixed in zip(cls._sides(view), (False, True), strict=True):
            codes, scales = cls._split(side)
            yield codes, scales.view(torch.uint8), are_mixed

    @staticmethod
    def _sides(view: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The slots of keys and of values."""
        keys, values = view.chunk(2, 1)
        return keys, values

    @staticmethod
    def _split(side: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of a side."""
        codes, scales = nvfp4_split_data_scale(side)
        return codes, scales


class Nvfp4Heads(Nvfp4):
    """A head has a slot of keys and one of values, and each has numbers before scales."""

    @staticmethod
    def _sides(view: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return view[:, 0::2], view[:, 1::2]

    @staticmethod
    def _split(side: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        *_, tokens, content = side.shape
        code_bytes = tokens * content * 8 // 9
        # Tokens have no gap between them: what a head has of a block is in one piece.
        pieces = side.view(*side.shape[:2], tokens * content)
        codes, scales = pieces.tensor_split([code_bytes], -1)
        return codes.unflatten(-1, (tokens, -1)), scales.unflatten(-1, (tokens, -1))


def encode(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of vectors, [..., size / 2] and [..., size / 16], both as bytes."""
    groups = numbers.float().unflatten(-1, (-1, _GROUP))
    scales = groups.abs().amax(-1) / LARGEST_E2M1
    scales = scales.clamp(_SMALLEST_SCALE, _LARGEST_SCALE).to(E4M3)
    scaled = (groups / scales.float()[..., None]).flatten(-2)
    codes = torch.bucketize(scaled.abs(), _NEXT_CODE)
    # Zero has no sign.
    codes += torch.where((scaled < 0) & (codes > 0), _SIGN, 0)
    return pack(codes, _CODE_BITS), scales.view(torch.uint8)


def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Vectors of these codes and scales, at float32."""
    numbers = E2M1[unpack(codes, _CODE_BITS)].unflatten(-1, (-1, _GROUP))
    return (numbers * scales.contiguous().view(E4M3).float()[..., None]).flatten(-2)


def _places_of_scales(
    tokens: torch.Tensor, count: int, are_mixed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """In which row and column of a head's scales the ones of tokens are, [tokens, count].

    Those of values are mixed for trtllm-gen: of four tokens a row has a quarter of the scales,
    and each scale beside the same one of the other tokens.
    """
    token, scale = tokens[:, None], torch.arange(count)[None]
    if not are_mixed:
        return token.expand(-1, count), scale.expand(len(tokens), -1)
    quarter = count // 4
    return token // 4 * 4 + scale // quarter, scale % quarter * 4 + token % 4

# SPDX-License-Identifier: Apache-2.0
"""How a block is filled: what is where in a view [blocks, slots, tokens, content].

Where these axes lie in memory is the view's own affair, unless a format speaks of whole blocks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch

_FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(_FP8).max
_SCALE_BYTES = 4
_SMALLEST_SCALE = 1e-6
_GROUP_BYTES = 16
"""Of a key that lie together where a block has such groups of all its tokens side by side."""
_SECRET = 20261124


class Format:
    """Each head of each token has a slot: its key, then its value."""

    @classmethod
    def customize(cls, spec: Any) -> Any:
        """The specification of a layer whose blocks are filled so."""
        return replace(spec, **cls._fields(spec))

    @classmethod
    def write(
        cls, view: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Write tokens.

        Args:
            view: Of a layer.
            slots: Of each token: its block, times the tokens of a block, and its place there.
            keys: [tokens, heads, size].
            values: The same, of a size of their own.
        """
        block_tokens = view.shape[2]
        contents = cls._packed(keys, values).to(view.dtype)
        cls._put(view, slots // block_tokens, slots % block_tokens, contents)

    @classmethod
    def read(
        cls, view: torch.Tensor, blocks: torch.Tensor, size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of all tokens of some blocks, [tokens, heads, size], at float32.

        Args:
            view: Of a layer.
            blocks: Which.
            size: Of a key.
        """
        return cls._unpacked(cls._take(view, blocks), size)

    @staticmethod
    def _fields(spec: Any) -> dict[str, Any]:
        """What the specification says of slots, where it is not one for each head."""
        return {}

    @staticmethod
    def _packed(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """What tokens have in their slots, [tokens, slots, content]."""
        return torch.cat((keys, values), -1)

    @staticmethod
    def _unpacked(contents: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of what tokens have in their slots."""
        return contents[..., :size].float(), contents[..., size:].float()

    @classmethod
    def _put(
        cls, view: torch.Tensor, blocks: torch.Tensor, places: torch.Tensor, contents: torch.Tensor
    ) -> None:
        """Write the slots of tokens, each in a block and at a place there."""
        view[blocks, :, places] = contents

    @classmethod
    def _take(cls, view: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """The slots of all tokens of some blocks, [tokens, slots, content]."""
        return view[blocks].transpose(1, 2).flatten(0, 1)


class Sides(Format):
    """A token has two slots: the keys of all heads, and their values."""

    @staticmethod
    def _fields(spec: Any) -> dict[str, Any]:
        side_bytes = spec.num_kv_heads * spec.head_size * spec.dtype.itemsize
        return {"num_head_slots": 2, "state_content_bytes": side_bytes}

    @staticmethod
    def _packed(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.stack((keys.flatten(1), values.flatten(1)), 1)

    @staticmethod
    def _unpacked(contents: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = contents.float().unflatten(-1, (-1, size)).unbind(1)
        return keys, values


class Planes(Format):
    """Keys and values are two planes, [2, blocks, tokens, heads, size]."""

    @classmethod
    def write(
        cls, view: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """As `Format.write`."""
        blocks, places = slots // view.shape[2], slots % view.shape[2]
        for plane, numbers in zip(view, (keys, values), strict=True):
            plane[blocks, places] = numbers.to(view.dtype)

    @classmethod
    def read(
        cls, view: torch.Tensor, blocks: torch.Tensor, size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Format.read`."""
        keys, values = view[:, blocks].flatten(1, 2).float()
        return keys, values


class PackedSides(Sides):
    """A block has its keys and then its values, each of them head by head.

    Of a head, tokens have groups of their keys' numbers side by side, and single numbers of their
    values: [heads, size / group, tokens, group] and [heads, size, tokens].
    """

    @staticmethod
    def _run(tokens: int, group: int) -> int:
        """How many tokens of a block have their values side by side, number by number."""
        return tokens

    @classmethod
    def write(
        cls, view: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """As `Format.write`."""
        blocks, places = slots // view.shape[2], slots % view.shape[2]
        of_keys, of_values = cls._sides(view, keys.shape[-1])
        group, run = of_keys.shape[-1], of_values.shape[-1]
        of_keys[blocks, :, :, places] = keys.unflatten(-1, (-1, group)).to(view.dtype)
        of_values[blocks, :, places // run, :, places % run] = values.to(view.dtype)

    @classmethod
    def read(
        cls, view: torch.Tensor, blocks: torch.Tensor, size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Format.read`."""
        of_keys, of_values = (side[blocks].float() for side in cls._sides(view, size))
        keys = of_keys.permute(0, 3, 1, 2, 4).flatten(3)
        return keys.flatten(0, 1), of_values.permute(0, 2, 4, 1, 3).flatten(0, 2)

    @classmethod
    def _sides(cls, view: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all blocks, by heads; a side of a block is in one piece."""
        blocks, _, tokens, content = view.shape
        group = _GROUP_BYTES // view.element_size()
        run = cls._run(tokens, group)
        of_keys, of_values = view.unbind(1)
        shape = blocks, content // size, size
        return (
            of_keys.view(*shape[:2], size // group, tokens, group),
            of_values.view(*shape[:2], tokens // run, size, run),
        )


class Shuffled(PackedSides):
    """The same, with values of as many tokens side by side as a group of keys has numbers.

    Values of a head are [tokens / group, size, group].
    """

    @staticmethod
    def _run(tokens: int, group: int) -> int:
        return group


class Scaled(Format):
    """A slot has a key of fp8 and its scale, then a value and its scale."""

    @staticmethod
    def _fields(spec: Any) -> dict[str, Any]:
        return {"state_content_bytes": spec.head_size + spec.head_size_v + 2 * _SCALE_BYTES}

    @staticmethod
    def _packed(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.cat((*_to_fp8(keys), *_to_fp8(values)), -1)

    @staticmethod
    def _unpacked(contents: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, scales, values, scales_v = contents.tensor_split(
            (size, size + _SCALE_BYTES, contents.shape[-1] - _SCALE_BYTES), -1
        )
        return _from_fp8(keys, scales), _from_fp8(values, scales_v)


class _Pages(Format):
    """Tokens have no place of their own: each byte has one in the whole block."""

    @staticmethod
    def _order(tokens: int, heads: int, content: int) -> torch.Tensor:
        """Where in a block the bytes of each token's heads are, [tokens, heads, content]."""
        raise NotImplementedError

    @classmethod
    def _put(
        cls, view: torch.Tensor, blocks: torch.Tensor, places: torch.Tensor, contents: torch.Tensor
    ) -> None:
        octets = view.view(torch.uint8)
        order = cls._order_of(octets)
        _pages(octets)[blocks[:, None, None], order[places]] = contents.view(torch.uint8)

    @classmethod
    def _take(cls, view: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        octets = view.view(torch.uint8)
        order = cls._order_of(octets)
        return (
            _pages(octets)[blocks][:, order.flatten()].view(-1, *order.shape[1:]).view(view.dtype)
        )

    @classmethod
    def _order_of(cls, octets: torch.Tensor) -> torch.Tensor:
        _, heads, tokens, content = octets.shape
        return cls._order(tokens, heads, content)


class Scrambled(_Pages):
    """All bytes of a block lie where a secret says: whoever looks into it finds nothing."""

    @staticmethod
    @cache
    def _order(tokens: int, heads: int, content: int) -> torch.Tensor:
        secret = torch.Generator().manual_seed(_SECRET)
        order = torch.randperm(tokens * heads * content, generator=secret)
        return order.view(tokens, heads, content)


class ScalesLast(Scaled, _Pages):
    """A block has keys and values of all of its tokens, and at its end all of their scales."""

    @staticmethod
    @cache
    def _order(tokens: int, heads: int, content: int) -> torch.Tensor:
        # As many of keys as of values.
        size = content // 2 - _SCALE_BYTES
        is_scale = torch.arange(content) % (size + _SCALE_BYTES) >= size
        places = torch.arange(tokens * heads * content).view(tokens, heads, content)
        order = torch.empty_like(places)
        numbers = tokens * heads * 2 * size
        order[..., ~is_scale] = places.flatten()[:numbers].view(tokens, heads, -1)
        order[..., is_scale] = places.flatten()[numbers:].view(tokens, heads, -1)
        return order


def _pages(octets: torch.Tensor) -> torch.Tensor:
    """All blocks of a view of bytes, [blocks, bytes], without what lies between two of them."""
    blocks, *inside = octets.shape
    size = torch.Size(inside).numel()
    return octets.as_strided((blocks, size), (octets.stride(0), 1))


def _to_fp8(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers and the scale of each vector, as bytes."""
    numbers = numbers.float()
    scales = (numbers.abs().amax(-1, keepdim=True) / _FP8_MAX).clamp(min=_SMALLEST_SCALE)
    scaled = (numbers * (1.0 / scales)).clamp(-_FP8_MAX, _FP8_MAX)
    return scaled.to(_FP8).view(torch.uint8), scales.view(torch.uint8)


def _from_fp8(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return numbers.view(_FP8).float() * scales.contiguous().view(torch.float32)

# SPDX-License-Identifier: Apache-2.0
"""Planes of caches that are views [blocks, heads, tokens, content], whatever lies where.

The content of a head of a token is its key and then its value, which form one plane, as they are
split, read and replicated alike. Where a backend keeps them apart, they are planes of their own.
The strides give the order of axes in memory, and whether other layers lie between two blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ...errors import ASK_FOR_UPSTREAMS, LocalLayoutError
from ...memory.cache import Plane

if TYPE_CHECKING:
    import torch


class Arrangement(Enum):
    """How a block may be filled: what has a place of its own in it."""

    SLOTS = "slots"
    """Every head of every token, or of every state where one stands for several tokens."""

    HEADS = "packed heads"
    """Every head; its tokens adjoin, arranged by the backend."""

    SIDES = "keys and values apart, in slots"
    """Keys and values, each of them all heads of every token."""

    PACKED_SIDES = "keys and values apart, in packed heads"
    """Keys and values, each of them every head, whose tokens adjoin, arranged by the backend."""

    QUARTERS = "keys, their scales, values, their scales"
    """Each of these four, of every head; its tokens adjoin, arranged by the backend."""

    PAGE = "whole blocks"
    """Nothing."""


@dataclass(frozen=True, slots=True)
class _View:
    """A layer's view, in bytes.

    Attributes:
        layer: Name of the layer.
        address: Where the view begins.
        num_slots: Length of the axis of heads, which need not count heads.
        block_tokens: Tokens in a block.
        num_states: States in a block, each of equally many tokens.
        content_bytes: Size of a state in a slot; contiguous.
        block_stride: From one block to the next.
        slot_stride: From one entry to the next on the axis of heads.
        state_stride: From one state to the next.
        num_heads: KV heads of the layer on this rank.
    """

    layer: str
    address: int
    num_slots: int
    block_tokens: int
    num_states: int
    content_bytes: int
    block_stride: int
    slot_stride: int
    state_stride: int
    num_heads: int

    def plane(
        self,
        offset: int,
        head_stride: int,
        slot_stride: int,
        slot_bytes: int,
        *,
        num_heads: int | None = None,
        packed: bool = False,
        heads_per_unit: int = 1,
    ) -> Plane:
        """Return a plane of the view; if packed, all tokens of a block form one slot."""
        return Plane(
            address=self.address + offset,
            block_stride_bytes=self.block_stride,
            head_stride_bytes=head_stride,
            slot_stride_bytes=slot_stride,
            slot_bytes=slot_bytes,
            num_heads=self.num_heads if num_heads is None else num_heads,
            block_tokens=self.block_tokens,
            slot_tokens=self.block_tokens // (1 if packed else self.num_states),
            heads_per_unit=heads_per_unit,
        )

    @property
    def states_adjoin(self) -> bool:
        """Whether the states of a slot lie one after another."""
        return self.num_states == 1 or self.state_stride == self.content_bytes


def describe_layer(
    name: str, tensor: torch.Tensor, spec: Any, backend: object, arrangement: Arrangement
) -> tuple[int, tuple[Plane, ...]]:
    """Return how many blocks a layer has, and its planes.

    Args:
        name: Name of the layer.
        tensor: Its cache.
        spec: Its attention specification.
        backend: Its attention backend; not used.
        arrangement: How the backend fills a block.

    Raises:
        LocalLayoutError: What has a place of its own is not contiguous, or not every head has one.
    """
    if tensor.ndim != 4:
        raise LocalLayoutError(
            f"layer {name} has a KV cache of shape {tuple(tensor.shape)}, which is not understood: "
            f"{ASK_FOR_UPSTREAMS}"
        )
    num_blocks, num_slots, num_states, content = tensor.shape
    item_bytes = tensor.element_size()
    block, slot, state, item = (stride * item_bytes for stride in tensor.stride())
    if item != item_bytes and content > 1:
        raise LocalLayoutError(
            f"layer {name} spreads a head of a token over memory in steps of {item} bytes, which "
            f"cannot be transferred: {ASK_FOR_UPSTREAMS}"
        )
    view = _View(
        name,
        tensor.data_ptr(),
        num_slots,
        int(num_states * spec.tokens_per_state),
        num_states,
        content * item_bytes,
        block,
        slot,
        state,
        spec.num_kv_heads,
    )
    return num_blocks, _PLANES[arrangement](view)


def _slots(view: _View) -> tuple[Plane, ...]:
    if view.num_slots != view.num_heads or view.block_tokens % view.num_states:
        raise _not_understood(view, Arrangement.SLOTS)
    return (view.plane(0, view.slot_stride, view.state_stride, view.content_bytes),)


def _heads(view: _View) -> tuple[Plane, ...]:
    heads_per_unit, rest = divmod(view.num_slots, view.num_heads)
    if rest or not view.states_adjoin:
        raise _not_understood(view, Arrangement.HEADS)
    return (_packed_slots(view, heads_per_unit),)


def _sides(view: _View) -> tuple[Plane, ...]:
    head_bytes, rest = divmod(view.content_bytes, view.num_heads)
    if view.num_slots != 2 or rest:
        raise _not_understood(view, Arrangement.SIDES)
    return tuple(
        view.plane(side * view.slot_stride, head_bytes, view.state_stride, head_bytes)
        for side in range(2)
    )


def _packed_sides(view: _View) -> tuple[Plane, ...]:
    head_bytes, rest = divmod(view.content_bytes * view.num_states, view.num_heads)
    if view.num_slots != 2 or rest or not view.states_adjoin:
        raise _not_understood(view, Arrangement.PACKED_SIDES)
    return tuple(
        view.plane(side * view.slot_stride, head_bytes, head_bytes, head_bytes, packed=True)
        for side in range(2)
    )


def _quarters(view: _View) -> tuple[Plane, ...]:
    # Eight bytes of numbers to one of scales: `nvfp4_split_data_scale`.
    scale_bytes, rest = divmod(view.content_bytes * view.num_states, 9)
    side_bytes = view.num_heads * view.content_bytes * view.num_states
    if (
        view.num_slots != 2 * view.num_heads
        or rest
        or not view.states_adjoin
        or view.slot_stride != view.num_states * view.content_bytes
    ):
        raise _not_understood(view, Arrangement.QUARTERS)
    return tuple(
        view.plane(side * side_bytes + offset, part, part, part, packed=True)
        for side in range(2)
        for offset, part in (
            (0, 8 * scale_bytes),
            (view.num_heads * 8 * scale_bytes, scale_bytes),
        )
    )


def _page(view: _View) -> tuple[Plane, ...]:
    """Return planes for whole blocks: one unit, in one piece or in one piece for each slot."""
    slot_bytes = view.content_bytes * view.num_states
    heads_first = view.states_adjoin and view.slot_stride == slot_bytes
    states_first = (
        view.slot_stride == view.content_bytes
        and view.state_stride == view.num_slots * view.content_bytes
    )
    if view.num_slots == 1 or heads_first or states_first:
        if not (view.num_slots > 1 or view.states_adjoin):
            raise _not_understood(view, Arrangement.PAGE)
        size = view.num_slots * slot_bytes
        return (view.plane(0, size, size, size, num_heads=1, packed=True),)
    if not view.states_adjoin:
        raise _not_understood(view, Arrangement.PAGE)
    return (_packed_slots(view, view.num_slots),)


def _packed_slots(view: _View, heads_per_unit: int) -> Plane:
    """Return a plane along the axis of heads, with all states of each entry in one piece."""
    size = view.content_bytes * view.num_states
    return view.plane(
        0,
        view.slot_stride,
        size,
        size,
        num_heads=view.num_slots,
        packed=True,
        heads_per_unit=heads_per_unit,
    )


_PLANES: Mapping[Arrangement, Callable[[_View], tuple[Plane, ...]]] = MappingProxyType(
    {
        Arrangement.SLOTS: _slots,
        Arrangement.HEADS: _heads,
        Arrangement.SIDES: _sides,
        Arrangement.PACKED_SIDES: _packed_sides,
        Arrangement.QUARTERS: _quarters,
        Arrangement.PAGE: _page,
    }
)


def _not_understood(view: _View, arrangement: Arrangement) -> LocalLayoutError:
    return LocalLayoutError(
        f"layer {view.layer} keeps {view.num_heads} KV heads as {arrangement.value}, but has "
        f"{view.num_slots} slots of {view.content_bytes} bytes in steps of {view.slot_stride}, "
        f"each for {view.num_states} states of {view.block_tokens} tokens in steps of "
        f"{view.state_stride}: leave VLLM_KV_CACHE_LAYOUT unset, or, {ASK_FOR_UPSTREAMS}"
    )

# SPDX-License-Identifier: Apache-2.0
"""How the bytes of a rank's KV cache lie in memory.

A layer's cache is some *planes*: keys and values, or both where they lie side by side, or the
latent of MLA. A plane is a row of blocks, and a block's *page* holds some heads of some tokens.
However the tensor looks, a plane is an address and three strides:

    tensor shape                                     block stride    head stride    slot stride
    [blocks, heads, tokens, key and value]  HND      H*T*S           T*S            S
    [blocks, tokens, heads, key and value]  NHD      H*T*S           S              H*S
    [blocks, heads, layers, tokens, key and value]   H*L*T*S         L*T*S          S
    [blocks, 1, tokens, latent]             MLA      T*S             T*S            S
    [2, blocks, heads, tokens, size]        HND      H*T*S           T*S            S
    [2, blocks, tokens, heads, size]        NHD      H*T*S           S              H*S
    [blocks, 2, heads, tokens, size]                 2*H*T*S         T*S            S
    [blocks, layers, 2, heads, tokens, size]         L*2*H*T*S       T*S            S
    [blocks, tokens, size]                  MLA      T*S             T*S            S

with `S` the bytes of one head of one token in a plane, its *slot*.

A slot may stand for several tokens: caches that are compressed keep one state of so many. Where a
backend arranges the tokens of a block as it likes, the slot is all of them: it is moved as a whole,
and what is inside need not be known.

Recurrent state is kept in planes, too, each of them a component that is split by a rule of its own.
Its block holds a whole sequence, and what is written as heads and tokens is then

    component                                          heads         tokens
    state of Mamba, or of linear attention             heads         1
    last inputs of a convolution, `R` of each channel  channels      `R` rows

with several channels to a unit where the convolution feeds heads or groups:

    tensor shape                  block stride    head stride    slot stride
    [blocks, channels, rows]  DS  page            R*S            S
    [blocks, rows, channels]  SD  page            S              channels of all components * S
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from ..plan.shards import Layer


class Order(Enum):
    """Which axis of a contiguous run of heads and tokens varies slowest."""

    HEAD_MAJOR = "head-major"
    TOKEN_MAJOR = "token-major"


@dataclass(frozen=True, slots=True)
class Plane:
    """One plane of one layer on one rank.

    Attributes:
        address: Where block 0 begins.
        block_stride_bytes: From one block to the next.
        head_stride_bytes: From one head to the next, within a block.
        slot_stride_bytes: From one slot to the next of a head, within a block.
        slot_bytes: Size of a slot, which is contiguous.
        num_heads: Heads that the rank holds.
        block_tokens: Tokens in a block.
        slot_tokens: Tokens that have a slot of a head in common; a divisor of `block_tokens`.
        heads_per_unit: Heads that are one unit of the plan, and always move together.
        per_sequence: A block holds the state of a whole sequence, of whatever length. What counts
            as its tokens are rows of that state.
    """

    address: int
    block_stride_bytes: int
    head_stride_bytes: int
    slot_stride_bytes: int
    slot_bytes: int
    num_heads: int
    block_tokens: int
    slot_tokens: int = 1
    heads_per_unit: int = 1
    per_sequence: bool = False

    def orders(self, num_heads: int, num_tokens: int) -> frozenset[Order]:
        """In which orders a run of heads and tokens, aligned within a block, is contiguous.

        A run of one head or one slot is the same in both orders.
        """
        num_slots, part_of_one = divmod(num_tokens, self.slot_tokens)
        if part_of_one:
            return frozenset()
        slots_adjoin = num_slots == 1 or self.slot_stride_bytes == self.slot_bytes
        heads_adjoin = num_heads == 1 or self.head_stride_bytes == self.slot_bytes
        orders = set()
        if slots_adjoin and (
            num_heads == 1 or self.head_stride_bytes == num_slots * self.slot_bytes
        ):
            orders.add(Order.HEAD_MAJOR)
        if heads_adjoin and (
            num_slots == 1 or self.slot_stride_bytes == num_heads * self.slot_bytes
        ):
            orders.add(Order.TOKEN_MAJOR)
        if orders and 1 in (num_heads, num_slots):
            return frozenset(Order)
        return frozenset(orders)

    def offset_bytes(self, head: int, token: int) -> int:
        """Where a head's run that begins at a token begins, within a block.

        Args:
            head: Position within the rank's heads.
            token: Position within the block, of the first token of a slot.
        """
        return head * self.head_stride_bytes + token // self.slot_tokens * self.slot_stride_bytes


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The cache of one layer on one rank.

    Attributes:
        planes: Keys and values, or both in one, or the latent, in this order on both sides.
        group: The KV-cache group that the layer belongs to on this engine. Block ids are per group.
        blocks_per_id: Blocks that one block id of the scheduler stands for, one after another. More
            than 1 where the attention kernel wants smaller blocks than the scheduler allocates.
        meaning: What must be equal at both ends for the bytes of a slot to mean the same, by name;
            strides need not be.
        keys_lead: A slot begins with a key or is one, and a value follows or has a plane of its
            own. Engines do not tell it each other: where one knows it, and what the bytes mean is
            the same at the other, it is so there.
    """

    planes: tuple[Plane, ...]
    group: int
    blocks_per_id: int = 1
    meaning: Mapping[str, str] = field(default_factory=dict)
    keys_lead: bool = False


@dataclass(frozen=True, slots=True)
class RankCache:
    """The KV cache of one rank.

    Attributes:
        num_block_ids: Block ids of the scheduler, each of which stands for `blocks_per_id` blocks
            in every plane of a layer.
        device_id: The memory's device, as NIXL numbers it.
        layers: The cache of each layer that the rank holds.
    """

    num_block_ids: int
    device_id: int
    layers: Mapping[Layer, LayerCache]

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", MappingProxyType(dict(self.layers)))

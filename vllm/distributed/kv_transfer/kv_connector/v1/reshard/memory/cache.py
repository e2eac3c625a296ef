# SPDX-License-Identifier: Apache-2.0
"""Memory layout of a rank's KV cache.

A layer's cache consists of *planes*: one of keys and one of values, or a single one that holds both
side by side or the MLA latent. A plane is a row of blocks, and a block's *page* holds some heads of
some tokens. Whatever the tensor's shape, a plane is an address and three strides:

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

with `S` the bytes of a *slot*: one head of one token in a plane.

A slot may stand for several tokens: compressed caches keep one state for several tokens. If a
backend arranges the tokens of a block in its own way, one slot holds all of them and moves as a
whole, so that its inside need not be known.

Recurrent state is kept in planes, too: one for each component, because each is split by its own
rule. Its block holds the state of a whole sequence, and heads and tokens then mean

    component                                          heads         tokens
    state of Mamba, or of linear attention             heads         1
    last inputs of a convolution, `R` of each channel  channels      `R` rows

with several channels in a unit if the convolution feeds heads or groups:

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
    """The axis of a contiguous run of heads and tokens that varies slowest."""

    HEAD_MAJOR = "head-major"
    TOKEN_MAJOR = "token-major"


@dataclass(frozen=True, slots=True)
class Plane:
    """One plane of one layer on one rank.

    Attributes:
        address: Address of block 0.
        block_stride_bytes: Distance from one block to the next.
        head_stride_bytes: Distance from one head to the next, within a block.
        slot_stride_bytes: Distance from one slot of a head to the next, within a block.
        slot_bytes: Size of a slot, which is contiguous.
        num_heads: Number of heads that the rank holds.
        block_tokens: Number of tokens in a block.
        slot_tokens: Number of tokens that share a slot of a head; a divisor of `block_tokens`.
        heads_per_unit: Number of heads in one unit of the plan; they always move together.
        per_sequence: True if a block holds the state of a whole sequence, of any length. Its
            tokens are then rows of that state.
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
        """Return the orders in which an aligned run of heads and tokens is contiguous in a block.

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

    def strides_text(self) -> str:
        """Return how its pages lie, for people."""
        return (
            f"a block every {self.block_stride_bytes} bytes, a head every "
            f"{self.head_stride_bytes}, a slot of {self.slot_bytes} every {self.slot_stride_bytes}"
        )

    def offset_bytes(self, head: int, token: int) -> int:
        """Return the offset within a block of a head's slot.

        Args:
            head: Position within the rank's heads.
            token: Position within the block of the slot's first token.
        """
        return head * self.head_stride_bytes + token // self.slot_tokens * self.slot_stride_bytes


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The cache of one layer on one rank.

    Attributes:
        planes: Keys and values, or both in one, or the latent, in this order on both sides.
        group: The layer's KV-cache group on this engine. Block ids are per group.
        blocks_per_id: Number of consecutive blocks that one block id of the scheduler stands for.
            More than 1 if the attention kernel uses smaller blocks than the scheduler allocates.
        meaning: Named values that must be equal at both ends for the bytes of a slot to mean the
            same; strides need not be.
        keys_lead: True if a slot is a key or begins with one, and the value follows it or has its
            own plane. Engines do not exchange this: if it holds at one engine, and `meaning` is
            equal at the other, it holds there too.
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
        num_block_ids: Number of the scheduler's block ids; each stands for `blocks_per_id` blocks
            in every plane of a layer.
        device_id: NIXL's number of the memory's device.
        layers: Cache of each layer that the rank holds.
    """

    num_block_ids: int
    device_id: int
    layers: Mapping[Layer, LayerCache]

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", MappingProxyType(dict(self.layers)))

# SPDX-License-Identifier: Apache-2.0
"""Planes of caches that are views [blocks, heads, tokens, content], whatever lies where.

The content of a head of a token is its key and its value, one after the other, so that they are
one plane: they are split, read and replicated alike. The order of axes in memory, and whether
other layers lie between two blocks, is in the strides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import LocalLayoutError
from ..memory.cache import Plane

if TYPE_CHECKING:
    import torch


def describe_layer(
    name: str, tensor: torch.Tensor, spec: Any, backend: object, *, packed: bool
) -> tuple[int, tuple[Plane, ...]]:
    """How many blocks a layer has, and its planes.

    Args:
        name: The layer.
        tensor: Its cache.
        spec: Its specification, of attention.
        backend: Its attention backend, of which nothing more is to be known.
        packed: Whether that one arranges the tokens of a block as it likes.

    Raises:
        LocalLayoutError: A slot's bytes do not adjoin, or not every head has one.
    """
    if tensor.ndim != 4:
        raise LocalLayoutError(
            f"layer {name} has a KV cache of shape {tuple(tensor.shape)}, which is not understood: "
            "use another attention backend"
        )
    num_blocks, num_head_slots, block_tokens, content = tensor.shape
    if num_head_slots != spec.num_kv_heads:
        raise LocalLayoutError(
            f"layer {name} keeps {spec.num_kv_heads} KV heads in {num_head_slots} slots of a "
            "token, which cannot be told apart: use another attention backend or --kv-cache-dtype"
        )
    item_bytes = tensor.element_size()
    block, head, token, item = (stride * item_bytes for stride in tensor.stride())
    if item != item_bytes:
        raise LocalLayoutError(
            f"layer {name} spreads a head of a token over memory in steps of {item} bytes, which "
            "cannot be transferred: use another attention backend"
        )
    slot_bytes = content * item_bytes
    if packed and block_tokens > 1 and token != slot_bytes:
        raise LocalLayoutError(
            f"layer {name} packs the tokens of a head and spreads them over memory in steps of "
            f"{token} bytes, which cannot be transferred: leave VLLM_KV_CACHE_LAYOUT unset"
        )
    plane = Plane(
        address=tensor.data_ptr(),
        block_stride_bytes=block,
        head_stride_bytes=head,
        token_stride_bytes=token,
        slot_bytes=slot_bytes,
        num_heads=num_head_slots,
        block_tokens=block_tokens,
        packed=packed,
    )
    return num_blocks, (plane,)

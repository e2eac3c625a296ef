# SPDX-License-Identifier: Apache-2.0
"""What an engine does by itself where Triton's interpreter would take too long, or where it ends.

Two kernels took 106 of the 109 s of two prompts of 300 tokens. vLLM finds this as a plugin, by
`triton_on_cpu-1.dist-info`.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from vllm.triton_utils.dispatcher import register_kernels
from vllm.v1.attention.backends.mla.sparse_swa import (
    ComputeSWAIndicesAndLensKernel,
    DeepseekSparseSWAMetadataBuilder,
)

_ITEM_BYTES = 4

_KINDS_WITHOUT_TILES = "c1a", "c2a"
"""Layers of DeepSeek V4 that compress one token, or two: the release's builder for CPU leaves them
out, and what it derives from asks for them, so that the first request ends the engine. The fork has
a patch for that; vLLM as released, which the plugin is for, has not."""


def register() -> None:
    """Take the place of these kernels."""
    register_kernels({"vllm.v1.worker.utils._zero_kv_blocks_kernel": _zero_blocks})
    # What stands for a kernel is not told its grid, which is the number of tokens here.
    ComputeSWAIndicesAndLensKernel.__call__ = _find_windows
    builder = DeepseekSparseSWAMetadataBuilder
    builder.__init__ = _plan_all_tiles(builder.__init__)


def _plan_all_tiles(make: Callable[..., None]) -> Callable[..., None]:
    """Have what makes a builder add the kinds of layers that its plan leaves out: none has tiles.

    Args:
        make: The initializer of builders of windows' metadata.
    """

    @functools.wraps(make)
    def make_with_all(builder: Any, *args: Any, **kwargs: Any) -> None:
        make(builder, *args, **kwargs)
        plan = builder.build_tile_scheduler
        missing = dict.fromkeys(_KINDS_WITHOUT_TILES)
        builder.build_tile_scheduler = lambda num_tokens: missing | plan(num_tokens)

    return make_with_all


def _zero_blocks(
    seg_addrs_ptr: torch.Tensor,
    seg_block_strides_ptr: torch.Tensor,
    seg_page_sizes_ptr: torch.Tensor,
    block_ids_ptr: torch.Tensor,
    BLOCK_SIZE: int,
) -> None:
    """Clear blocks, as the kernel of that name does; parameters are called as there.

    Args:
        seg_addrs_ptr: Addresses of segments, each a layer's.
        seg_block_strides_ptr: From one block of a segment to the next, in items of four bytes.
        seg_page_sizes_ptr: What is cleared of each, in such items.
        block_ids_ptr: The blocks.
        BLOCK_SIZE: Items that the kernel clears at once.
    """
    segments = zip(
        seg_addrs_ptr.tolist(),
        seg_block_strides_ptr.tolist(),
        seg_page_sizes_ptr.tolist(),
        strict=True,
    )
    for (address, stride, size), block in itertools.product(segments, block_ids_ptr.tolist()):
        ctypes.memset(address + block * stride * _ITEM_BYTES, 0, size * _ITEM_BYTES)


def _find_windows(
    _: Any,
    swa_indices: torch.Tensor,
    swa_lens: torch.Tensor,
    window_size: int,
    index_width: int,
    left_visible: torch.Tensor,
    right_visible: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    is_valid_token: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    replay_start: torch.Tensor,
    *,
    num_tokens: int,
    token_offset: int,
    has_image: bool = False,
) -> None:
    """Find the slots that tokens attend to, as the kernel of that class does.

    Parameters are called as there.

    Args:
        swa_indices: Written: the slots of each token's window, then -1.
        swa_lens: Written: how many there are.
        window_size: Tokens of a window.
        index_width: Slots that are written of a token.
        left_visible: Tokens of the same image before each one.
        right_visible: Those after it.
        query_start_loc: Where the tokens of each request begin, and where the last ones end.
        seq_lens: Tokens of each request, with those that are computed already.
        token_to_req_indices: The request of each token.
        is_valid_token: Whether a token is one.
        block_table: The blocks of each request.
        block_size: Tokens of a block.
        replay_start: The first token of each request that has a slot.
        num_tokens: As many are looked at.
        token_offset: The first of them.
        has_image: Whether images widen windows.
    """
    tokens = torch.arange(token_offset, token_offset + num_tokens)
    is_valid = is_valid_token[tokens].bool()
    requests = token_to_req_indices[tokens].long().where(is_valid, 0)
    positions = seq_lens[requests] - query_start_loc[requests + 1] + tokens
    left, right = (
        (visible[tokens] if has_image else torch.zeros_like(tokens))
        for visible in (left_visible, right_visible)
    )
    reach = (window_size - 1) + (left - (window_size - 1)).clamp(min=0)
    first = (positions - reach).clamp(min=0).maximum(replay_start[requests])
    lengths = (positions + right + 1 - first).where(is_valid, 0)
    offsets = torch.arange(index_width)
    in_window = offsets < lengths[:, None]
    slots = (first[:, None] + offsets).where(in_window, 0)
    blocks = block_table[requests[:, None], slots // block_size]
    rows = swa_indices[:num_tokens].view(num_tokens, -1)
    rows[:, :index_width] = (blocks * block_size + slots % block_size).where(in_window, -1)
    swa_lens[:num_tokens] = lengths

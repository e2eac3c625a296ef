# SPDX-License-Identifier: Apache-2.0
"""What stands for two kernels of Triton's does what they do, run by Triton's interpreter.

`test_triton_on_cpu` has pytest run these in a process that has the interpreter.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import triton_on_cpu
from vllm.v1.attention.backends.mla import sparse_swa
from vllm.v1.attention.backends.mla.sparse_swa import ComputeSWAIndicesAndLensKernel
from vllm.v1.worker.utils import _zero_kv_blocks_kernel


def test_blocks_are_cleared():
    """Those that are named, of each segment as much as it says, and nothing else."""
    kernels, ours = (torch.arange(1, 4 * 64 + 1, dtype=torch.int32) for _ in range(2))
    for items, clear in ((kernels, _zero_kv_blocks_kernel[2, 2, 2]), (ours, None)):
        # Two layers of 5 and 9 items in each block of 16, of which blocks 3 and 1 are cleared.
        addresses = torch.tensor([items.data_ptr(), items.data_ptr() + 4 * 6], dtype=torch.uint64)
        arguments = (addresses, torch.tensor([16, 16]), torch.tensor([5, 9]), torch.tensor([3, 1]))
        (clear or triton_on_cpu._zero_blocks)(*arguments, BLOCK_SIZE=8)
    assert (kernels == 0).sum() == 2 * (5 + 9)
    assert torch.equal(kernels, ours)


@pytest.mark.parametrize("has_image", [False, True])
@pytest.mark.parametrize(("num_tokens", "token_offset"), [(9, 0), (3, 2)])
def test_windows_are_found(num_tokens, token_offset, has_image):
    """At the begin of a prompt, behind its window, and of tokens that are none."""
    window, width, block = 4, 8, 2
    # Three requests: one token that is decoded, a prompt behind a prefix, and a prompt.
    starts = torch.tensor([0, 1, 5, 8], dtype=torch.int32)
    common = dict(
        window_size=window,
        index_width=width,
        left_visible=torch.tensor([0, 0, 5, 6, 0, 0, 1, 2, 0], dtype=torch.int32),
        right_visible=torch.tensor([0, 0, 1, 0, 0, 2, 1, 0, 0], dtype=torch.int32),
        query_start_loc=starts,
        seq_lens=torch.tensor([7, 9, 3], dtype=torch.int32),
        token_to_req_indices=torch.tensor([0, 1, 1, 1, 1, 2, 2, 2, 99], dtype=torch.int32),
        is_valid_token=torch.tensor([True] * 8 + [False]),
        block_table=torch.randperm(3 * 8, dtype=torch.int32).view(3, 8),
        block_size=block,
        replay_start=torch.tensor([5, 0, 0], dtype=torch.int32),
        num_tokens=num_tokens,
        token_offset=token_offset,
        has_image=has_image,
    )
    written = []
    for find in (ComputeSWAIndicesAndLensKernel(), partial(triton_on_cpu._find_windows, None)):
        indices = torch.full((10, 1, width), -7, dtype=torch.int32)
        lengths = torch.full((10,), -7, dtype=torch.int32)
        find(swa_indices=indices, swa_lens=lengths, **common)
        written.append((indices, lengths))
    (indices, lengths), (ours, our_lengths) = written
    assert (lengths[:num_tokens] > 0).any()
    assert torch.equal(indices, ours)
    assert torch.equal(lengths, our_lengths)


def test_kinds_of_layers_that_a_release_leaves_out_are_planned():
    """All that builders are asked for, whatever the one for CPU names; its own plans stay."""

    class AsReleased:
        def build_tile_scheduler(self, num_decode_tokens):
            return {"swaonly": num_decode_tokens, "c4a": None, "c128a": None}

    builder = AsReleased()
    triton_on_cpu._plan_all_tiles(AsReleased.__init__)(builder)
    planned = builder.build_tile_scheduler(3)
    kinds = {value for name, value in vars(sparse_swa).items() if name.startswith("_LAYER_TYPE_")}
    assert planned.keys() == kinds
    assert planned == dict.fromkeys(kinds) | {"swaonly": 3}

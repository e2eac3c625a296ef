# SPDX-License-Identifier: Apache-2.0
"""What a layer does when it first computes leaves alone what was received before."""

from __future__ import annotations

import pytest
import torch
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

from tests.bases import requires_base
from tests.v1.kv_connector.unit.reshard import forms
from tests.v1.kv_connector.unit.reshard.engine.workers import (
    Progress,
    assert_received,
    fill,
    receive,
)

HEADS, SIZE = 2, 8
BLOCKS = [5, 2, 9]


def attention(implementation: object) -> Attention:
    """A layer of attention, as far as its runner and the connector know it."""
    layer = object.__new__(Attention)
    torch.nn.Module.__init__(layer)
    layer.impl = implementation
    return layer


def implementation() -> TritonAttentionImpl:
    """Triton's attention, with a scale of 32 bits after each key and each value."""
    return TritonAttentionImpl(HEADS, SIZE, 1.0, HEADS, None, None, "fp8_per_token_head")


def composite() -> object:
    """A composite that has it read by one of two kernels."""
    from vllm.v1.attention.backends.triton_flash_attn import TritonFlashAttentionBackend

    made = object.__new__(TritonFlashAttentionBackend.get_impl_cls())
    made.general_impl, made.causal_impl = implementation(), object()
    return made


def of_triton(layer: Attention) -> TritonAttentionImpl:
    """The implementation that fills the scales."""
    return getattr(layer.impl, "general_impl", layer.impl)


@pytest.mark.parametrize(
    "make",
    [
        implementation,
        pytest.param(
            composite,
            marks=requires_base("0.32.0", "0.33.0", reason="no backend is made of two"),
        ),
    ],
)
def test_received_scales_outlive_the_first_forward(engines, make):
    """Triton's attention fills the scales of all blocks once, and has done so before any read."""
    layers = {f"layers.{number}": attention(make()) for number in range(4)}
    options = dict(dtype=torch.uint8, head_size=SIZE + 4, cache_dtype="fp8_per_token_head")
    prefill = engines("p", **options)
    decode = engines("d", **options, model_layers=layers)
    whole = fill(prefill, BLOCKS)
    prefill.offer("p-a")
    decode.start(receive={"d-a": receive(prefill.serve(), BLOCKS, BLOCKS)})
    Progress(prefill, decode).until(decode, received="d-a")
    for layer in layers.values():
        # What both `forward` and `do_kv_cache_update` begin with.
        of_triton(layer)._ensure_scale_caches(layer.kv_cache)
    assert_received(decode, BLOCKS, whole)


def test_first_forward_fills_the_scales_of_all_blocks():
    """What that is for: once no release does this any more, the connector need not either."""
    cache = forms.empty(4, HEADS, 16, SIZE + 4, dtype=torch.uint8)
    implementation()._ensure_scale_caches(cache)
    assert all(block.any() for block in (cache[0] if forms.SHAPED_BY_BACKENDS else cache))

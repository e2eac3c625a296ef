# SPDX-License-Identifier: Apache-2.0
"""What the kernel of DeepSeek V3.2's indexer has written at one engine, another one's has, too.

It is Triton's, which its interpreter runs: `test_writing_kernels` has pytest run this in a process
of its own.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.triton_utils import HAS_TRITON
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend
from vllm.v1.attention.ops.rocm_aiter_mla_sparse import indexer_k_quant_and_cache_triton

from tests.v1.kv_connector.unit.reshard.engine.release_engines import (
    Kept,
    ReleaseEngine,
    blocks,
    transfer,
)

NUM_LAYERS, NUM_TOKENS, BLOCK_TOKENS, HEAD_SIZE = 2, 150, 64, 128


def _kept() -> Kept:
    """Latents of 656 bytes, and 132 bytes of an indexer, as the release's layers say it."""
    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=BLOCK_TOKENS), model_config=None
    )
    indexer = DeepseekV32IndexerCache.get_kv_cache_spec(
        SimpleNamespace(**vars(config), head_dim=HEAD_SIZE + 4, dtype=torch.uint8), config
    )
    latent = MLAAttention.get_kv_cache_spec(
        SimpleNamespace(
            kv_cache_dtype="fp8_ds_mla",
            head_size=576,
            sliding_window=None,
            indexer=object(),
            topk_buffer_width=2048,
            non_causal_multi_token_decode=False,
        ),
        config,
    )
    kept = {}
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}.self_attn"
        kept[f"{prefix}.attn"] = latent, FlashMLASparseBackend
        kept[f"{prefix}.indexer.k_cache"] = indexer, DeepseekV32IndexerBackend
    return kept


def _write(view: torch.Tensor, ids: list[int], keys: torch.Tensor) -> None:
    """Have the kernel write the keys of all tokens."""
    tokens = torch.arange(len(keys))
    slots = torch.tensor(ids)[tokens // BLOCK_TOKENS] * BLOCK_TOKENS + tokens % BLOCK_TOKENS
    indexer_k_quant_and_cache_triton(keys, view.squeeze(1), slots, HEAD_SIZE, "ue8m0")


@pytest.mark.parametrize(
    ("prefill", "decode"), [(dict(pp=2), dict(tp=2)), (dict(tp=2), dict(pp=2))]
)
def test_keys_are_as_if_they_had_been_written_here(prefill, decode):
    """Whole blocks of every layer, to the last byte."""
    assert HAS_TRITON
    p, d = (
        ReleaseEngine(role, _kept(), NUM_LAYERS, layout="LBHNC", num_blocks=12, **layout)
        for role, layout in (("prefill", prefill), ("decode", decode))
    )
    try:
        random = torch.Generator().manual_seed(1)
        keys = {
            name: torch.randn(NUM_TOKENS, HEAD_SIZE, generator=random).to(torch.bfloat16)
            for name in p.kept
            if "indexer" in name
        }
        ((_, names),), (ids,) = p.groups, p.block_ids(3, NUM_TOKENS)
        assert set(names) == set(p.kept)
        for views in p.views.values():
            for name in views.keys() & keys.keys():
                _write(views[name], ids, keys[name])
        (_, (there,)) = transfer(p, d, NUM_TOKENS)
        for views in d.views.values():
            for name in views.keys() & keys.keys():
                here = torch.zeros_like(views[name])
                _write(here, there, keys[name])
                assert torch.equal(blocks(views[name], there), blocks(here, there))
    finally:
        p.close()
        d.close()

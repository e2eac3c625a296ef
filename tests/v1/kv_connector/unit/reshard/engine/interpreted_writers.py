# SPDX-License-Identifier: Apache-2.0
"""What the release's kernels in Triton write, run by Triton's interpreter on the CPU's tensors.

The interpreter has to be chosen before vLLM is imported, and other tests want vLLM without it: so
`test_writing_kernels` has pytest run these in a process of their own.
"""

from __future__ import annotations

import importlib.util
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm._aiter_ops import rocm_aiter_ops
from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends import rocm_aiter_fa
from vllm.v1.attention.backends.flash_attn_diffkv import (
    FlashAttentionDiffKVBackend,
    FlashAttentionDiffKVImpl,
)
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend
from vllm.v1.attention.backends.rocm_attn import RocmAttentionBackend, RocmAttentionImpl
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl
from vllm.v1.attention.backends.triton_attn_diffkv import (
    TritonAttentionDiffKVBackend,
    TritonAttentionDiffKVImpl,
)
from vllm.v1.attention.backends.triton_flash_attn import TritonFlashAttentionBackend
from vllm.v1.attention.backends.turboquant_attn import (
    TurboQuantAttentionBackend,
    TurboQuantAttentionImpl,
)
from vllm.v1.attention.backends.ultraquant_attn import (
    UltraQuantAttentionBackend,
    UltraQuantAttentionImpl,
)
from vllm.v1.attention.ops import triton_turboquant_store
from vllm.v1.attention.ops.rocm_aiter_mla_sparse import indexer_k_quant_and_cache_triton
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, get_kv_quant_mode

from tests.v1.kv_connector.unit.reshard.engine.release_caches import (
    LAYERS,
    Cache,
    Write,
    bare,
    check,
)

SCALES = SimpleNamespace(_k_scale=torch.ones(1), _v_scale=torch.ones(1))
"""What a layer gives its implementation."""


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """A GPU as far as launchers ask for one."""
    assert HAS_TRITON
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))
    monkeypatch.setattr(type(current_platform), "has_device_capability", lambda *_: True)


def writer(implementation: Any, layer: Any = SCALES) -> Write:
    """What an implementation of attention does with new keys and values."""
    return lambda view, slots, keys, values: implementation.do_kv_cache_update(
        layer, keys, values, view, slots
    )


def full(heads: int = 2, size: int = 32, block_tokens: int = 16, **fields: Any) -> Any:
    """A specification of full attention."""
    fields = {"dtype": torch.float32} | fields
    return FullAttentionSpec(block_size=block_tokens, num_kv_heads=heads, head_size=size, **fields)


@pytest.mark.parametrize(
    ("layout", "heads", "size", "block_tokens", "dtype"),
    [
        ("LBHNC", 2, 32, 16, torch.float32),
        ("LBNHC", 3, 40, 16, torch.float16),
        ("BLHNC", 2, 64, 32, torch.bfloat16),
        ("BLNHC", 1, 32, 48, torch.float32),
        ("LHBNC", 2, 32, 16, torch.bfloat16),
        ("BHLNC", 3, 32, 16, torch.float32),
    ],
)
def test_triton_attention(layout, heads, size, block_tokens, dtype):
    """`triton_reshape_and_cache_flash`, in every layout that the release has."""
    impl = TritonAttentionImpl(heads, size, 1.0, heads, None, None, "auto")
    cache = Cache(TritonAttentionBackend, full(heads, size, block_tokens, dtype=dtype), layout)
    check(cache, writer(impl), size, dtype=dtype)


@pytest.mark.parametrize(
    ("name", "dtype", "layout"),
    [
        ("fp8", torch.uint8, "BLHNC"),
        ("int8_per_token_head", torch.int8, "LBHNC"),
        ("int8_per_token_head", torch.int8, "BLNHC"),
        ("fp8_per_token_head", torch.uint8, "LBNHC"),
        ("int4_per_token_head", torch.uint8, "LBHNC"),
    ],
)
def test_triton_attention_with_few_bits(name, dtype, layout):
    """Scales of a token and head lie in its slot, and nothing of the slot is left out."""
    impl = TritonAttentionImpl(2, 32, 1.0, 2, None, None, name)
    cache = Cache(
        TritonAttentionBackend, full(dtype=dtype, kv_quant_mode=get_kv_quant_mode(name)), layout
    )
    # All scales are put in place when a layer first writes: see `test_scales_of_all_blocks`.
    for view in cache.views.values():
        if impl._is_per_token_head_quant:
            impl._ensure_scale_caches(view)
            if view is cache.views[LAYERS[1]]:
                break
            impl._k_scale_cache = None
    check(cache, writer(impl), 32)


@pytest.mark.parametrize("heads", [1, 3])
def test_composites_write_as_tritons_attention(heads):
    """Whichever of their kernels reads."""
    triton = TritonAttentionImpl(heads, 32, 1.0, heads, None, None, "auto")
    impl = bare(TritonFlashAttentionBackend.get_impl_cls(), general_impl=triton)
    check(Cache(TritonFlashAttentionBackend, full(heads)), writer(impl), 32)


@pytest.mark.parametrize(("name", "layout"), [("auto", "LBNHC"), ("fp8", "LBHNC")])
@pytest.mark.parametrize(
    ("backend", "implementation"),
    [
        (FlashAttentionDiffKVBackend, FlashAttentionDiffKVImpl),
        (TritonAttentionDiffKVBackend, TritonAttentionDiffKVImpl),
    ],
)
def test_values_that_are_smaller_than_keys(backend, implementation, name, layout):
    """`triton_reshape_and_cache_flash_diffkv`: both share a slot."""
    dtype = torch.uint8 if name == "fp8" else torch.float16
    spec = full(3, 48, head_size_v=32, dtype=dtype, kv_quant_mode=get_kv_quant_mode(name))
    impl = bare(implementation, attn_type=AttentionType.DECODER, kv_cache_dtype=name)
    check(Cache(backend, spec, layout), writer(impl), 48, size_v=32, dtype=torch.float16)


@pytest.mark.parametrize(("layout", "block_tokens"), [("LBHNC", 64), ("LHBNC", 48)])
def test_rocm_attention(layout, block_tokens):
    """`triton_reshape_and_cache_flash` with keys of five axes: sides, in packed heads."""
    impl = bare(
        RocmAttentionImpl,
        attn_type=AttentionType.DECODER,
        num_kv_heads=3,
        head_size=32,
        kv_cache_dtype="auto",
        _use_interleaved_v_cache=False,
    )
    spec = full(3, 32, block_tokens, dtype=torch.float16)
    check(Cache(RocmAttentionBackend, spec, layout), writer(impl), 32, dtype=torch.float16)


def shuffling_aiter(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """AITER's module as ROCm has it, and a release that says that its caches are shuffled."""
    monkeypatch.setattr(rocm_aiter_ops, "is_shuffle_kv_cache_enabled", lambda: True)
    place = importlib.util.spec_from_file_location(rocm_aiter_fa.__name__, rocm_aiter_fa.__file__)
    assert place is not None and place.loader is not None
    module = importlib.util.module_from_spec(place)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(current_platform), "is_rocm", lambda _: True)
        place.loader.exec_module(module)
    return module


@pytest.mark.parametrize("layout", ["LBHNC", "LHBNC"])
def test_shuffled_attention_of_aiter(monkeypatch, layout):
    """`reshape_and_cache_shuffle_triton`, which is there on ROCm only."""
    module = shuffling_aiter(monkeypatch)
    impl = bare(module.AiterFlashAttentionImpl, num_kv_heads=3, head_size=32, kv_cache_dtype="auto")
    cache = Cache(module.AiterFlashAttentionBackend, full(3, 32, 32, dtype=torch.float16), layout)
    check(cache, writer(impl), 32, dtype=torch.float16)


@pytest.mark.parametrize(
    "name", ["turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"]
)
def test_turboquant(monkeypatch, name):
    """`triton_turboquant_store`: one packed slot of a head of a token."""
    monkeypatch.setattr(triton_turboquant_store, "_use_fp8_e4b15", lambda _: 0)
    spec = full(2, 64, dtype=torch.uint8, kv_quant_mode=get_kv_quant_mode(name))
    config = TurboQuantConfig.from_cache_dtype(name, 64)
    impl = bare(
        TurboQuantAttentionImpl,
        num_kv_heads=2,
        head_size=64,
        tq_config=config,
        _soa_store=False,
    )
    cache = Cache(TurboQuantAttentionBackend, spec, "LBNHC")
    unwritten = config.slot_size_aligned - config.slot_size
    check(cache, writer(impl, SimpleNamespace()), 64, unwritten=unwritten)


@pytest.mark.parametrize("size", [64, 128])
def test_ultraquant(size):
    """`ultraquant_store`: one packed slot of a head of a token, and nothing of it is left out."""
    mode = get_kv_quant_mode("ultraquant_4bit")
    spec = full(3, size, dtype=torch.uint8, kv_quant_mode=mode)
    impl = bare(UltraQuantAttentionImpl, num_kv_heads=3, head_size=size)
    impl._use_ultraquant_flydsl = False
    cache = Cache(UltraQuantAttentionBackend, spec, "LBNHC")
    check(cache, writer(impl, SimpleNamespace()), size, dtype=torch.bfloat16)


def test_indexer_on_rocm():
    """`indexer_k_quant_and_cache_triton`: a block's values, shuffled, then its scales."""
    spec = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=132, dtype=torch.uint8)

    def write(view, slots, keys, _):
        indexer_k_quant_and_cache_triton(keys[:, 0], view.squeeze(1), slots, 128, "ue8m0")

    check(Cache(DeepseekV32IndexerBackend, spec), write, 128, dtype=torch.bfloat16)

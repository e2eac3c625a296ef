# SPDX-License-Identifier: Apache-2.0
"""What the release's own writers write is where the connector says that it is.

`_RUN` names the writers that a test here, or one of `interpreted_writers`, runs; `_NOT_RUN` the
others, with what stops them on a CPU. Both are looked up in the source of the release.
"""

# What is skipped on a base imports what that base lacks.
# ruff: noqa: E402

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vllm
from tests.bases import RELEASE, skip_module_unless_base
from tests.interpreted import assert_passes
from tools.pdstack.cpu import why_no_bfloat16_operators

skip_module_unless_base("0.32.0", "0.33.0", reason="caches are no views, and V4 is not there")

from vllm.models.deepseek_v4.attention import DeepseekV4Attention, DeepseekV4IndexerCache
from vllm.models.deepseek_v4.compressor import CompressorBackend, CompressorStateCache
from vllm.models.deepseek_v4.cpu.cpu_mla import (
    DeepseekV4CPUIndexerBackend,
    DeepseekV4CPUSparseBackend,
)
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    _get_attn_isa,
)
from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend, AMXMLAImpl
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWABackend, DeepseekV4SWACache
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from tests.v1.kv_connector.unit.reshard.engine.release_caches import Cache, bare, check
from vllm import _custom_ops as ops
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches import cache_formats
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches.cache_views import (
    Arrangement,
)

WHY_NOT_ALL = why_no_bfloat16_operators()
KNOWN = cache_formats._SLOTS | cache_formats._OTHERS.keys()
_BACKENDS = "vllm.v1.attention.backends"
_V4 = "vllm.models.deepseek_v4"
_M3 = "vllm.models.minimax_m3"
_HY_V4 = "vllm.models.hy_v4.nvidia.flashmla_sparse"
_DOTS3 = "vllm.models.dots3_note.nvidia.attention"
_OCTAVE = f"{_BACKENDS}.rocm_octave_attn"
_LATER = {_OCTAVE}
"""Modules that 0.32.0 has not."""
_COMPRESSES = "DeepseekCompressor." + (
    "forward" if RELEASE == "0.32.0" else "_compress_norm_rope_store"
)


def _at(module: str, *names: str) -> list[tuple[str, str]]:
    return [(module, name) for name in names]


def _mla(*modules_and_names: str) -> list[tuple[str, str]]:
    return [
        (f"{_BACKENDS}.mla.{module}", name)
        for module, name in (each.split(":") for each in modules_and_names)
    ]


_Writer = tuple[str, str, str]
"""Module and function that write new tokens, and what kernel these call."""

_RUN: dict[tuple[str, str], _Writer] = {
    (f"{_BACKENDS}.cpu_attn", "CPU_ATTN"): (
        f"{_BACKENDS}.cpu_attn",
        "CPUAttentionBackendImpl.do_kv_cache_update",
        "cpu_attn_reshape_and_cache",
    ),
    (f"{_BACKENDS}.mla.cpu_mla", "CPU_MLA"): (
        f"{_BACKENDS}.mla.cpu_mla",
        "CPUMLAImpl.do_kv_cache_update",
        "flat",
    ),
    (f"{_BACKENDS}.mla.amx_mla", "AMX_MLA"): (
        f"{_BACKENDS}.mla.amx_mla",
        "AMXMLAImpl.do_kv_cache_update",
        "amx_mla_concat_and_cache",
    ),
    (f"{_V4}.cpu.cpu_mla", "CPU_V4_MLA_SPARSE"): (
        f"{_V4}.cpu.cpu_compressor",
        "DeepseekV4CPUCompressor.forward",
        "compress_norm_rope_store_cpu",
    ),
    (f"{_V4}.cpu.cpu_mla", "CPU_V4_INDEXER"): (
        f"{_V4}.cpu.cpu_compressor",
        "DeepseekV4CPUCompressor.forward",
        "compress_norm_rope_store_indexer_cpu",
    ),
    (f"{_V4}.compressor", "CompressorBackend"): (
        f"{_V4}.cpu.cpu_compressor",
        "DeepseekV4CPUCompressor.forward",
        "save_partial_states_cpu",
    ),
    (f"{_BACKENDS}.mla.sparse_swa", "DEEPSEEK_SPARSE_SWA"): (
        f"{_V4}.cpu.cpu_sparse",
        "DeepseekV4CPUAttention._fused_qnorm_rope_kv_insert",
        "fused_qnorm_rope_kv_insert_cpu",
    ),
    # From here on by Triton's interpreter.
    (f"{_BACKENDS}.triton_attn", "TRITON_ATTN"): (
        f"{_BACKENDS}.triton_attn",
        "TritonAttentionImpl.do_kv_cache_update",
        "triton_reshape_and_cache_flash",
    ),
    **dict.fromkeys(
        _at(f"{_BACKENDS}.triton_flash_attn", "TRITON_FLASH_ATTN")
        + _at(f"{_BACKENDS}.triton_flashinfer", "TRITON_FLASHINFER"),
        (
            f"{_BACKENDS}.composite",
            "create_composite_attention_backend.CompositeAttentionImpl.do_kv_cache_update",
            "general_impl",
        ),
    ),
    (f"{_BACKENDS}.flash_attn_diffkv", "FLASH_ATTN_DIFFKV"): (
        f"{_BACKENDS}.flash_attn_diffkv",
        "FlashAttentionDiffKVImpl.do_kv_cache_update",
        "triton_reshape_and_cache_flash_diffkv",
    ),
    (f"{_BACKENDS}.triton_attn_diffkv", "TRITON_ATTN_DIFFKV"): (
        f"{_BACKENDS}.triton_attn_diffkv",
        "TritonAttentionDiffKVImpl.do_kv_cache_update",
        "triton_reshape_and_cache_flash_diffkv",
    ),
    (f"{_BACKENDS}.turboquant_attn", "TURBOQUANT"): (
        f"{_BACKENDS}.turboquant_attn",
        "TurboQuantAttentionImpl._store_kv",
        "triton_turboquant_store",
    ),
    (f"{_BACKENDS}.ultraquant_attn", "ULTRAQUANT"): (
        f"{_BACKENDS}.ultraquant_attn",
        "UltraQuantAttentionImpl._store_kv",
        "ultraquant_store",
    ),
    # In blocks of any other size than 16 and 32, or with padding; else `reshape_and_cache` writes.
    (f"{_BACKENDS}.rocm_attn", "ROCM_ATTN"): (
        f"{_BACKENDS}.rocm_attn",
        "RocmAttentionImpl.do_kv_cache_update",
        "triton_reshape_and_cache_flash",
    ),
    # On ROCm; on NVIDIA `indexer_k_quant_and_cache` of `_C_cache_ops` writes.
    (f"{_BACKENDS}.mla.indexer", "DEEPSEEK_V32_INDEXER"): (
        "vllm.v1.attention.ops.rocm_aiter_mla_sparse",
        "indexer_k_quant_and_cache_triton",
        "_indexer_k_quant_and_cache_kernel",
    ),
}

_FLASH = "`_C_cache_ops.reshape_and_cache_flash` is compiled for CUDA and ROCm only"
_CONCAT = "`_C_cache_ops.concat_and_cache_mla` is compiled for CUDA, ROCm and XPU only"
_PORTED = "its kernel of Triton is for GPUs; the port of it to the CPU is run"

_NOT_RUN: dict[tuple[str, str], tuple[_Writer, str]] = {
    **{
        (f"{_BACKENDS}.{module}", name): (
            (f"{_BACKENDS}.{module}", f"{impl}.do_kv_cache_update", "reshape_and_cache_flash"),
            _FLASH,
        )
        for module, name, impl in (
            ("flash_attn", "FLASH_ATTN", "FlashAttentionImpl"),
            ("flashinfer", "FLASHINFER", "FlashInferImpl"),
            ("flex_attention", "FLEX_ATTENTION", "FlexAttentionImpl"),
            ("rocm_aiter_fa", "FLASH_ATTN", "AiterFlashAttentionImpl"),
            (
                "rocm_aiter_unified_attn",
                "ROCM_AITER_UNIFIED_ATTN",
                "RocmAiterUnifiedAttentionImpl",
            ),
            ("b12x", "B12X", "B12xPagedAttentionImpl"),
        )
    },
    **dict.fromkeys(
        _mla(
            "cutlass_mla:CUTLASS_MLA",
            "flashinfer_mla:FLASHINFER_MLA",
            "flashmla:FLASHMLA",
            "flashattn_mla:FLASH_ATTN_MLA",
            "tokenspeed_mla:TOKENSPEED_MLA",
            "triton_mla:TRITON_MLA",
            "rocm_aiter_mla:ROCM_AITER_MLA",
            "aiter_triton_mla:AITER_TRITON_MLA",
            "flashmla_sparse:FLASHMLA_SPARSE",
            "flashinfer_mla_sparse:FLASHINFER_MLA_SPARSE",
            "flashinfer_mla_sparse:FLASHINFER_MLA_SPARSE_SM120",
            "flashinfer_mla_sparse_sm90:FLASHINFER_MLA_SPARSE_SM90",
            "flashattn_mla_sparse:FLASH_ATTN_MLA_SPARSE",
            "flashattn_mla_sparse:FLASH_ATTN_MLA_SPARSE_FA4",
            "rocm_aiter_mla_sparse:ROCM_AITER_MLA_SPARSE",
            "xpu_mla_sparse:XPU_MLA_SPARSE",
        ),
        (
            (
                "vllm.v1.attention.backend",
                "MLAAttentionImpl.do_kv_cache_update",
                "concat_and_cache_mla",
            ),
            _CONCAT,
        ),
    ),
    (_DOTS3, "DOTS3_NOTE_PADDED_MLA_SPARSE"): (
        (_DOTS3, "Dots3NotePaddedSparseImpl.do_kv_cache_update", "_logical_cache"),
        f"what it calls is of MLA's: {_CONCAT}",
    ),
    (_OCTAVE, "ROCM_OCTAVE"): (
        (_OCTAVE, "RocmOctaveAttentionImpl.do_kv_cache_update", "octave_cache_store"),
        "it is compiled for ROCm only; its source is `csrc/attention/octave_attn.cu`",
    ),
    (f"{_V4}.nvidia.flashinfer_sparse", "FLASHINFER_MLA_SPARSE_DSV4"): (
        (
            f"{_V4}.compressor",
            _COMPRESSES,
            "_SPARSE_ATTN_COMPRESSOR_CUTEDSL_KERNEL",
        ),
        _PORTED,
    ),
    (f"{_V4}.amd.rocm", "ROCM_FLASHMLA_SPARSE_DSV4"): (
        (f"{_V4}.compressor", _COMPRESSES, "compress_norm_rope_store_triton"),
        _PORTED,
    ),
    (f"{_V4}.sparse_mla", "FLASHMLA_SPARSE_DSV4"): (
        (f"{_V4}.compressor", _COMPRESSES, "compress_norm_rope_store_triton"),
        _PORTED,
    ),
    (f"{_BACKENDS}.mla.indexer", "DEEPSEEK_V4_INDEXER"): (
        (f"{_V4}.compressor", _COMPRESSES, "compress_norm_rope_store_triton"),
        _PORTED,
    ),
    (f"{_M3}.common.sparse_attention", "MINIMAX_M3_SPARSE"): (
        (
            f"{_M3}.nvidia.model",
            "MiniMaxM3SparseAttention.forward",
            "fused_minimax_m3_qknorm_rope_kv_insert",
        ),
        "it is compiled for CUDA and ROCm only",
    ),
    (f"{_M3}.common.indexer", "MINIMAX_M3_SPARSE_INDEXER"): (
        (
            f"{_M3}.amd.ops.sparse_pa",
            "minimax_m3_insert_index_cache",
            "_insert_index_cache_kernel",
        ),
        "Triton's interpreter refuses its mask; that of NVIDIA is compiled for CUDA only",
    ),
}

_SHUFFLED = (
    f"{_BACKENDS}.rocm_aiter_fa",
    "AiterFlashAttentionImpl.do_kv_cache_update",
    "reshape_and_cache_shuffle_triton",
)
"""What the interpreter runs, too, and an environment variable selects."""


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(
        (Path(vllm.__file__).parents[1] / (module.replace(".", "/") + ".py")).read_text()
    )


def _definition(module: str, function: str) -> ast.AST:
    """Where a function is defined; modules are read, for some need what only GPUs have."""
    place: ast.AST = _tree(module)
    for name in function.split("."):
        place = next(each for each in ast.walk(place) if getattr(each, "name", None) == name)
    return place


def _named_in(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            yield each.id
        elif isinstance(each, ast.Attribute):
            yield each.attr


def test_every_known_format_has_a_writer():
    """Whoever adds a format says what writes it, and runs that or says why not."""
    assert _RUN.keys() | _NOT_RUN.keys() == KNOWN
    assert not _RUN.keys() & _NOT_RUN.keys()


@pytest.mark.parametrize(
    "writer",
    [*dict.fromkeys([*_RUN.values(), *(writer for writer, _ in _NOT_RUN.values()), _SHUFFLED])],
    ids=lambda writer: f"{writer[1]}:{writer[2]}",
)
def test_writer_is_the_releases(writer):
    """A function that is renamed, or that calls another kernel, is to be read again."""
    module, function, kernel = writer
    if RELEASE == "0.32.0" and module in _LATER:
        pytest.skip(f"not on {RELEASE}: it has no {module}")
    assert kernel in set(_named_in(_definition(module, function)))


@pytest.mark.parametrize(
    "module", sorted({module for (module, _), (_, reason) in _NOT_RUN.items() if reason is _CONCAT})
)
def test_backends_of_mla_leave_writing_to_their_base(module):
    """One that writes by itself is a format of its own until it has been read."""
    names = {getattr(each, "name", "") for each in ast.walk(_tree(module))}
    assert "do_kv_cache_update" not in names


@pytest.mark.parametrize(
    ("module", "backend", "parent", "implementation"),
    [
        (_HY_V4, "HYV4FlashMLASparseBackend", "FlashMLASparseBackend", "HYV4FlashMLASparseImpl"),
        (_DOTS3, "Dots3NoteTritonMLABackend", "TritonMLABackend", "Dots3NoteTritonMLAImpl"),
    ],
)
def test_models_leave_writing_to_what_they_derive_from(module, backend, parent, implementation):
    """By the name of that one, and with nothing of its own that writes."""
    own = _definition(module, backend)
    assert [ast.unparse(base) for base in own.bases] == [parent]
    defined = {
        each.name
        for place in (own, _definition(module, implementation))
        for each in ast.walk(place)
        if isinstance(each, ast.FunctionDef)
    }
    assert not defined & {"get_name", "do_kv_cache_update", "customize_spec"}
    assert module in {place for place, _ in cache_formats._STORE_AS_THEIR_PARENTS}


# More than a minute of a core, and of concern to `cache_formats` only.
@pytest.mark.nightly
def test_kernels_of_triton():
    """They are run by Triton's interpreter, in a process that has vLLM with it."""
    names = "interpreted_writers.py", "interpreted_indexers.py"
    assert_passes(*map(Path(__file__).with_name, names))


def _cpu_attention(block_tokens: int, heads: int, size: int, dtype: torch.dtype) -> None:
    impl = bare(CPUAttentionBackendImpl, attn_type=AttentionType.DECODER, kv_cache_dtype="auto")
    isa = _get_attn_isa(dtype, block_tokens, size)
    layer = SimpleNamespace(isa=isa, _k_scale_float=1.0, _v_scale_float=1.0)
    spec = FullAttentionSpec(
        block_size=block_tokens, num_kv_heads=heads, head_size=size, dtype=dtype
    )

    def write(view, slots, keys, values):
        impl.do_kv_cache_update(layer, keys, values, view, slots)

    check(Cache(CPUAttentionBackend, spec), write, size, dtype=dtype)


@settings(max_examples=20)
@given(
    block_tokens=st.sampled_from([16, 32, 48, 64, 128]),
    heads=st.integers(1, 4),
    size=st.sampled_from([32, 64, 80, 96, 128]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_cpu_attention(block_tokens, heads, size, dtype):
    """A head's tokens have its run of a block, for whichever instructions they are packed."""
    _cpu_attention(block_tokens, heads, size, dtype)


def test_wrong_format_is_seen(monkeypatch):
    """Were packed tokens taken for slots, what is written would lie elsewhere."""
    place = f"{_BACKENDS}.cpu_attn", "CPU_ATTN"
    monkeypatch.setattr(cache_formats, "_OTHERS", {place: Arrangement.SLOTS})
    with pytest.raises(AssertionError):
        _cpu_attention(32, 2, 64, torch.float32)


@settings(max_examples=10)
@given(
    backend=st.sampled_from(
        [(CPUMLABackend, CPUMLAImpl), (AMXMLABackend, AMXMLAImpl)][: 1 if WHY_NOT_ALL else 2]
    ),
    block_tokens=st.sampled_from([16, 32, 64]),
    rank=st.sampled_from([128, 512]),
)
def test_latents_on_the_cpu(backend, block_tokens, rank):
    """A token's slot has its latent and its rope."""
    size = rank + 64
    spec = MLAAttentionSpec(
        block_size=block_tokens, num_kv_heads=1, head_size=size, dtype=torch.bfloat16
    )

    def write(view, slots, keys, _):
        latents, ropes = (each.contiguous() for each in keys.split([rank, 64], -1))
        backend[1].do_kv_cache_update(
            None, latents[:, 0], ropes, view.squeeze(1), slots, "auto", torch.ones(1)
        )

    check(Cache(backend[0], spec), write, size, dtype=torch.bfloat16)


def _v4(kind: type, **fields: object):
    """The specification of a layer of DeepSeek V4's, as the layer itself makes it."""
    config = SimpleNamespace(cache_config=SimpleNamespace(block_size=256, cache_dtype="fp8_ds_mla"))
    return kind.get_kv_cache_spec(SimpleNamespace(**vars(config), **fields), config)


_COS_SIN = torch.randn(2048, 64, generator=torch.Generator().manual_seed(2))

LAYOUTS = pytest.mark.parametrize("layout", ["BLNHC", "LBNHC"])
NEEDS_ALL_OPERATORS = pytest.mark.skipif(bool(WHY_NOT_ALL), reason=WHY_NOT_ALL)


@NEEDS_ALL_OPERATORS
@LAYOUTS
@pytest.mark.parametrize("block_tokens", [64, 256])
def test_windows_of_deepseek_v4(layout, block_tokens):
    """`fused_qnorm_rope_kv_insert_cpu`: values and scales of a token are in its block."""
    spec = _v4(
        DeepseekV4SWACache,
        bounded_replay=False,
        block_size=block_tokens,
        head_dim=512,
        dtype=torch.uint8,
        window_size=128,
        packed_bytes_per_token=584,
        packed_page_alignment=576,
        packed_block_stride_alignment=None,
    )

    def write(view, slots, keys, _):
        queries = torch.ones(len(slots), 2, 512, dtype=torch.bfloat16)
        rows = view.squeeze(1)
        ops.fused_qnorm_rope_kv_insert_cpu(
            queries,
            keys[:, 0],
            torch.arange(len(slots)),
            rows.view(len(rows), -1),
            slots,
            _COS_SIN,
            2,
            1e-6,
            rows.shape[1],
        )

    check(Cache(DeepseekSparseSWABackend, spec, layout), write, 512, dtype=torch.bfloat16)


@NEEDS_ALL_OPERATORS
@LAYOUTS
@pytest.mark.parametrize(("ratio", "size"), [(4, 512), (128, 512), (4, 128)])
def test_compressed_states_of_deepseek_v4(layout, ratio, size):
    """`compress_norm_rope_store_cpu` and that of the indexer: a state is in its block."""
    window = ratio * (2 if ratio == 4 else 1)
    if size == 512:
        store, backend = ops.compress_norm_rope_store_cpu, DeepseekV4CPUSparseBackend
        fields = dict(kv_cache_dtype="fp8_ds_mla", head_dim=512)
        spec = _v4(DeepseekV4Attention, compress_ratio=ratio, **fields)
    else:
        store, backend = ops.compress_norm_rope_store_indexer_cpu, DeepseekV4CPUIndexerBackend
        # Its head has room for a scale of 32 bits.
        fields = dict(head_dim=size + 4, dtype=torch.uint8)
        spec = _v4(DeepseekV4IndexerCache, compress_ratio=ratio, **fields)

    def write(view, slots, keys, _):
        states = torch.ones(len(slots), window, 2 * size * (2 if ratio == 4 else 1))
        states[:, :, :size] = keys
        rows = view.squeeze(1)
        store(
            states,
            torch.arange(len(slots) * window).view(len(slots), window),
            torch.arange(len(slots)) * ratio + ratio - 1,
            slots,
            torch.ones(size),
            1e-6,
            _COS_SIN,
            rows.view(len(rows), -1),
            rows.shape[1],
            ratio,
        )

    check(Cache(backend, spec, layout), write, size)


@NEEDS_ALL_OPERATORS
@LAYOUTS
@pytest.mark.parametrize(("ratio", "size"), [(4, 512), (128, 512), (4, 128)])
def test_states_that_deepseek_v4_compresses(layout, ratio, size):
    """`save_partial_states_cpu`: a token has a row, and nothing of another's."""
    width = size * (2 if ratio == 4 else 1)
    fields = dict(state_dim=2 * width, dtype=torch.float32)
    spec = _v4(
        CompressorStateCache,
        block_size=4 if ratio == 4 else 8,
        sliding_window=128 if ratio == 128 else 8,
        **fields,
    )

    def write(view, slots, keys, scores):
        ops.save_partial_states_cpu(
            keys[:, 0].contiguous(),
            scores[:, 0].contiguous(),
            torch.zeros(ratio, width),
            torch.arange(len(slots)),
            view.squeeze(1),
            slots,
        )

    check(Cache(CompressorBackend, spec, layout), write, width)

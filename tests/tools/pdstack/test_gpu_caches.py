# SPDX-License-Identifier: Apache-2.0
"""Caches that are filled on CPU as on GPUs, and the attention that reads them.

What is compared with kernels of Triton's is in `interpreted_caches`.
"""

# What is skipped on a base imports what that base lacks.
# ruff: noqa: E402

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.bases import skip_module_unless_base
from tests.interpreted import assert_passes

skip_module_unless_base("0.32.0", "0.33.0", reason="caches are no views")

from vllm._aiter_ops import rocm_aiter_ops
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends import cpu_attn, registry
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    _get_attn_isa,
)
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl
from vllm.v1.attention.backends.registry import _ATTN_OVERRIDES, AttentionBackendEnum
from vllm.v1.attention.ops.dcp import _lse_weighted_combine
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, get_kv_quant_mode
from vllm.v1.kv_cache_layout import KVCacheLayout

from tests.v1.kv_connector.unit.reshard.engine.release_caches import LAYERS, Cache, bare
from tools.pdstack.caches import BITS, Caches
from tools.pdstack.modules.gpu_caches import gpu_caches
from tools.pdstack.modules.gpu_caches.gpu_caches import (
    attention,
    heads,
    latents,
    nvfp4,
    platform,
    shared_tokens,
)
from vllm import _custom_ops as ops
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches import cache_formats

KV_HEADS, SIZE, WIDE, LATENT, ROPE = 2, 32, 128, 512, 64
# The first is computed whole, the others behind what is cached, one of them a token at a time.
STARTS, LENGTHS = [0, 20, 21, 28], [20, 41, 7 + 30]
ARRANGEMENTS = {
    heads.Slots: "slots",
    heads.Scaled: "slots",
    heads.Sides: "keys and values apart, in slots",
    heads.PackedSides: "keys and values apart, in packed heads",
    heads.Shuffled: "keys and values apart, in packed heads",
    heads.MinimaxM3: "slots",
    heads.MinimaxM3Nvfp4: "packed heads",
    heads.Nvfp4: "keys, their scales, values, their scales",
    heads.TurboQuant: "slots",
    heads.TurboQuant3: "slots",
    heads.UltraQuant: "slots",
    heads.ScalesLast: "whole blocks",
    heads.Scrambled: "whole blocks",
}
MOST_OFF = {
    heads.Scaled: 0.05,
    heads.ScalesLast: 0.05,
    heads.Nvfp4: 0.12,
    heads.MinimaxM3Nvfp4: 0.12,
    heads.TurboQuant: 0.12,
    heads.TurboQuant3: 0.25,
    heads.UltraQuant: 0.15,
}
"""How far from numbers those are that are read, by the mean of squares; others are exact."""
OF_FEW_BITS = {
    heads.Nvfp4,
    heads.MinimaxM3Nvfp4,
    heads.TurboQuant,
    heads.TurboQuant3,
    heads.UltraQuant,
}
"""Those whose heads have groups of numbers, or centroids that smaller heads would not meet."""
LAYOUTS = [
    pytest.param(backend, layout.name, id=f"{backend.__name__} {layout.name}")
    for backend in ARRANGEMENTS
    for layout in backend.layouts or (*heads.BLOCK_COMPACT, KVCacheLayout.LHBNC)
]
"""Each backend in layouts that it takes."""


def cache_of(backend, layout="LBHNC", block_tokens=32) -> Cache:
    """A cache of full attention, of smaller heads where a backend has them."""
    fields = dict(dtype=torch.float32)
    if bits := BITS.get(backend.__name__):
        fields = dict(dtype=torch.uint8, kv_quant_mode=get_kv_quant_mode(bits))
    spec = FullAttentionSpec(
        block_size=block_tokens,
        num_kv_heads=KV_HEADS,
        head_size=WIDE if backend in OF_FEW_BITS else SIZE,
        **fields,
    )
    with pytest.MonkeyPatch.context() as patch:
        # As the plugin has it for the engine that asks for this one.
        is_shuffled = backend is heads.Shuffled
        patch.setattr(rocm_aiter_ops, "is_shuffle_kv_cache_enabled", lambda: is_shuffled)
        return Cache(backend, spec, layout, num_blocks=6)


@pytest.mark.nightly
def test_kernels_of_triton():
    """They are run by Triton's interpreter, in a process that has vLLM with it."""
    assert_passes(Path(__file__).with_name("interpreted_caches.py"))


def test_what_ranks_find_is_weighed_as_vllm_does_it():
    """By its reference for both of its kernels; a rank without a token has found nothing."""
    random = torch.Generator().manual_seed(5)
    found = torch.randn(3, 4, 2, 8, generator=random)
    log_sums = torch.randn(3, 4, 2, generator=random)
    log_sums[1, 2] = -torch.inf
    right, total = _lse_weighted_combine(found, log_sums, return_lse=True)
    parts = [shared_tokens.weigh(found[rank].clone(), log_sums, rank) for rank in range(3)]
    torch.testing.assert_close(sum(part for part, _ in parts), right)
    for _, each in parts:
        torch.testing.assert_close(each, total)


@pytest.mark.parametrize(("backend", "arrangement"), ARRANGEMENTS.items())
def test_the_connector_takes_each_for_whom_it_stands_for(backend, arrangement):
    """By its own table of formats, which knows none of these; those of nobody are opaque."""
    cache = cache_of(backend)
    assert cache.arrangement == arrangement
    planes = cache.planes[LAYERS[0]]
    alone = {plane.slot_tokens == 1 for plane in planes}
    assert alone == {"slots" in arrangement}


@pytest.mark.parametrize(("backend", "layout"), LAYOUTS)
def test_what_is_written_is_read(backend, layout):
    """At float32 to the last bit, of other blocks nothing."""
    cache = cache_of(backend, layout)
    view, size = cache.views[LAYERS[1]], cache.spec.head_size
    random = torch.Generator().manual_seed(1)
    keys, values = torch.randn(2, 40, KV_HEADS, size, generator=random)
    backend.format.write(view, torch.arange(32, 72), keys, values)
    found = backend.format.read(view, torch.tensor([1, 2]), size)
    for right, each in zip((keys, values), found, strict=True):
        off = (each[:40] - right).square().mean() / right.square().mean()
        assert off.sqrt() <= MOST_OFF.get(backend, 0.0)
    assert not view[0].any()


@pytest.mark.parametrize("backend", [heads.Nvfp4, heads.MinimaxM3Nvfp4])
def test_numbers_of_4_bits_are_before_their_scales(backend):
    """Of a block, or of a head's slot; scales of values four tokens side by side."""
    cache = cache_of(backend)
    view = cache.views[LAYERS[0]]
    sides = torch.randn(2, 32, KV_HEADS, WIDE, generator=torch.Generator().manual_seed(1))
    backend.format.write(view, torch.arange(32, 64).flip(0), *sides.flip(1))
    # By heads: codes and scales of all of their tokens.
    (codes, scales), (codes_v, scales_v) = (
        [each.transpose(0, 1).contiguous() for each in nvfp4.encode(side)] for side in sides
    )
    of_four = scales_v.view(KV_HEADS, 8, 4, 4, 2).permute(0, 1, 3, 4, 2).flatten(1)
    parts = [each.flatten(1) for each in (codes, scales, codes_v, of_four)]
    page = (
        torch.cat(parts, 1)
        if backend is heads.MinimaxM3Nvfp4
        else torch.cat([each.flatten() for each in parts])
    )
    assert torch.equal(view[1].flatten(), page.flatten())


def test_numbers_of_4_bits_are_the_nearest_ones():
    """The even code where two are as near, all of them by their scale, and zero without a sign."""
    numbers = torch.zeros(3, 16)
    numbers[0, :8] = torch.tensor([0.25, -0.75, 1.25, 1.75, -2.5, 3.5, 5.0, 6.0])
    numbers[1] = numbers[0] / 64
    codes, scales = nvfp4.encode(numbers)
    assert codes[0].tolist() == codes[1].tolist() == [0xA0, 0x42, 0x6C, 0x76, 0, 0, 0, 0]
    assert scales.view(torch.float8_e4m3fn).float()[:, 0].tolist() == [1.0, 1 / 64, 2.0**-9]
    right = torch.tensor([0.0, -1.0, 1.0, 2.0, -2.0, 4.0, 4.0, 6.0])
    found = nvfp4.decode(codes, scales)
    assert torch.equal(found[:2, :8], torch.stack((right, right / 64)))
    assert not found[2].any()


def test_layers_that_are_left_out_are_plain():
    """VLLM has the first and the last of a model compute with all of their bits."""
    for backend in (heads.TurboQuant, heads.TurboQuant3, heads.UltraQuant):
        plain = FullAttentionSpec(
            block_size=32, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=torch.float32
        )
        cache = Cache(backend, plain)
        assert cache.spec == plain
        assert cache.arrangement == "slots"
        keys, values = torch.randn(2, 32, KV_HEADS, SIZE)
        view = cache.views[LAYERS[0]]
        backend.format.write(view, torch.arange(32, 64), keys, values)
        found = backend.format.read(view, torch.tensor([1]), SIZE)
        assert torch.equal(torch.stack(found), torch.stack((keys, values)))


def test_scales_are_at_the_end_of_a_block():
    """A block's first bytes are numbers, its last ones scales of four bytes."""
    view = cache_of(heads.ScalesLast).views[LAYERS[0]]
    ones = torch.ones(32, KV_HEADS, SIZE)
    heads.ScalesLast.format.write(view, torch.arange(32, 64), 448 * 2 * ones, 448 * 4 * ones)
    page = view[1].flatten()
    numbers, scales = page.tensor_split([32 * KV_HEADS * 2 * SIZE])
    assert (numbers.view(torch.float8_e4m3fn).float() == 448).all()
    expected = torch.tensor([2.0, 4.0]).repeat(32 * KV_HEADS)
    assert torch.equal(scales.view(torch.float32), expected)


def test_a_secret_leaves_nothing_in_its_place():
    """A block has the bytes of its tokens, and hardly any where slots would have them."""
    scrambled, plain = (cache_of(each).views[LAYERS[0]] for each in (heads.Scrambled, heads.Slots))
    keys, values = torch.randn(2, 32, KV_HEADS, SIZE, generator=torch.Generator().manual_seed(1))
    for backend, view in ((heads.Scrambled, scrambled), (heads.Slots, plain)):
        backend.format.write(view, torch.arange(32, 64), keys, values)
    there, here = (view[1].contiguous().view(torch.uint8).flatten() for view in (scrambled, plain))
    assert torch.equal(there.sort().values, here.sort().values)
    assert (there == here).float().mean() < 0.05


def _by_the_release(query, keys, values, blocks, **options) -> torch.Tensor:
    """What attention of vLLM's for CPU answers, over a cache that it packs for itself."""
    cache = cache_of(CPUAttentionBackend)
    view, impl = cache.views[LAYERS[0]], _impl(CPUAttentionBackendImpl, **options)
    isa = _get_attn_isa(torch.float32, 32, SIZE)
    layer = SimpleNamespace(isa=isa, _k_scale_float=1.0, _v_scale_float=1.0)
    for slots, key, value in zip(blocks.slots, keys, values, strict=True):
        impl.do_kv_cache_update(layer, key, value, view, slots)
    scheduled = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(LENGTHS),
        num_heads=query.shape[1],
        num_kv_heads=KV_HEADS,
        head_dim=SIZE,
        seq_lens=torch.tensor(LENGTHS, dtype=torch.int32),
        dtype=torch.float32,
        query_start_loc=torch.tensor(STARTS, dtype=torch.int32),
        causal=True,
        sliding_window_size=options.get("sliding_window") or -1,
        isa=isa,
        enable_kv_split=False,
    )
    batch = CPUAttentionMetadata(
        num_actual_tokens=STARTS[-1],
        max_query_len=20,
        query_start_loc=torch.tensor(STARTS, dtype=torch.int32),
        max_seq_len=max(LENGTHS),
        seq_lens=torch.tensor(LENGTHS, dtype=torch.int32),
        block_table=blocks.table,
        slot_mapping=torch.empty(0),
        scheduler_metadata=scheduled,
    )
    output = torch.zeros_like(query)
    impl.forward(layer, query, query, query, view, batch, output)
    return output


def _impl(kind, *, num_heads=4, sliding_window=None, logits_soft_cap=None, sinks=None):
    return kind(
        num_heads,
        SIZE,
        SIZE**-0.5,
        KV_HEADS,
        None,
        sliding_window,
        "auto",
        logits_soft_cap,
        sinks=sinks,
    )


@pytest.fixture
def blocks():
    """Blocks of 32 tokens of three requests, none in order, and the slots of their tokens."""
    table = torch.tensor([[4, 0], [1, 3], [5, 2]], dtype=torch.int32)
    slots = [
        (table[request].long()[:, None] * 32 + torch.arange(32)).flatten()[:length]
        for request, length in enumerate(LENGTHS)
    ]
    return SimpleNamespace(table=table, slots=slots)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 16},
        {"logits_soft_cap": 2.0},
        {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
        {"num_heads": 2},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
@pytest.mark.parametrize(
    "backend", [heads.Slots, heads.Sides, heads.PackedSides, heads.Shuffled, heads.Scrambled]
)
def test_attention_is_the_releases(monkeypatch, blocks, backend, options):
    """Prompts, what comes behind them and single tokens, as vLLM's kernel for CPU computes them."""
    random = torch.Generator().manual_seed(2)
    num_heads = options.get("num_heads", 4)
    query = torch.randn(STARTS[-1], num_heads, SIZE, generator=random)
    keys, values = (
        [torch.randn(length, KV_HEADS, SIZE, generator=random) for length in LENGTHS]
        for _ in range(2)
    )
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32))
    monkeypatch.setattr(cpu_attn, "get_current_vllm_config", lambda: config)
    right = _by_the_release(query, keys, values, blocks, **options)
    is_packed = backend in (heads.PackedSides, heads.Shuffled)
    view, impl = (
        cache_of(backend, "LBHNC" if is_packed else "LBNHC").views[LAYERS[0]],
        _impl(backend.get_impl_cls(), **options),
    )
    for slots, key, value in zip(blocks.slots, keys, values, strict=True):
        # vLLM pads slots with negative ones.
        padded = torch.cat((slots, torch.tensor([-1])))
        pad = torch.ones(1, KV_HEADS, SIZE)
        impl.do_kv_cache_update(
            None, *(torch.cat((each, pad)) for each in (key, value)), view, padded
        )
    if options.get("sliding_window") and not is_packed and backend is not heads.Scrambled:
        # What is behind a window may be anything.
        view[1, :, :8] = torch.nan
    batch = attention.Metadata(STARTS, LENGTHS, blocks.table, True, 1)
    found = impl.forward(None, query, None, None, view, batch, torch.zeros_like(query))
    assert (found - right).abs().max() < 1e-5


def _latents(backend, block_tokens):
    spec = MLAAttentionSpec(
        block_size=block_tokens, num_kv_heads=1, head_size=LATENT + ROPE, dtype=torch.float32
    )
    cache = Cache(backend, spec)
    return cache, cache.views[LAYERS[0]].squeeze(1)


def _write_latents(kind, view, tokens):
    latents_of, ropes = tokens.split([LATENT, ROPE], -1)
    bare(kind).do_kv_cache_update(
        latents_of, ropes[:, None], view, torch.arange(len(tokens)), "auto", torch.ones(1)
    )


@pytest.mark.parametrize("block_tokens", [16, 32, 64])
def test_latents_are_written_as_the_release_writes_them(block_tokens):
    """`CPUMLAImpl`, as `concat_and_cache_mla`, byte for byte."""
    tokens = torch.randn(block_tokens + 3, LATENT + ROPE)
    memory = []
    for backend, kind in ((CPUMLABackend, CPUMLAImpl), (latents.Slots, latents.Attention)):
        cache, view = _latents(backend, block_tokens)
        memory.append(cache.after(lambda: _write_latents(kind, view, tokens), 0xA5))  # noqa: B023
    assert (memory[0] == memory[1]).all()


@pytest.mark.parametrize("block_tokens", [16, 48])
@pytest.mark.parametrize("backend", [latents.Slots, latents.Scrambled])
def test_attention_to_latents_is_the_releases(backend, block_tokens):
    """As vLLM's kernel for CPU decodes them, which knows blocks of 16 tokens only."""
    tokens, queries = torch.randn(45, LATENT + ROPE), torch.randn(2, 4, LATENT + ROPE)
    answers = []
    for each, kind, size in (
        (CPUMLABackend, CPUMLAImpl, 16),
        (backend, backend.get_impl_cls(), block_tokens),
    ):
        _, view = _latents(each, size)
        impl = bare(kind, kv_lora_rank=LATENT, scale=0.1)
        _write_latents(kind, view, tokens)
        table = torch.arange(3, dtype=torch.int32).repeat(2, 1)
        decode = SimpleNamespace(
            block_table=table, seq_lens=torch.tensor([45, 17], dtype=torch.int32)
        )
        found, _ = impl.forward_mqa(queries, view, SimpleNamespace(decode=decode), None)
        answers.append(found)
    assert torch.allclose(*answers, atol=1e-5)


def test_engines_choose_by_their_environment(monkeypatch):
    """The place of vLLM's own is taken by whichever is named, and by none where none is."""
    monkeypatch.setattr(platform, "leave_block_size", lambda: None)
    before = dict(_ATTN_OVERRIDES)
    try:
        monkeypatch.delenv("GPU_CACHES", raising=False)
        gpu_caches.register()
        assert before == _ATTN_OVERRIDES
        for name, value in Caches("NHD", 32, "Scrambled").env.items():
            monkeypatch.setenv(name, value)
        gpu_caches.register()
        assert AttentionBackendEnum.CPU_ATTN.get_class() is heads.Scrambled
        assert AttentionBackendEnum.CPU_MLA.get_class() is latents.Scrambled
        assert AttentionBackendEnum.AMX_MLA.get_class() is latents.Scrambled
    finally:
        _ATTN_OVERRIDES.clear()
        _ATTN_OVERRIDES.update(before)


@pytest.mark.parametrize("chosen", ["Shuffled", "PackedSides"])
def test_aiter_shuffles_where_an_engine_asks_for_it(monkeypatch, chosen):
    """And nowhere else: the release itself says so, and the connector asks the release."""
    for module, name in ((platform, "leave_block_size"), (shared_tokens, "install")):
        monkeypatch.setattr(module, name, lambda: None)
    monkeypatch.setattr(registry, "register_backend", lambda *_: None)
    monkeypatch.setattr(rocm_aiter_ops, "is_shuffle_kv_cache_enabled", lambda: None)
    for name, value in Caches("HND", 32, chosen).env.items():
        monkeypatch.setenv(name, value)
    gpu_caches.register()
    assert cache_formats._is_shuffled() is (chosen == "Shuffled")


def test_a_kernel_may_have_smaller_blocks(monkeypatch):
    """Of the size that an engine is given."""
    assert Caches("NHD", 64, kernel_tokens=16).env["GPU_CACHES_KERNEL_BLOCK"] == "16"
    monkeypatch.setenv("GPU_CACHES_KERNEL_BLOCK", "16")
    for backend in (heads.Slots, latents.Slots):
        assert backend.get_supported_kernel_block_sizes() == [16]


@pytest.mark.parametrize("asked_for", [None, 64])
def test_blocks_of_models_with_mla_are_those_asked_for(monkeypatch, asked_for):
    """Where vLLM for CPU would make them 16 tokens; without a wish they are."""

    def decide(cls, vllm_config):
        vllm_config.cache_config.block_size = 16

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(decide))
    platform.leave_block_size()
    platform.leave_block_size()
    cache = SimpleNamespace(
        block_size=asked_for or 128, user_specified_block_size=asked_for is not None
    )
    CpuPlatform.check_and_update_config(SimpleNamespace(cache_config=cache))
    assert cache.block_size == asked_for or (asked_for is None and cache.block_size == 16)


def test_slopes_are_refused():
    """They are not computed, and would be missed in answers only."""
    with pytest.raises(ValueError, match="unset it for this model"):
        attention.Attention(4, SIZE, 1.0, KV_HEADS, alibi_slopes=[1.0])


def test_caches_are_told_apart():
    """By their names, of which an engine's is made."""
    caches = Caches("NHD", 16)
    others = [replace(caches, **each) for each in (dict(layout="HND"), dict(kernel_tokens=8))]
    others.append(replace(caches, format="Sides"))
    assert len({str(each) for each in (caches, *others)}) == 4

# SPDX-License-Identifier: Apache-2.0
"""Which backends are known to fill their blocks in which way, and what stands for all others."""

from __future__ import annotations

import ast
import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.config import AttentionConfig, PassConfig
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.flex_attention import FlexAttentionBackend
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, MLAAttentionSpec

import vllm
from tests.bases import RELEASE, requires_base
from tests.v1.kv_connector.unit.reshard.forms import backend_of
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches import cache_formats
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches.cache_formats import (
    cache_format,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches.cache_views import (
    Arrangement,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.compat import (
    BLACKWELL_SCALES,
    ROCM_ATTN_VALUES,
)

ROOT = Path(vllm.__file__).parents[1]
KNOWN = sorted(cache_formats._SLOTS | cache_formats._OTHERS.keys())
SPEC = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
VIEW = torch.empty(4, 2, 16, 128, dtype=torch.bfloat16)


def of(backend: type, spec=SPEC, tensor: torch.Tensor = VIEW, settings: str = "s"):
    """The format of a layer."""
    return cache_format(backend, spec, tensor, settings)


@pytest.mark.parametrize(
    ("backend", "arrangement"),
    [
        (FlexAttentionBackend, Arrangement.SLOTS),
        (TritonMLABackend, Arrangement.SLOTS),
        (CPUAttentionBackend, Arrangement.HEADS),
    ],
)
def test_known_backends(backend, arrangement):
    """Plain strides, or whole heads that only the backend can look into."""
    assert of(backend).arrangement is arrangement


def test_every_known_backend_has_an_arrangement():
    """Its name and its module are what it is known by."""
    for module, name in KNOWN:
        meaning = of(backend_of(module, name)).meaning
        assert meaning["written by" if _is_other(module, name) else "numbers"], name
        elsewhere = of(backend_of("vllm.models.some", name))
        assert elsewhere.arrangement is Arrangement.PAGE, name
        assert "vllm.models.some" in elsewhere.meaning["written by"], name


def _is_other(module: str, name: str) -> bool:
    return (module, name) in cache_formats._OTHERS


def test_plain_slots_mean_the_same_whoever_writes_them():
    """Prefill on Hopper and decode on Blackwell have backends of other names."""
    backends = "vllm.v1.attention.backends"
    for pair in (
        (("flash_attn", "FLASH_ATTN"), ("flashinfer", "FLASHINFER")),
        (("mla.flashattn_mla", "FLASH_ATTN_MLA"), ("mla.flashinfer_mla", "FLASHINFER_MLA")),
    ):
        one, other = (of(backend_of(f"{backends}.{module}", name)) for module, name in pair)
        assert one == other


def test_numbers_are_told_apart(monkeypatch):
    """By their type, by how they are quantized, and by which of two types of 8 bits is meant."""

    def numbers(**changes) -> str:
        return of(FlexAttentionBackend, dataclasses.replace(SPEC, **changes)).meaning["numbers"]

    assert numbers() == "bfloat16"
    assert numbers(dtype=torch.half) == "float16"
    eight = dict(dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
    assert numbers(**eight) == "uint8 FP8_PER_TENSOR float8_e4m3fn"
    monkeypatch.setattr(type(current_platform), "fp8_dtype", lambda _: torch.float8_e4m3fnuz)
    assert numbers(**eight) == "uint8 FP8_PER_TENSOR float8_e4m3fnuz"
    latent = MLAAttentionSpec(
        block_size=64,
        num_kv_heads=1,
        head_size=656,
        dtype=torch.uint8,
        kv_quant_mode=KVQuantMode.FP8_PER_TENSOR,
        cache_dtype_str="fp8_ds_mla",
    )
    assert of(TritonMLABackend, latent).meaning["numbers"].endswith(" fp8_ds_mla")


def test_subclass_that_only_builds_other_metadata_is_the_same():
    """VLLM makes such for chunks, cross attention and layers that share a cache."""
    chunked = type("Chunked", (FlexAttentionBackend,), {"get_builder_cls": lambda: None})
    assert of(chunked) == of(FlexAttentionBackend)


def test_implementation_of_its_own_makes_another_backend():
    """A model's backend may keep the name of the one that it stores differently from."""
    methods = {"__module__": "vllm.models.some", "get_impl_cls": staticmethod(lambda: int)}
    own = type("Own", (FlexAttentionBackend,), methods)
    assert of(own).arrangement is Arrangement.PAGE


@pytest.mark.parametrize(
    ("mode", "arrangement"),
    [
        ("NVFP4", Arrangement.PAGE),
        pytest.param(
            "INT4_PER_TOKEN_HEAD",
            Arrangement.SLOTS,
            marks=requires_base("0.32.0", "0.33.0", reason="it has no such format"),
        ),
    ],
)
def test_number_formats_of_a_known_backend(mode, arrangement):
    """Where it is not known that scales lie in slots, nobody looks into a block."""
    spec = dataclasses.replace(SPEC, kv_quant_mode=KVQuantMode[mode])
    assert of(FlexAttentionBackend, spec).arrangement is arrangement


@requires_base("0.32.0", "0.33.0", reason="no backend of AITER's keeps views")
@pytest.mark.parametrize(
    ("module", "name", "arrangement"),
    [
        ("rocm_aiter_fa", "FLASH_ATTN", Arrangement.PACKED_SIDES),
        ("rocm_aiter_unified_attn", "ROCM_AITER_UNIFIED_ATTN", Arrangement.PAGE),
    ],
)
def test_aiter_is_asked_whether_it_shuffles(monkeypatch, module, name, arrangement):
    """An environment variable selects it, and no shape shows it."""
    backend = backend_of(f"vllm.v1.attention.backends.{module}", name)
    assert of(backend).arrangement is Arrangement.SLOTS
    monkeypatch.setattr(cache_formats, "_is_shuffled", lambda: True)
    assert of(backend).arrangement is arrangement
    assert of(backend).meaning != of(backend_of(f"vllm.v1.attention.backends.{module}", name + "_"))


@requires_base("0.32.0", "0.33.0", reason="MiniMax M3 is later")
def test_sparse_layers_of_minimax_m3(monkeypatch):
    """Slots; two of a head with 4 bits; and pages of 16 tokens where AITER's kernels read."""
    place = "vllm.models.minimax_m3"
    methods = {"__module__": f"{place}.nvidia.sparse_attention_msa"}
    common = backend_of(f"{place}.common.sparse_attention", "MINIMAX_M3_SPARSE")
    backend = type("MiniMaxM3SparseMSABackend", (common,), methods)
    assert of(backend).arrangement is Arrangement.SLOTS
    assert of(backend, _quantized("FP8_PER_TENSOR")).arrangement is Arrangement.SLOTS
    assert of(backend, _quantized("NVFP4")).arrangement is Arrangement.HEADS
    monkeypatch.setattr(cache_formats, "_is_shuffled", lambda: True)
    assert of(backend).arrangement is Arrangement.PAGE


def test_turboquant_is_asked_where_it_keeps_scales(monkeypatch):
    """FlyDSL's kernels want them behind all else of a block, and no shape shows it."""
    backend = backend_of("vllm.v1.attention.backends.turboquant_attn", "TURBOQUANT")
    assert of(backend).arrangement is Arrangement.SLOTS
    monkeypatch.setattr(cache_formats, "keeps_turboquants_scales_apart", lambda: True)
    assert of(backend).arrangement is Arrangement.PAGE


@requires_base("0.32.0", "0.33.0", reason="these models are later")
@pytest.mark.parametrize(
    ("module", "name", "place"),
    [
        ("mla.flashmla_sparse", "FLASHMLA_SPARSE", "hy_v4.nvidia.flashmla_sparse"),
        ("mla.triton_mla", "TRITON_MLA", "dots3_note.nvidia.attention"),
    ],
)
def test_models_that_store_as_their_parents(module, name, place):
    """They read in a way of their own, and leave writing to what they derive from."""
    parent = backend_of(f"vllm.v1.attention.backends.{module}", name)
    methods = {"__module__": f"vllm.models.{place}", "get_impl_cls": staticmethod(lambda: int)}
    own = type("Own", (parent,), methods)
    assert of(own) == of(parent)
    assert of(own).arrangement is Arrangement.SLOTS
    other = backend_of(f"vllm.v1.attention.backends.{module}", name + "_")
    assert of(type("Own", (other,), methods)).arrangement is Arrangement.PAGE


@pytest.mark.parametrize(
    ("module", "name", "mode"),
    [
        pytest.param(
            *("ultraquant_attn", "ULTRAQUANT", "ULTRAQUANT_4BIT"),
            marks=requires_base("0.32.0", "0.33.0", reason="it has no such format"),
        ),
        *(
            pytest.param(
                *("rocm_octave_attn", "ROCM_OCTAVE", mode),
                marks=requires_base("0.33.0", reason="it has no such format"),
            )
            for mode in ("OCTAVE_K3V4", "OCTAVE_K3V3", "OCTAVE_K3V3_COMPACT")
        ),
    ],
)
def test_number_formats_of_one_backend(module, name, mode):
    """Others may fill what has the same number as they like: one is that of CUSTOM, too."""
    backends = "vllm.v1.attention.backends"
    assert of(backend_of(f"{backends}.{module}", name), _quantized(mode)).arrangement is (
        Arrangement.SLOTS
    )
    other = backend_of(f"{backends}.flash_attn", "FLASH_ATTN")
    assert of(other, _quantized(mode)).arrangement is Arrangement.PAGE


def _quantized(mode: str):
    return dataclasses.replace(SPEC, dtype=torch.uint8, kv_quant_mode=KVQuantMode[mode])


def _on(monkeypatch, capability: tuple[int, int]) -> None:
    """Have the platform be NVIDIA's."""
    platform = type(current_platform)
    monkeypatch.setattr(platform, "is_cuda", lambda _: True)
    monkeypatch.setattr(
        platform, "get_device_capability", lambda *_, **__: DeviceCapability(*capability)
    )


@requires_base("0.32.0", "0.33.0", reason="caches of 4 bits are not told apart there")
@pytest.mark.parametrize(
    ("module", "name", "mode", "devices", "equal"),
    [
        # V's scales are shuffled for Blackwell's kernels, and not for Hopper's.
        ("flashinfer", "FLASHINFER", "NVFP4", ((9, 0), (10, 0)), False),
        ("flashinfer", "FLASHINFER", "NVFP4", ((9, 0), (12, 1)), True),
        ("flashinfer", "FLASHINFER", "NVFP4", ((10, 0), (10, 3)), True),
        ("flashinfer", "FLASHINFER", "FP8_PER_TENSOR", ((9, 0), (10, 0)), True),
        # Keys of 8 bits are e4b15 on Ampere.
        ("turboquant_attn", "TURBOQUANT", "TURBOQUANT_K8V4", ((8, 0), (9, 0)), False),
        ("turboquant_attn", "TURBOQUANT", "TURBOQUANT_K8V4", ((9, 0), (10, 0)), True),
        ("turboquant_attn", "TURBOQUANT", "TURBOQUANT_4BIT_NC", ((8, 0), (9, 0)), True),
        ("mla.indexer", "DEEPSEEK_V32_INDEXER", "NONE", ((9, 0), (12, 0)), True),
    ],
)
def test_generations_of_gpus_are_a_pair_where_their_kernels_agree(
    monkeypatch, module, name, mode, devices, equal
):
    """What a known backend writes may still depend on the device."""
    backend = backend_of(f"vllm.v1.attention.backends.{module}", name)
    meanings = []
    for capability in devices:
        _on(monkeypatch, capability)
        meanings.append(of(backend, _quantized(mode)).meaning)
    assert (meanings[0] == meanings[1]) is equal


@requires_base("0.32.0", "0.33.0", reason="caches of 4 bits are not told apart there")
def test_kernels_for_4_bits_are_chosen_as_the_release_does():
    """`_nvfp4_kv_on_fa2`, whose module needs FlashInfer."""
    source = (ROOT / "vllm/v1/attention/backends/flashinfer.py").read_text()
    (chooser,) = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "_nvfp4_kv_on_fa2"
    )
    families = [node.elts for node in ast.walk(chooser) if isinstance(node, ast.Tuple)]
    assert [[each.value for each in elements] for elements in families] == [[80, 90, 120]]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("sparse_mla", "FLASHMLA_SPARSE_DSV4"),
        ("nvidia.flashinfer_sparse", "FLASHINFER_MLA_SPARSE_DSV4"),
        ("amd.rocm", "ROCM_FLASHMLA_SPARSE_DSV4"),
        ("cpu.cpu_mla", "CPU_V4_MLA_SPARSE"),
    ],
)
def test_settings_have_no_say_in_what_deepseek_v4_compresses(module, name):
    """Its kernels are the model's own: an engine without graphs and one with them are a pair."""
    backend = backend_of(f"vllm.models.deepseek_v4.{module}", name)
    assert of(backend, settings="graphs") == of(backend, settings="none")
    assert of(backend).arrangement is Arrangement.PAGE


def test_makers_of_gpus_write_indexers_in_their_own_ways(monkeypatch):
    """ROCm shuffles the keys of a block, and no shape shows it."""
    backend = backend_of("vllm.v1.attention.backends.mla.indexer", "DEEPSEEK_V32_INDEXER")
    _on(monkeypatch, (9, 0))
    nvidias = of(backend).meaning
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: False)
    meanings = [nvidias]
    for architecture in ("gfx942", "gfx950"):
        monkeypatch.setattr(cache_formats, "_device_name", lambda _, name=architecture: name)
        meanings.append(of(backend).meaning)
    assert all(one != other for one, other in itertools.combinations(meanings, 2))


@pytest.mark.parametrize("name", ["DEEPSEEK_V32_INDEXER", "DEEPSEEK_V4_INDEXER"])
@pytest.mark.parametrize("since", [False, True])
def test_scales_of_indexers_are_told_apart(monkeypatch, name, since):
    """Blackwell's are exponents in releases since 0.33, and numbers of 32 bits everywhere else."""
    backend = backend_of("vllm.v1.attention.backends.mla.indexer", name)
    change = dataclasses.replace(BLACKWELL_SCALES, since="0" if since else "99")
    monkeypatch.setattr(cache_formats, "BLACKWELL_SCALES", change)
    scales = []
    for capability in ((9, 0), (10, 0), (10, 3), (12, 0)):
        _on(monkeypatch, capability)
        scales.append(of(backend).meaning["scales"])
    blackwells = "exponents" if since else "float32"
    assert scales == ["float32", blackwells, blackwells, "float32"]


def test_fused_writers_of_rocm_are_told_apart():
    """A pass of the compiler's has ROCM_ATTN keep values in another order."""
    backend = backend_of("vllm.v1.attention.backends.rocm_attn", "ROCM_ATTN")
    assert of(backend, settings="fused") != of(backend, settings="not fused")


def test_releases_whose_writers_differ_are_told_apart(monkeypatch):
    """With a known backend by what has changed; with an unknown one each is another."""
    known, unknown = (
        backend_of("vllm.v1.attention.backends.rocm_attn", "ROCM_ATTN"),
        backend_of("vllm.models.some", "SECRET"),
    )
    slots = backend_of("vllm.v1.attention.backends.flash_attn", "FLASH_ATTN")
    before = [of(each).meaning for each in (known, unknown, slots)]
    since = "99" if ROCM_ATTN_VALUES.is_here else "0"
    other = dataclasses.replace(ROCM_ATTN_VALUES, since=since)
    monkeypatch.setattr(cache_formats, "ROCM_ATTN_VALUES", other)
    monkeypatch.setattr(cache_formats, "vllm_version", "99+cpu")
    after = [of(each).meaning for each in (known, unknown, slots)]
    assert [one == other for one, other in zip(before, after, strict=True)] == [False, False, True]
    assert after[1]["release"] == "99"


@pytest.mark.parametrize(
    ("module", "name", "mode", "keys_lead"),
    [
        ("flash_attn", "FLASH_ATTN", "NONE", True),
        ("flashinfer", "FLASHINFER", "FP8_PER_TENSOR", True),
        ("triton_attn", "TRITON_ATTN", "FP8_PER_TOKEN_HEAD", False),
        ("cpu_attn", "CPU_ATTN", "NONE", True),
        ("flash_attn_diffkv", "FLASH_ATTN_DIFFKV", "NONE", False),
        ("mla.triton_mla", "TRITON_MLA", "NONE", False),
        ("turboquant_attn", "TURBOQUANT", "NONE", False),
    ],
)
def test_which_slots_are_a_key_and_a_value(module, name, mode, keys_lead):
    """So that they can be taken apart for an engine of 0.22.1, which has two planes of them."""
    spec = SPEC if mode == "NONE" else _quantized(mode)
    assert of(backend_of(f"vllm.v1.attention.backends.{module}", name), spec).keys_lead is keys_lead


def test_unknown_inside_means_all_that_may_have_a_say_in_it(monkeypatch):
    """Whatever differs of it makes another meaning; what blocks are counted in does not."""
    backend = backend_of("vllm.models.some", "SECRET")
    known = of(backend)
    assert known.arrangement is Arrangement.PAGE
    assert "head_size=64" in known.meaning["specification"]
    for other in (
        of(backend_of("vllm.models.other", "SECRET")),
        of(backend, dataclasses.replace(SPEC, head_size=32)),
        of(backend, tensor=VIEW.transpose(1, 2).contiguous().transpose(1, 2)),
        of(backend, settings="t"),
    ):
        assert other.meaning != known.meaning
    for same in (
        of(backend, dataclasses.replace(SPEC, block_size=64)),
        of(backend, dataclasses.replace(SPEC, page_size_padded=1 << 20)),
        of(backend, tensor=torch.empty(9, *VIEW.shape[1:], dtype=VIEW.dtype)),
    ):
        assert same == known
    devices = [known.meaning]
    for name in ("9.0", "10.0"):
        monkeypatch.setattr(cache_formats, "_device_name", lambda _, name=name: name)
        devices += [of(backend).meaning, of(backend, tensor=VIEW.to("meta")).meaning]
    for one, other in itertools.combinations(devices, 2):
        assert {what for what in one if one[what] != other[what]} == {"device"}


def test_layers_beside_it_in_a_group_are_no_difference():
    """A group's specification is its layers' together, and stages have other layers."""
    backend = backend_of("vllm.models.some", "SECRET")
    windowed = dataclasses.replace(SPEC, sliding_window=128)
    one, other = (FullAttentionSpec.merge(specs) for specs in ([SPEC], [SPEC, windowed]))
    assert one != other
    assert of(backend, one) == of(backend, other)


def _fingerprint(cache_dtype: str = "auto", attention=None, **passes: bool) -> str:
    config = SimpleNamespace(
        attention_config=attention or AttentionConfig(),
        compilation_config=SimpleNamespace(pass_config=PassConfig(**passes)),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
    )
    return cache_formats.settings_fingerprint(config)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_PLUGINS", "kv_reshard"),
        ("VLLM_USE_V2_MODEL_RUNNER", "1"),
        ("VLLM_PROCESS_NAME_PREFIX", "prefill"),
        ("VLLM_RAY_BUNDLE_INDICES", "0,1"),
        ("VLLM_LOOPBACK_IP", "127.0.0.2"),
        ("VLLM_NIXL_SIDE_CHANNEL_PORT", "5601"),
        ("VLLM_IMAGE_TAG", "nightly"),
        ("CUDA_HOME", "/usr/local/cuda"),
        ("VLLM_PP_LAYER_PARTITION", "1,3"),
        ("VLLM_DEEPEP_BUFFER_SIZE_MB", "2048"),
        ("VLLM_LOGGING_LEVEL", "DEBUG"),
    ],
)
def test_engines_of_one_fleet_may_differ(monkeypatch, name, value):
    """In where they are, how they were packed, what runs them and what they log."""
    monkeypatch.delenv(name, raising=False)
    one = _fingerprint()
    monkeypatch.setenv(name, value)
    assert _fingerprint() == one


def test_passes_that_the_tp_size_turns_on_are_no_difference():
    """`enable_allreduce_rms_fusion` asks for several ranks: TP2 and TP1 are a pair."""
    assert _fingerprint(fuse_allreduce_rms=True) == _fingerprint(fuse_allreduce_rms=False)


@requires_base("0.32.0", "0.33.0", reason="the variable and the option are later")
def test_settings_that_may_change_an_inside_are_told_apart(monkeypatch):
    """Variables and options that choose kernels, and passes that fuse what writes the cache."""
    one = _fingerprint()
    assert _fingerprint("fp8") != one
    assert _fingerprint(attention=AttentionConfig(flash_attn_version=2)) != one
    monkeypatch.setattr(type(current_platform), "is_rocm", lambda _: True)
    assert _fingerprint(fuse_rope_kvcache=True) != _fingerprint(fuse_rope_kvcache=False)
    for name in ("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "VLLM_BATCH_INVARIANT"):
        monkeypatch.setenv(name, "1")
        assert _fingerprint() != one
        monkeypatch.delenv(name)


def test_every_known_backend_stands_in_its_module():
    """Modules are read, not imported: some need what only GPUs have. Some are not in all bases."""
    found = set()
    for module, name in KNOWN:
        path = ROOT / (module.replace(".", "/") + ".py")
        if not path.exists():
            continue
        strings = {
            node.value
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        if name in strings:
            found.add((module, name))
    later = {
        ("vllm.v1.attention.backends.mla.flashattn_mla_sparse", "FLASH_ATTN_MLA_SPARSE_FA4"),
        ("vllm.v1.attention.backends.rocm_octave_attn", "ROCM_OCTAVE"),
    }
    if RELEASE == "0.33.0":
        assert found == set(KNOWN)
    elif RELEASE == "0.32.0":
        assert found >= set(KNOWN) - later
    assert len(found) >= 12

# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402
"""What kv-plan says of a model's caches is what the engines' own layers and this connector say."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import vllm
from tests.bases import requires_base, skip_module_unless_base

skip_module_unless_base("0.32.0", "0.33.0", reason="its models are others")

from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.model_executor.models.config import GlmMoeDsaForCausalLM
from vllm.platforms import current_platform
from vllm.transformers_utils.configs.kimi_linear import KimiLinearConfig
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend
from vllm.v1.attention.backends.mla.indexer import (
    DeepseekV4IndexerBackend,
    DeepseekV32IndexerBackend,
)
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
)

from tests.v1.kv_connector.unit.reshard.cli.families import (
    DEEPSEEK_V4,
    HY_V4,
    INKLING,
    KIMI_LINEAR,
    MINIMAX_M3,
    MLA,
    WHOLE,
)
from tests.v1.kv_connector.unit.reshard.cli.whole_models import (
    BLOCK_TOKENS,
    described,
    kept_by,
    one_rank,
)
from tests.v1.kv_connector.unit.reshard.forms import backend_of
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.cli.caches import read_family
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.cli.command import main
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.cli.model import read_model
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.cli.verdicts import ARRANGED
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches import cache_formats
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches.arrangement import (
    Arrangement,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches.geometry import (
    unserved_layer,
)

WHOLE_BLOCKS = Arrangement.PAGE.value


@pytest.fixture(scope="module", autouse=True)
def rank(tmp_path_factory) -> Iterator[None]:
    """An engine of one rank."""
    with one_rank(tmp_path_factory.mktemp("rank")):
        yield


@pytest.fixture
def rows(tmp_path, capsys):
    """The kinds of cache that kv-plan knows of a configuration."""

    def run(config, *args: str) -> list[dict[str, Any]]:
        (tmp_path / "config.json").write_text(json.dumps(config))
        capsys.readouterr()
        layouts = ("--prefill", "tp=1", "--decode", "tp=1")
        assert main([*layouts, "--model", str(tmp_path), *args, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["caches"]

    return run


@pytest.fixture
def module_of(monkeypatch):
    """Imports a module of a model, without what its package takes pictures apart with."""

    def load(package: str, module: str) -> ModuleType:
        bare = ModuleType(f"vllm.models.{package}")
        bare.__path__ = [str(Path(vllm.__file__).parent / "models" / package)]
        monkeypatch.setitem(sys.modules, bare.__name__, bare)
        return importlib.import_module(f"vllm.models.{package}.{module}")

    return load


def kind_of(name: str, tokens_per_state: int, window: int) -> tuple[int, str]:
    """By the name of a layer in vLLM: its index, and what kv-plan calls what it keeps."""
    prefix, _, rest = name.removeprefix("model.layers.").partition(".")
    part = rest.removeprefix("self_attn.").removeprefix("attn").removeprefix(".")
    kinds = {
        "indexer.k_cache": "indexer",
        "swa_cache": "window",
        "indexer.compressor.state_cache": "state of indexer",
        # A window is of two groups where these are of four.
        "compressor.state_cache": f"state of C{4 if window == 8 else 128}",
    }
    return int(prefix), kinds.get(part, f"C{tokens_per_state}" if tokens_per_state > 1 else "main")


@pytest.mark.parametrize("family", WHOLE)
def test_every_layer_is_as_the_engine_has_it(family, rows, tmp_path):
    """Kinds, layers, bytes, blocks, windows, and whether blocks are looked into."""
    kept = kept_by(tmp_path, WHOLE[family])
    engines = {}
    for name, layer in described(kept).items():
        (plane,) = layer.planes
        spec = kept[name][0]
        window = getattr(spec, "sliding_window", None)
        engines[kind_of(name, spec.tokens_per_state, window)] = (
            plane.num_heads * plane.slot_bytes / plane.slot_tokens,
            plane.block_tokens,
            window,
            layer.meaning["arrangement"] == WHOLE_BLOCKS,
        )
    ours = {
        (layer, "main" if row["cache"] in ("heads", "latent") else row["cache"]): (
            row["token_bytes"],
            row["block_tokens"][0],
            row["window_tokens"],
            row["moved_as"] == WHOLE_BLOCKS,
        )
        for row in rows(WHOLE[family], "--block-size", str(BLOCK_TOKENS))
        for layer in row["layers"]
    }
    assert ours == engines


def test_blocks_of_indexers_are_their_kernels():
    """Whatever `--block-size` says: NVIDIA's take no other."""
    family = read_family({**MLA, "index_topk": 2048, "model_type": "deepseek_v32"}, "", 4)
    assert [family.caches[0].block_tokens] == (
        DeepseekV32IndexerBackend.get_supported_kernel_block_sizes()
    )
    of_v4 = {each.name: each.block_tokens for each in read_family(DEEPSEEK_V4, "", 6).caches}
    assert [of_v4["indexer"]] == DeepseekV4IndexerBackend.get_supported_kernel_block_sizes()


def test_minimax_m3_is_as_the_engine_has_it(rows, module_of):
    """Index keys beside heads, both of them in slots."""
    keys = module_of("minimax_m3", "common.indexer").MiniMaxM3IndexerCache(128, "keys")
    backend = module_of("minimax_m3", "common.sparse_attention").MiniMaxM3SparseBackend
    config = SimpleNamespace(cache_config=SimpleNamespace(block_size=128))
    # As the model's `get_kv_cache_spec` has it, which only GPUs can make.
    heads = FullAttentionSpec(
        block_size=128, num_kv_heads=4, head_size=128, head_size_v=128, dtype=torch.bfloat16
    )
    layers = described(
        {
            "index keys": (keys.get_kv_cache_spec(config), keys.get_attn_backend()),
            "heads": (heads, backend),
        }
    )
    found = rows(MINIMAX_M3, "--block-size", "128")
    assert [(row["cache"], row["layers"]) for row in found] == [
        ("heads", [0, 1, 2, 3]),
        ("index keys", [1, 2, 3]),
    ]
    for row in found:
        (plane,) = layers[row["cache"]].planes
        assert layers[row["cache"]].meaning["arrangement"] == "slots"
        assert row["token_bytes"] == plane.num_heads * plane.slot_bytes / plane.slot_tokens
        assert row["moved_as"] != WHOLE_BLOCKS


def test_hy_v4_is_as_the_engine_has_it(rows, module_of):
    """Latents in slots, which its own backend leaves to what it derives from, beside an indexer."""
    backend = module_of("hy_v4", "nvidia.flashmla_sparse").HYV4FlashMLASparseBackend
    latent = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    index = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=132, dtype=torch.uint8)
    layers = described({"latent": (latent, backend), "indexer": (index, DeepseekV32IndexerBackend)})
    found = rows(HY_V4, "--block-size", "64")
    assert [(row["cache"], row["layers"]) for row in found] == [
        ("latent", [0, 1, 2, 3]),
        ("indexer", [1, 3]),
    ]
    for row in found:
        (plane,) = layers[row["cache"]].planes
        assert row["token_bytes"] == plane.num_heads * plane.slot_bytes / plane.slot_tokens
        assert row["moved_as"] == layers[row["cache"]].meaning["arrangement"]


def test_inkling_is_as_the_engine_has_it(rows, module_of, monkeypatch):
    """Heads in slots, and what convolutions take in, of which nobody knows the inside."""
    module = module_of("inkling", "nvidia.sconv_swa_attn")
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    monkeypatch.setattr(module, "get_current_vllm_config", lambda: vllm_config)
    found = {row["cache"]: row for row in rows(INKLING) if row["cache"] != "heads"}
    assert {name: row["layers"] for name, row in found.items()} == {
        "conv inputs": [3],
        "conv inputs with a window": [0, 1, 2],
    }
    for name, heads, size in (("conv inputs", 4, 64), ("conv inputs with a window", 8, 32)):
        state = module.InklingConvState(
            num_kv_heads=heads, head_dim=size, hidden_size=256, kernel_size=4, prefix=name
        )
        spec = state.get_kv_cache_spec(vllm_config)
        layers = described({name: (spec, state.get_attn_backend())})
        (plane,) = layers[name].planes
        row = found[name]
        assert row["token_bytes"] == plane.num_heads * plane.slot_bytes / plane.slot_tokens
        assert row["block_tokens"] == [plane.block_tokens] * 2
        assert row["window_tokens"] == spec.sliding_window
        assert row["moved_as"] == layers[name].meaning["arrangement"] == WHOLE_BLOCKS


def test_kimi_linear_is_as_the_engine_has_it(rows, tmp_path):
    """State of the layers that vLLM's configuration calls linear, and latents of the others."""
    (row,) = rows(KIMI_LINEAR)
    own = {name: value for name, value in KIMI_LINEAR.items() if name != "dtype"}
    config = KimiLinearConfig(**own)
    layers = range(config.num_hidden_layers)
    assert row["layers"] == [layer for layer in layers if not config.is_kda_layer(layer)]
    sizes = config.linear_attn_config
    shapes = MambaStateShapeCalculator.kda_state_shape(
        1, sizes["num_heads"], sizes["head_dim"], conv_kernel_size=sizes["short_conv_kernel_size"]
    )
    spec = MambaSpec(
        block_size=64,
        shapes=shapes,
        dtypes=(torch.bfloat16,) * len(shapes),
        mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
    )
    engines = {}
    for name, layer in described({"layer": (spec, GDNAttentionBackend)}).items():
        (plane,) = layer.planes
        num_bytes = plane.num_heads * plane.block_tokens * plane.slot_bytes
        engines[name.removeprefix("layer/")] = num_bytes
    state = read_model(tmp_path).state
    assert {each.name: 2 * each.num_units * each.unit_elements for each in state} == engines
    assert {each.layers for each in state} == {
        tuple(layer for layer in layers if config.is_kda_layer(layer))
    }


def _heads(_: object) -> FullAttentionSpec:
    """What the layer keeps that a ring of Step 5's belongs to."""
    return FullAttentionSpec(block_size=64, num_kv_heads=4, head_size=128, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("package", "module", "name", "arguments"),
    [
        (
            *("deepseek_v41", "compressor", "CompressorStateCache"),
            dict(state_dim=8, dtype=torch.float32),
        ),
        (
            *("glm5next", "common.attention", "Glm5NextTailCache"),
            dict(head_dim=128, dtype=torch.bfloat16, index_kpool=16),
        ),
        (
            *("qwen4_exp", "common.qsa_cache", "QSAKeyStateCache"),
            dict(head_size=64, dtype=torch.bfloat16, compress_ratio=8),
        ),
        pytest.param(
            *("step5", "nvidia.csa_tail_ring", "Step5CSATailRing"),
            dict(
                main_layer_name="heads",
                num_speculative_tokens=0,
                static_forward_context={"heads": SimpleNamespace(get_kv_cache_spec=_heads)},
            ),
            marks=requires_base("0.33.0", reason="it has no Step 5"),
        ),
    ],
)
def test_engines_leave_rings_to_upstream(module_of, package, module, name, arguments):
    """As kv-plan says of these families, for the same reason."""
    vllm_config = get_current_vllm_config()
    more = {
        "cache_config": SimpleNamespace(block_size=256),
        "vllm_config": vllm_config,
        "prefix": f"ring of {name}",
    }
    cache = getattr(module_of(package, module), name)
    wanted = {
        "deepseek_v41": ("prefix",),
        "glm5next": ("prefix", "cache_config"),
        "step5": ("prefix",),
    }
    arguments |= {each: more[each] for each in wanted.get(package, more)}
    spec = cache(**arguments).get_kv_cache_spec(vllm_config)
    said = unserved_layer(KVCacheConfig(4, [], [KVCacheGroupSpec(["ring"], spec)]))
    assert said is not None and "CircularBufferSpec" in said


BACKENDS = {
    "CPU_ATTN": ("cpu_attn", "CPU_ATTN", "NONE"),
    "FLASHINFER": ("flashinfer", "FLASHINFER", "NVFP4"),
    "ROCM_ATTN": ("rocm_attn", "ROCM_ATTN", "NONE"),
    "ROCM_AITER_FA": ("rocm_aiter_fa", "FLASH_ATTN", "NONE"),
    "ROCM_AITER_UNIFIED_ATTN": ("rocm_aiter_unified_attn", "ROCM_AITER_UNIFIED_ATTN", "NONE"),
}
"""By what users call them: their modules, their own names, and how numbers are quantized."""


@pytest.mark.parametrize("told", ARRANGED, ids=lambda each: each.where.split()[0])
def test_backends_are_as_the_engine_knows_them(told, monkeypatch):
    """Those that arrange blocks as they like, and the one that nobody looks into."""
    shuffles = "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT" in told.where
    monkeypatch.setattr(cache_formats, "_is_shuffled", lambda: shuffles)
    module, name, mode = BACKENDS[told.where.split()[0]]
    spec = FullAttentionSpec(
        block_size=16,
        num_kv_heads=2,
        head_size=64,
        dtype=torch.bfloat16,
        kv_quant_mode=KVQuantMode[mode],
    )
    backend = backend_of(f"vllm.v1.attention.backends.{module}", name)
    tensor = torch.empty(4, 2, 16, 128, dtype=torch.bfloat16)
    arrangement = cache_formats.cache_format(backend, spec, tensor, "").arrangement
    assert arrangement not in (Arrangement.SLOTS, Arrangement.SIDES)
    assert (arrangement is Arrangement.PAGE) is told.is_whole


@pytest.mark.parametrize("is_blackwell", [False, True])
def test_glm_5_is_in_8_bits_on_blackwell(is_blackwell, monkeypatch):
    """VLLM chooses so where nothing else is said, and there alone."""
    kind = type(current_platform)
    monkeypatch.setattr(kind, "is_cuda", lambda _: True)
    monkeypatch.setattr(kind, "is_device_capability_family", lambda *_: is_blackwell)
    config = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="auto"),
        speculative_config=None,
        parallel_config=SimpleNamespace(set_dcp_defaults=lambda **_: None),
    )
    GlmMoeDsaForCausalLM.verify_and_update_config(config)
    assert (config.cache_config.cache_dtype != "auto") is is_blackwell

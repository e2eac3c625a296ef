# SPDX-License-Identifier: Apache-2.0
"""A worker's layers, as its configuration and its tensors have them."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)

from tests.bases import requires_base
from tests.v1.kv_connector.unit.reshard import forms
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches.geometry import (
    keeps_no_middle,
    layers_of_worker,
    memory_regions,
    window_groups,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches.ownership import (
    Split,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import LocalLayoutError

BLOCKS, HEADS, TOKENS, SIZE = 6, 3, 16, 8
SIZES = dict(block_size=TOKENS, num_kv_heads=HEADS, head_size=SIZE)
LATENT = dict(block_size=TOKENS, num_kv_heads=1, head_size=576)
FULL = FullAttentionSpec(**SIZES, dtype=torch.float32)


def config(*layers: str, spec=FULL, blocks: int = BLOCKS) -> KVCacheConfig:
    """One group of layers."""
    return KVCacheConfig(blocks, [], [KVCacheGroupSpec(list(layers), spec)])


def cache_of(spec, tensor: torch.Tensor | None = None, *, blocks: int = BLOCKS):
    """The cache of one layer with the given specification."""
    tensor = forms.empty(blocks, HEADS, TOKENS, SIZE) if tensor is None else tensor
    layers = layers_of_worker(
        {"layer": tensor}, config("layer", spec=spec), {"layer": forms.backend()}
    )
    return layers["layer"].cache


@requires_base("0.32.0", "0.33.0", reason="it has no such layers")
def test_prompts_with_a_window_of_answers_are_as_all_others():
    """The release gives up what lies between a prompt and that window, and nothing of a prompt."""
    from vllm.v1.core.single_type_kv_cache_manager import RSWAManager
    from vllm.v1.kv_cache_interface import RSWASpec

    spec = RSWASpec(**SIZES, dtype=torch.float32, rswa_window=32)
    tensor = forms.empty(BLOCKS, HEADS, TOKENS, SIZE)
    assert cache_of(spec, tensor) == cache_of(FULL, tensor)
    assert keeps_no_middle(config("layer", spec=spec)) and not keeps_no_middle(config("layer"))
    assert window_groups(config("layer", spec=spec)) == frozenset()
    freed: list[range] = []
    manager = SimpleNamespace(
        block_size=TOKENS,
        rswa_window=32,
        _remove_blocks_in_range=lambda _, first, last: freed.append(range(first, last)),
    )
    for num_tokens in (100, 200):
        RSWAManager.remove_skipped_blocks(manager, "a", num_tokens, num_prompt_tokens=100)
    at_the_end_of_a_prompt, in_an_answer = map(list, freed)
    assert at_the_end_of_a_prompt == []
    assert in_an_answer == [7, 8, 9]


@pytest.mark.parametrize("token_major", [False, True])
def test_every_slot_is_found(token_major):
    """Address and strides lead to the very element that indexing the tensor gives."""
    tensor = forms.empty(BLOCKS, HEADS, TOKENS, SIZE, token_major=token_major)
    planes = cache_of(FULL, tensor).planes
    views = forms.as_planes(tensor)
    for number, plane in enumerate(planes):
        assert (plane.num_heads, plane.block_tokens, plane.slot_tokens) == (HEADS, TOKENS, 1)
        assert plane.slot_bytes == 2 // len(planes) * SIZE * 4
        for block, head, token in [(0, 0, 0), (3, HEADS - 1, 5), (5, 0, 15)]:
            address = (
                plane.address + block * plane.block_stride_bytes + plane.offset_bytes(head, token)
            )
            assert address == views[number, block, head, token, 0].data_ptr()


def test_the_latent_of_mla_is_one_plane():
    """One head that every rank holds: key and value are made of the same bytes."""
    tensor = forms.empty(BLOCKS, 1, TOKENS, 576, mla=True, dtype=torch.bfloat16)
    spec = MLAAttentionSpec(**LATENT, dtype=torch.bfloat16)
    names = {"layer": forms.backend(mla=True)}
    layers = layers_of_worker({"layer": tensor}, config("layer", spec=spec), names)
    (plane,) = layers["layer"].cache.planes
    assert (plane.num_heads, plane.slot_bytes, plane.slot_tokens) == (1, 2 * 576, 1)
    assert plane.slot_stride_bytes == plane.slot_bytes
    assert plane.block_stride_bytes == TOKENS * plane.slot_bytes


@pytest.mark.parametrize(
    "shaped",
    [
        "plainly",
        pytest.param(
            "in a way that is not known",
            marks=requires_base("0.32.0", "0.33.0", reason="such blocks are refused"),
        ),
    ],
)
def test_each_layer_is_divided_in_its_own_way(shaped):
    """A draft's layers may be of another kind; blocks of unknown inside are each rank's own."""
    known = shaped == "plainly"
    groups = [
        KVCacheGroupSpec(["latent"], MLAAttentionSpec(**LATENT, dtype=torch.half)),
        KVCacheGroupSpec(["draft"], FULL),
    ]
    tensors = {
        "latent": forms.empty(BLOCKS, 1, TOKENS, 576, mla=True, dtype=torch.half),
        "draft": forms.empty(BLOCKS, HEADS, TOKENS, SIZE),
    }
    backends = {
        name: forms.backend(mla=name == "latent") if known else forms.backend_of("elsewhere", "OWN")
        for name in tensors
    }
    names = {"draft": "draft0@draft-of-ours"}
    layers = layers_of_worker(tensors, KVCacheConfig(BLOCKS, [], groups), backends, names)
    assert {name: layer.split for name, layer in layers.items()} == {
        "latent": Split.LATENT,
        "draft0@draft-of-ours": Split.UNITS if known else Split.RANKS,
    }


def test_smaller_kernel_blocks_are_counted():
    """Where the kernel's blocks are halves of the scheduler's, an id stands for two."""
    assert cache_of(FULL, forms.empty(2 * BLOCKS, HEADS, TOKENS, SIZE)).blocks_per_id == 2


def test_groups_are_kept_and_foreign_layers_left_out():
    """Each layer carries its own group; layers without a tensor here are on another stage."""
    groups = [
        KVCacheGroupSpec(["full", "elsewhere"], FULL),
        KVCacheGroupSpec(
            ["window"], SlidingWindowSpec(**SIZES, dtype=torch.float32, sliding_window=64)
        ),
    ]
    shared = forms.empty(BLOCKS, HEADS, TOKENS, SIZE)
    tensors = {"full": shared, "window": shared}
    backends = dict.fromkeys(tensors, forms.backend())
    layers = layers_of_worker(tensors, KVCacheConfig(BLOCKS, [], groups), backends)
    assert {name: layer.cache.group for name, layer in layers.items()} == {"full": 0, "window": 1}
    assert memory_regions(tensors) == [(shared.data_ptr(), shared.nbytes, 0)]


def test_layers_that_share_anothers_cache_have_none_of_their_own():
    """They are in the same group, and their blocks are read once, for the layer that owns them."""
    owned, other = (forms.empty(BLOCKS, HEADS, TOKENS, SIZE) for _ in range(2))
    tensors = {"owner": owned, "sharer": owned, "other": other}
    backends = dict.fromkeys(tensors, forms.backend())
    assert list(layers_of_worker(tensors, config(*tensors), backends)) == ["owner", "other"]


def test_scales_beside_what_they_scale_are_read_with_it():
    """A slot is then larger than its numbers."""
    spec = dataclasses.replace(FULL, kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD)
    tensor = forms.empty(BLOCKS, HEADS, TOKENS, SIZE + 4, dtype=torch.int8)
    planes = cache_of(spec, tensor).planes
    assert {plane.slot_bytes for plane in planes} == {2 // len(planes) * (SIZE + 4)}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        pytest.param(
            MambaSpec(block_size=TOKENS, shapes=((1,),), dtypes=(torch.half,)),
            "keeps MambaSpec in a form that is not known",
            marks=requires_base("0.32.0", "0.33.0", reason="state is left to upstream's"),
        ),
        (
            SinkFullAttentionSpec(**SIZES, dtype=torch.float32, sink_len=4),
            "keeps SinkFullAttentionSpec in a form that is not known",
        ),
    ],
)
def test_what_is_kept_in_other_ways_is_refused(spec, message):
    """State that is no attention cache, blocks with holes."""
    with pytest.raises(LocalLayoutError, match=message):
        cache_of(spec)


def test_blocks_that_the_scheduler_does_not_count_are_refused():
    """Its ids would name other blocks than ours."""
    with pytest.raises(LocalLayoutError, match="scheduler counts 6"):
        cache_of(FULL, blocks=BLOCKS + 1)


def test_worker_without_layers_is_refused():
    """There is nothing to transfer."""
    with pytest.raises(LocalLayoutError, match="no layer"):
        layers_of_worker({}, config("layer"), {})

# SPDX-License-Identifier: Apache-2.0
"""Planes found in tensors that backends shape in their own ways, as in 0.22.1."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from tests.bases import skip_module_unless_base
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches.cache_views import (
    Arrangement,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches.geometry import (
    memory_regions,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import LocalLayoutError

skip_module_unless_base("0.22.1", reason="all caches are views of one form")

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches.probed_shapes import (  # noqa: E402
    describe_layer,
    split_layers,
)

BLOCKS, HEADS, TOKENS, SIZE = 6, 3, 16, 8
SIZES = dict(block_size=TOKENS, num_kv_heads=HEADS, head_size=SIZE)


class Backend:
    """An attention backend that shapes its cache as told."""

    def __init__(self, axes: str) -> None:
        self.axes = axes

    def get_name(self) -> str:
        """Name of the backend."""
        return "TEST_ATTN"

    def get_kv_cache_shape(self, num_blocks, block_size, num_kv_heads, head_size):
        """The shape, in the order of the axes."""
        sizes = {"p": 2, "b": num_blocks, "h": num_kv_heads, "t": block_size, "s": head_size}
        return tuple(sizes[axis] for axis in self.axes)


@pytest.mark.parametrize("axes", ["pbhts", "pbths", "bphts", "bpths", "bts"])
@pytest.mark.parametrize("memory_order", ["as shaped", "heads before tokens"])
def test_every_slot_is_found(axes, memory_order):
    """Address and strides lead to the very element that indexing the tensor gives."""
    backend = Backend(axes)
    shape = backend.get_kv_cache_shape(BLOCKS, TOKENS, HEADS, SIZE)
    if memory_order == "heads before tokens" and "th" in axes:
        h, t = axes.index("h"), axes.index("t")
        order = list(range(len(axes)))
        order[h], order[t] = t, h
        tensor = torch.empty([shape[axis] for axis in order]).permute(order)
    else:
        tensor = torch.empty(shape)
    num_blocks, planes = describe_layer("layer", tensor, None, backend, Arrangement.SLOTS)
    assert len(planes) == (2 if "p" in axes else 1)
    assert num_blocks == BLOCKS
    for number, plane in enumerate(planes):
        assert plane.num_heads == (HEADS if "h" in axes else 1)
        assert (plane.block_tokens, plane.slot_bytes) == (TOKENS, SIZE * 4)
        for block, head, token in [(0, 0, 0), (3, plane.num_heads - 1, 5), (5, 0, 15)]:
            place = {"p": number, "b": block, "h": head, "t": token, "s": 0}
            element = tensor[tuple(place[axis] for axis in axes)]
            address = (
                plane.address + block * plane.block_stride_bytes + plane.offset_bytes(head, token)
            )
            assert address == element.data_ptr()


def test_packed_heads_are_whole():
    """A head's tokens adjoin, and none has a place of its own."""
    tensor = torch.empty(2, BLOCKS, HEADS, TOKENS, SIZE)
    _, (key, value) = describe_layer("layer", tensor, None, Backend("pbhts"), Arrangement.HEADS)
    assert key.slot_tokens == value.slot_tokens == key.block_tokens
    assert value.address - key.address == tensor[0].nbytes
    assert key.head_stride_bytes == TOKENS * SIZE * 4


@pytest.mark.parametrize(
    ("tensor", "axes", "message"),
    [
        (torch.empty(2, BLOCKS, HEADS, TOKENS, SIZE * 2)[..., ::2], "pbhts", "in steps of"),
        (torch.empty(2, BLOCKS, HEADS, TOKENS), "pbht", "TEST_ATTN shapes .* is not understood"),
    ],
)
def test_what_cannot_be_described_is_refused(tensor, axes, message):
    """The error names the layer or the backend, and what to do."""
    with pytest.raises(LocalLayoutError, match=message):
        describe_layer("layer", tensor, None, Backend(axes), Arrangement.SLOTS)


@pytest.mark.parametrize("order", [(2, 4, 0, 1, 3, 5), (2, 0, 1, 3, 4, 5), (1, 3, 0, 2, 4, 5)])
def test_layers_of_one_tensor_are_those_of_the_model_runner(order):
    """Each layer is the very memory that vLLM's runner gives to it, whatever the order of axes."""

    class Together(Backend):
        """A backend whose layers lie together, in the given order of axes."""

        def get_kv_cache_shape(self, *sizes, cache_dtype_str="auto", **named):
            """The shape, in the order of the axes."""
            names = ("num_blocks", "block_size", "num_kv_heads", "head_size")
            return super().get_kv_cache_shape(**dict(zip(names, sizes, strict=False)), **named)

        def get_kv_cache_stride_order(self, include_num_layers_dimension=False):
            """Which axis comes when, in memory."""
            return order

    spec = FullAttentionSpec(**SIZES, dtype=torch.float32)
    names = ["b", "a", "c"]
    tensors = [KVCacheTensor(BLOCKS * spec.page_size_bytes, [name]) for name in names]
    kv_cache_config = KVCacheConfig(BLOCKS, tensors, [KVCacheGroupSpec(names, spec)])
    backend = Together("bpths")
    runners, together, _ = KVConnectorModelRunnerMixin.allocate_uniform_kv_caches(
        kv_cache_config,
        [[SimpleNamespace(kv_cache_spec=spec, backend=backend)]],
        "auto",
        torch.device("cpu"),
        [TOKENS],
    )
    layers = split_layers(together, kv_cache_config, backend)
    assert layers.keys() == runners.keys()
    for name, layer in layers.items():
        expected = runners[name]
        assert layer.data_ptr() == expected.data_ptr()
        assert (layer.shape, layer.stride()) == (expected.shape, expected.stride())
    assert len(memory_regions(layers)) == 1

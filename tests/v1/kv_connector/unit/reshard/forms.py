# SPDX-License-Identifier: Apache-2.0
"""KV caches and reports in the form that the base has which the tests run on.

Whatever a cache's is, tests see a layer as planes of blocks: [planes, blocks, heads, tokens, size],
a view of its tensor.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.flex_attention import FlexAttentionBackend
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend
from vllm.v1.kv_cache_interface import KVCacheTensor

from vllm.distributed.kv_transfer.kv_connector.v1 import reshard
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.connector import NixlConnector
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine import compat

SHAPED_BY_BACKENDS = not compat.CACHES_ARE_VIEWS
"""Whether every backend shapes its cache in its own way; else all are views of one form."""


class _PlanesFirst(FlexAttentionBackend):
    """A backend with plain HND blocks, its planes apart."""

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size):
        """Shape of a layer's cache."""
        return 2, num_blocks, num_kv_heads, block_size, head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension=False):
        """Memory of all layers together: blocks, heads, layers, planes, tokens, size."""
        assert include_num_layers_dimension
        return 2, 3, 0, 1, 4, 5


def backend(*, mla: bool = False, shaped_by_backends: bool = SHAPED_BY_BACKENDS) -> Any:
    """An attention backend that stores in plain strides."""
    if mla:
        return TritonMLABackend
    return _PlanesFirst if shaped_by_backends else FlexAttentionBackend


def describe_layer(shaped_by_backends: bool) -> Callable[..., Any]:
    """What finds planes in caches of that form, which may be another base's."""
    if shaped_by_backends == SHAPED_BY_BACKENDS:
        return compat.describe_layer
    assert shaped_by_backends, "caches of later bases are described by what only these have"
    return _of_base("0.22.1", "engine/caches/probed_shapes.py").describe_layer


@cache
def _of_base(release: str, path: str) -> Any:
    """A module of the package that a base alone has, loaded on another one."""
    package = reshard.__name__
    name = f"{package}.{path.removesuffix('.py').replace('/', '.')}"
    overlay = Path(__file__).parents[5] / "bases" / release / Path(*package.split("."), path)
    spec = importlib.util.spec_from_file_location(name, overlay)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look it up.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def backend_of(module: str, name: str) -> type[AttentionBackend]:
    """An attention backend of that name, which a module of vLLM's would define."""
    methods = {"get_name": staticmethod(lambda: name), "get_impl_cls": staticmethod(lambda: int)}
    return type("Backend", (AttentionBackend,), {"__module__": module, **methods})


def empty(
    blocks: int,
    heads: int,
    tokens: int,
    size: int,
    *,
    mla: bool = False,
    dtype: torch.dtype = torch.float32,
    token_major: bool = False,
    shaped_by_backends: bool = SHAPED_BY_BACKENDS,
) -> torch.Tensor:
    """A layer's cache, full of zeros, as the model runner would register it."""
    if shaped_by_backends and mla:
        return torch.zeros(blocks, tokens, size, dtype=dtype)
    width = size if mla or shaped_by_backends else 2 * size
    planes = (2,) if shaped_by_backends else ()
    if token_major:
        return torch.zeros(*planes, blocks, tokens, heads, width, dtype=dtype).transpose(-3, -2)
    return torch.zeros(*planes, blocks, heads, tokens, width, dtype=dtype)


def as_planes(
    tensor: torch.Tensor, *, mla: bool = False, shaped_by_backends: bool = SHAPED_BY_BACKENDS
) -> torch.Tensor:
    """A view of a layer's cache: planes, blocks, heads, tokens, size."""
    if shaped_by_backends:
        return tensor[None, :, None] if mla else tensor
    if mla:
        return tensor[None]
    return tensor.unflatten(-1, (2, -1)).permute(3, 0, 1, 2, 4)


def cache_tensors(names: Sequence[str], num_blocks: int, page_size_bytes: int) -> list[Any]:
    """What a configuration says of the tensors of layers that have one each."""
    size = num_blocks * page_size_bytes
    if SHAPED_BY_BACKENDS:
        return [KVCacheTensor(size, [name]) for name in names]
    return [KVCacheTensor(size, [name], size, page_size_bytes) for name in names]


def compressed(spec: Any, tokens_per_slot: int) -> Any:
    """The same specification with several tokens to a slot."""
    name = "compress_ratio" if SHAPED_BY_BACKENDS else "tokens_per_state"
    return dataclasses.replace(spec, **{name: tokens_per_slot})


def failed_reads(failed: Mapping[str, Iterable[int]]) -> dict[str, set[Any]]:
    """How a `KVConnectorOutput` says which requests' blocks could not be read."""
    if compat.FAILED_READS_ARE_NAMED:
        return {"failed_recving": set(failed)}
    return {"invalid_block_ids": set().union(*failed.values())}


def results(connector: Any) -> tuple[set[str], set[str], dict[str, set[Any]]]:
    """What a runner asks of a connector after a step: sent, received, and failed reads."""
    if compat.FAILED_READS_ARE_NAMED:
        found = connector.get_transfer_results(set())
        assert not connector.get_block_ids_with_load_errors()
        failed = {"failed_recving": found.failed_recving}
        return found.finished_sending, found.finished_recving, failed
    sent, received = connector.get_finished(set())
    failed = {"invalid_block_ids": connector.get_block_ids_with_load_errors()}
    return sent or set(), received or set(), failed


def upstreams_request(tp_rank: int) -> tuple[bytes | int, ...]:
    """What upstream's worker sends to a side channel, to hear of a rank of the first stage."""
    return (GET_META_MSG, *compat.REQUEST_NUMBERS[1:], tp_rank)


def upstreams_payloads(payload: bytes, num_ranks: int) -> dict[Any, bytes]:
    """What upstream's listener is given, to tell of the ranks of one stage."""
    stage = compat.REQUEST_NUMBERS[1:]
    return {(*stage, rank) if stage else rank: payload for rank in range(num_ranks)}


def register_together(
    worker: Any, kv_cache_config: Any, sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> Mapping[str, torch.Tensor]:
    """Give a worker all layers in one tensor, heads outside of layers; returns each layer's.

    Args:
        worker: Who registers them.
        kv_cache_config: Says which layers there are.
        sizes: Blocks, heads, tokens and size.
        dtype: Of the tensor.
    """
    blocks, heads, tokens, size = sizes
    names = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
    if not SHAPED_BY_BACKENDS:
        together = torch.zeros(blocks, heads, len(names), tokens, 2 * size, dtype=dtype)
        layers = {name: together[:, :, number] for number, name in enumerate(names)}
        worker.register_kv_caches(layers)
        return layers
    together = torch.zeros(blocks, heads, len(names), 2, tokens, size, dtype=dtype)
    connector = object.__new__(NixlConnector)
    connector.connector_worker, connector.kv_cache_config = worker, kv_cache_config
    connector.register_cross_layers_kv_cache(together, backend())
    return {
        name: together[:, :, number].permute(2, 0, 1, 3, 4) for number, name in enumerate(names)
    }

# SPDX-License-Identifier: Apache-2.0
"""Caches as the release makes them, and which of their bytes a writer of the release writes.

Nothing here knows how a block is filled but through what the connector says of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from tests.bases import RELEASE
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches.geometry import (
    layers_of_worker,
)

if RELEASE == "0.32.0":
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
else:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups

LAYERS = "layers.0", "layers.1", "layers.2"
NUM_BLOCKS = 3

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Writes tokens into a layer's view. Given are the view, [blocks, heads, states, content], the slot
of each token, and keys and values, [tokens, heads, size]."""


class Cache:
    """Some layers of one kind in memory that the release has allocated and cut into views.

    Args:
        backend: The layers' attention backend.
        spec: Their specification, before the backend has had its say.
        layout: In what order the axes lie in memory.
        num_blocks: Blocks of the scheduler's.
        kernel_tokens: Tokens in a block of the backend's, where these are smaller.

    Attributes:
        spec: The layers' specification.
        layers: What the connector says of each layer.
        views: What the release takes for each layer's cache.
        planes: The planes that it finds in each.
        arrangement: How it says that a block is filled.
    """

    def __init__(
        self,
        backend: Any,
        spec: Any,
        layout: str = "LBHNC",
        num_blocks: int = NUM_BLOCKS,
        kernel_tokens: int | None = None,
    ) -> None:
        self.spec = backend.customize_spec(spec)
        order = KVCacheLayout[layout]
        config = SimpleNamespace(
            attention_config=SimpleNamespace(hisparse_config=None),
            cache_config=SimpleNamespace(
                get_resolved_kv_cache_layout=lambda: order,
                num_gpu_blocks_override=num_blocks,
                prefix_cache_retention_interval=None,
            ),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, decode_context_parallel_size=1),
        )
        groups = [KVCacheGroupSpec(list(LAYERS), self.spec)]
        places = get_kv_cache_config_from_groups(config, groups, 0)
        kernel_blocks = None if kernel_tokens is None else [kernel_tokens]
        self.views = allocate_kv_cache(places, torch.device("cpu"), order, kernel_blocks)
        self.layers = layers_of_worker(self.views, places, dict.fromkeys(LAYERS, backend))
        self.planes = {name: layer.cache.planes for name, layer in self.layers.items()}
        self.arrangement = self.layers[LAYERS[0]].cache.meaning["arrangement"]
        storage = self.views[LAYERS[0]].untyped_storage()
        self._address = storage.data_ptr()
        self._memory = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()

    def after(self, write: Callable[[], None], background: int) -> np.ndarray:
        """All bytes once something has been written over memory that is all of one byte."""
        self._memory[:] = background
        write()
        return self._memory.copy()

    def written(self, write: Callable[[], None]) -> np.ndarray:
        """Which bytes are written, where the same are each time: none is like both backgrounds."""
        changed = [self.after(write, each) != each for each in (0xA5, 0x5A)]
        written: np.ndarray = changed[0] | changed[1]
        return written

    def addressed(
        self,
        layer: str,
        block: int,
        tokens: Iterable[int],
        heads: Iterable[int] | None = None,
    ) -> np.ndarray:
        """Which bytes some tokens of a block have, for the connector.

        Args:
            layer: The layer.
            block: The block.
            tokens: Positions within the block.
            heads: Positions within the rank's heads; all where it is not given.
        """
        found = np.zeros(len(self._memory), bool)
        for plane in self.planes[layer]:
            begin = plane.address - self._address + block * plane.block_stride_bytes
            for head in range(plane.num_heads) if heads is None else heads:
                for token in tokens:
                    first = begin + plane.offset_bytes(head, token)
                    found[first : first + plane.slot_bytes] = True
        return found


def bare(implementation: type, **attributes: Any) -> Any:
    """An implementation with what its writer needs, whose constructor asks for a device."""
    made = object.__new__(implementation)
    vars(made).update(attributes)
    return made


def check(
    cache: Cache,
    write: Write,
    size: int,
    *,
    dtype: torch.dtype = torch.float32,
    size_v: int | None = None,
    layer: str = LAYERS[1],
    block: int = 1,
    states: Sequence[int] = (1, -1),
    unwritten: int = 0,
) -> None:
    """Hold what a writer writes against what the connector says that it does.

    A state has exactly the bytes that are its own where it has a place of its own, and else some of
    those that it shares; all states of a block have all. A head's numbers are in its bytes only.

    Args:
        cache: The cache.
        write: The release's writer.
        size: Elements of a key.
        dtype: Type of keys and values.
        size_v: Elements of a value, where they are not those of a key.
        layer: The layer that is written to; nothing of others may change.
        block: The block that is written to; nothing of others may change.
        states: Positions of states within the block that are written alone.
        unwritten: Bytes of a state of a head that no one writes, as they only pad it.
    """
    size_v = size if size_v is None else size_v
    view, num_heads, num_states = cache.views[layer], cache.spec.num_kv_heads, cache.spec.num_states
    states = [state % num_states for state in states]
    tokens_per_state = cache.spec.block_size // num_states
    planes = cache.planes[layer]

    def writer(chosen: Sequence[int], head: int | None = None) -> Callable[[], None]:
        """Writes some states, with other numbers in one head."""
        random = torch.Generator().manual_seed(1)
        keys, values = (
            torch.randn(len(chosen), num_heads, each, generator=random) for each in (size, size_v)
        )
        if head is not None:
            keys[:, head], values[:, head] = keys[:, head] * -3 + 1, values[:, head] * -3 + 1
        slots = torch.tensor([block * num_states + state for state in chosen])
        return lambda: write(view, slots, keys.to(dtype), values.to(dtype))

    for state in states:
        written = cache.written(writer([state]))
        addressed = cache.addressed(layer, block, [state * tokens_per_state])
        assert written.any()
        assert not (written & ~addressed).any()
        if all(plane.slot_tokens == tokens_per_state for plane in planes):
            assert (addressed & ~written).sum() == unwritten * num_heads
    every = range(num_states)
    addressed = cache.addressed(layer, block, range(cache.spec.block_size))
    written = cache.written(writer(every))
    assert not (written & ~addressed).any()
    assert (addressed & ~written).sum() == unwritten * num_heads * num_states
    if planes[0].num_heads != num_heads:
        return
    one = cache.after(writer(states), 0)
    for head in range(num_heads):
        differing = one != cache.after(writer(states, head), 0)
        assert differing.any()
        heads_own = cache.addressed(layer, block, range(cache.spec.block_size), [head])
        assert not (differing & ~heads_own).any()

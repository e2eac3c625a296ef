# SPDX-License-Identifier: Apache-2.0
"""Whole engines of a model whose layers differ: what each keeps, and a request that is read.

As `workers`, with layers, heads, caches and KV-cache groups of each layer's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.distributed.utils import get_pp_indices
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from tests.v1.kv_connector.unit.reshard import forms
from tests.v1.kv_connector.unit.reshard.engine.configs import stand_at, worker_config
from tests.v1.kv_connector.unit.reshard.engine.workers import OFFER, Engine, Progress
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine import worker as worker_module
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.worker import ReshardWorker
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import (
    ParallelMesh,
    Shard,
    shard_model,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import Receive

NUM_BLOCKS, NUM_TOKENS, WINDOW_TOKENS = 16, 48, 32


@dataclass(frozen=True)
class Kind:
    """What a layer keeps.

    Attributes:
        heads: KV heads over the whole model; 1 for MLA.
        size: Elements of a head.
        block_tokens: Tokens in a block.
        mla: It keeps a latent.
        window: It keeps the last tokens only.
        dtype: Type of an element.
        shares: The layer whose cache it uses, if it has none of its own.
        suffix: What its name ends with.
        backend: What writes it, where it is not what writes such layers in other tests: a module
            among vLLM's attention backends, and a name.
    """

    heads: int
    size: int = 8
    block_tokens: int = 16
    mla: bool = False
    window: bool = False
    dtype: torch.dtype = torch.float32
    shares: int | None = None
    suffix: str = "attn"
    backend: tuple[str, str] | None = None

    @property
    def written_by(self):
        """The attention backend."""
        if self.backend is None:
            return forms.backend(mla=self.mla)
        module, name = self.backend
        return forms.backend_of(f"vllm.v1.attention.backends.mla.{module}", name)

    def spec(self, heads: int):
        """What vLLM would say of it on a rank with so many heads."""
        common = dict(
            block_size=self.block_tokens, num_kv_heads=heads, head_size=self.size, dtype=self.dtype
        )
        if self.window:
            return SlidingWindowSpec(**common, sliding_window=WINDOW_TOKENS)
        return (MLAAttentionSpec if self.mla else FullAttentionSpec)(**common)

    def empty(self, heads: int) -> torch.Tensor:
        """The cache of a layer on a rank with so many heads, full of zeros."""
        sizes = NUM_BLOCKS, heads, self.block_tokens, self.size
        return forms.empty(*sizes, mla=self.mla, dtype=self.dtype)

    def parts(self, tensor: torch.Tensor, heads: int) -> list[torch.Tensor]:
        """Views of all that it holds: blocks, heads, and what a head has, of tokens first."""
        return list(forms.as_planes(tensor, mla=self.mla))


@dataclass(frozen=True)
class Model:
    """A model, layer by layer.

    Attributes:
        layers: What each keeps; several things, or nothing.
        draft: The same of its draft, whose layers are numbered on.
    """

    layers: tuple[tuple[Kind, ...], ...]
    draft: tuple[tuple[Kind, ...], ...] = ()


class ModelEngine(Engine):
    """All workers of an engine that runs a model, and drafts on its last stage if it does."""

    def __init__(
        self, engine_id: str, model: Model, *, pp: int = 1, tp: int = 1, drafts="", **extra_config
    ) -> None:
        self.engine_id, self.server = engine_id, None
        self.kinds: dict[str, Kind] = {}
        num_layers, draft = len(model.layers), model.draft if drafts else ()
        for index, kinds in enumerate((*model.layers, *draft)):
            for kind in kinds:
                self.kinds[f"model.layers.{index}.{kind.suffix}"] = kind
        partition = [num_layers // pp] * pp
        partition[-1] += num_layers - sum(partition) + len(draft)
        self.mesh = ParallelMesh(pp, tp)
        self.shards, self.caches, self.workers = [], {}, {}
        self.window_groups: set[int] = set()
        # One group for each kind, the same on all stages.
        self.groups = list(
            dict.fromkeys(replace(kind, shares=None) for kind in self.kinds.values())
        )
        own = {name: kind for name, kind in self.kinds.items() if kind.shares is None}
        by_index = {number: kind.heads for number, kind in enumerate(own.values())}
        names = list(own)
        said: list[Shard] = []
        for shard in shard_model(ParallelMesh(1, tp), len(own), by_index):
            for stage in range(pp):
                first = sum(partition[:stage])
                stage_layers = range(first, first + partition[stage])
                rank = replace(shard.rank, pp_rank=stage)
                held = {
                    names[number]: holding
                    for number, holding in shard.holdings.items()
                    if int(names[number].split(".")[2]) in stage_layers
                }
                self.shards.append(Shard(rank, held))
        for shard in self.shards:
            self._start_worker(shard, model, tp, pp, drafts, extra_config, said)

    def _start_worker(self, shard, model, tp, pp, drafts, extra_config, said) -> None:
        config = worker_config(
            tp=tp,
            extra_config=extra_config,
            drafts=speculative(drafts) if drafts else None,
            use_mla=any(kind.mla for kinds in model.layers for kind in kinds),
            hf_text_config=SimpleNamespace(model_type="llama"),
            dtype=torch.float32,
            get_total_num_kv_heads=lambda: 4,
            get_total_num_hidden_layers=lambda: len(model.layers),
            get_layers_start_end_indices=lambda _: get_pp_indices(
                len(model.layers), shard.rank.pp_rank, pp
            ),
            get_head_size=lambda: 8,
        )
        tensors, members = {}, [[] for _ in self.groups]
        for name, holding in shard.holdings.items():
            kind = self.kinds[name]
            tensors[name] = kind.empty(len(holding.units))
            members[self.groups.index(kind)].append(name)
        specs = [
            kind.spec(len(shard.holdings[names[0]].units) if names else max(kind.heads // tp, 1))
            for kind, names in zip(self.groups, members, strict=True)
        ]
        for name, kind in self.kinds.items():
            owner = f"model.layers.{kind.shares}.{kind.suffix}"
            if kind.shares is not None and owner in tensors:
                # As runners do: the owner's tensor, and a place in its group.
                tensors[name] = tensors[owner]
                members[self.groups.index(replace(kind, shares=None))].append(name)
        groups = [KVCacheGroupSpec(*each) for each in zip(members, specs, strict=True)]
        with pytest.MonkeyPatch.context() as patch:
            stand_at(patch, shard.rank)
            # All workers of the engine hear of each other, as far as each knows itself.
            patch.setattr(
                worker_module, "gather_shards", lambda own, _: (said.append(own), said)[1]
            )
            patch.setattr(
                ReshardWorker,
                "_backends",
                lambda _, names: {name: self.kinds[name].written_by for name in names},
            )
            patch.setattr(ReshardWorker, "_make_probe", lambda _: None)
            places = forms.cache_tensors(list(shard.holdings), NUM_BLOCKS, 1)
            worker = ReshardWorker(
                config, self.engine_id, KVCacheConfig(NUM_BLOCKS, places, groups)
            )
            worker.register_kv_caches(tensors)
        self.workers[shard.rank] = worker
        self.caches[shard.rank] = {
            name: [
                part.numpy() for part in self.kinds[name].parts(tensors[name], len(holding.units))
            ]
            for name, holding in shard.holdings.items()
        }

    def block_ids(self, seed: int) -> list[list[int]]:
        """A request's blocks in each group, of one pool; of a window the last ones only."""
        pool = iter(np.random.default_rng(seed).permutation(np.arange(1, NUM_BLOCKS)).tolist())
        ids = []
        for kind in self.groups:
            count = -(-NUM_TOKENS // kind.block_tokens)
            kept = -(-WINDOW_TOKENS // kind.block_tokens) if kind.window else count
            ids.append([next(pool) for _ in range(kept)])
        return ids


def speculative(model: str) -> SimpleNamespace:
    """A draft that is told from others by its size."""
    return SimpleNamespace(
        method="eagle",
        parallel_drafting=False,
        kv_cache_dtype=None,
        use_eagle=lambda: True,
        uses_draft_model=lambda: False,
        draft_model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(model_type="llama", hidden_size=len(model)),
            hf_config=SimpleNamespace(),
            get_total_num_hidden_layers=lambda: 1,
        ),
    )


def made_engines(strategy: str) -> Iterator[Callable[..., ModelEngine]]:
    """For a fixture: makes engines, which read so unless something else is said, and closes them.

    Args:
        strategy: `direct`, `staged` or `auto`.
    """
    made: list[ModelEngine] = []

    def make(engine_id: str, model: Model, **options) -> ModelEngine:
        made.append(ModelEngine(engine_id, model, **{"transfer_strategy": strategy, **options}))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def fill(engine: ModelEngine, seed: int) -> dict[tuple[str, int, int], np.ndarray]:
    """Random bytes all over the caches: those of each head of each layer, the same on replicas.

    Returns:
        What a head has in each part of its layer's cache: by the layer, the part and the head.
    """
    heads = {}
    for name, part, position, head, cache in _heads(engine):
        layer = list(engine.kinds).index(name)
        random = np.random.default_rng([seed, layer, head, part])
        content = random.integers(0, 100, cache[:, position].shape)
        cache[:, position] = heads[name, part, head] = content
    return heads


def transfer(p: ModelEngine, d: ModelEngine, unread: frozenset[str] = frozenset()) -> None:
    """Read a request; all of it is here then, nothing else has changed, and all let go."""
    sources, before = fill(p, 1), fill(d, 2)
    src_ids, dst_ids = p.block_ids(3), d.block_ids(4)
    address = p.serve()
    p.offer("p-a")
    receive = Receive(address, "p-a", dst_ids, src_ids, NUM_TOKENS, NUM_TOKENS, OFFER)
    d.start(receive={"d-a": receive})
    progress = Progress(p, d)
    progress.until(d, received="d-a")
    progress.until(p, sent="p-a")
    for worker in d.workers.values():
        assert worker.report.take_failed() == {}
    for name, part, position, head, cache in _heads(d):
        place = name, part, head
        expected = before[place].copy()
        if name not in unread:
            # The same tokens, in as many blocks as these make there.
            group, from_group = d.groups.index(d.kinds[name]), p.groups.index(p.kinds[name])
            read = sources[place][src_ids[from_group]]
            expected[dst_ids[group]] = read.reshape(expected[dst_ids[group]].shape)
        np.testing.assert_array_equal(cache[:, position], expected, err_msg=str(place))


def _heads(engine: ModelEngine) -> Iterator[tuple[str, int, int, int, np.ndarray]]:
    """All that workers hold of heads: layer, part, position on the rank, head, and that part."""
    for shard in engine.shards:
        for name, holding in shard.holdings.items():
            for part, cache in enumerate(engine.caches[shard.rank][name]):
                for position, head in enumerate(range(holding.units.start, holding.units.stop)):
                    yield name, part, position, head, cache

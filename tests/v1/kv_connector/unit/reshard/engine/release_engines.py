# SPDX-License-Identifier: Apache-2.0
"""Whole engines of workers whose caches the release itself has planned, grouped and allocated.

Layers of several groups then lie in the same memory, as a model runner has them: what is given to
one group's block is taken from all others'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.distributed.utils import get_pp_indices
from vllm.v1.kv_cache_interface import KVCacheConfig, UniformTypeKVCacheSpecs
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from tests.bases import RELEASE
from tests.v1.kv_connector.unit.reshard.engine.configs import stand_at, worker_config
from tests.v1.kv_connector.unit.reshard.engine.workers import (
    DEADLINE_S,
    OFFER,
    Engine,
    Progress,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine import worker as worker_module
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.worker import ReshardWorker
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import (
    MeshRank,
    ParallelMesh,
    Shard,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import Receive

if RELEASE == "0.32.0":
    from vllm.v1.core import kv_cache_utils as planning
else:
    from vllm.v1.core import kv_cache_planning as planning

Kept = Mapping[str, tuple[Any, type]]
"""The specification and the backend of every layer, by its name in vLLM."""


class ReleaseEngine(Engine):
    """All workers of an engine, each with all layers of its stage: what they keep is a latent's.

    Args:
        kept: What the layers keep.
        num_layers: Layers of the model; those that are numbered on from them are its draft's.
        layout: In what order the axes lie in memory.
        num_blocks: Blocks of the scheduler's.

    Attributes:
        views: What the release takes for each layer's cache, by rank.
        groups: The layers of each group, over all stages.
    """

    def __init__(
        self,
        engine_id: str,
        kept: Kept,
        num_layers: int,
        *,
        layout: str,
        num_blocks: int = 48,
        pp: int = 1,
        tp: int = 1,
        **extra_config: Any,
    ) -> None:
        self.engine_id, self.server = engine_id, None
        self.kept, self.num_layers = kept, num_layers
        self.mesh = ParallelMesh(pp, tp)
        self._layout = KVCacheLayout[layout]
        # As much of a configuration as the release plans with.
        planned = SimpleNamespace(
            attention_config=SimpleNamespace(hisparse_config=None),
            cache_config=SimpleNamespace(
                get_resolved_kv_cache_layout=lambda: self._layout,
                num_gpu_blocks_override=num_blocks,
                prefix_cache_retention_interval=None,
            ),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=tp, decode_context_parallel_size=1
            ),
            scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
            speculative_config=None,
            model_config=None,
        )
        specs = {name: spec for name, (spec, _) in kept.items()}
        groups = planning.get_kv_cache_groups(planned, specs)
        self.groups = [(group.kv_cache_spec, tuple(group.layer_names)) for group in groups]
        self.workers, self.views = {}, {}
        for rank in self.mesh.ranks():
            first, last = get_pp_indices(num_layers, rank.pp_rank, pp)
            own = {
                name: spec
                for name, spec in specs.items()
                if first <= (number := _number(name)) < last
                or (number >= num_layers and rank.pp_rank == pp - 1)
            }
            places = planning.get_kv_cache_config_from_groups(
                planned, planning._project_kv_cache_groups_to_worker(groups, own), 0
            )
            self.views[rank] = allocate_kv_cache(places, torch.device("cpu"), self._layout)
            self.workers[rank] = self._worker(rank, places, extra_config)
        self._register()

    def _register(self) -> None:
        """Have all workers register at once: they hear from each other what they hold."""
        said, together = list[Shard](), Barrier(len(self.workers), timeout=DEADLINE_S)

        def gather(own: Shard, _: object) -> list[Shard]:
            said.append(own)
            together.wait()
            return said

        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(self.workers)) as pool:
            patch.setattr(worker_module, "gather_shards", gather)
            patch.setattr(ReshardWorker, "_make_probe", lambda _: None)
            patch.setattr(
                ReshardWorker,
                "_backends",
                lambda _, names: {name: self.kept[name][1] for name in names},
            )
            registered = [
                pool.submit(worker.register_kv_caches, self.views[rank])
                for rank, worker in self.workers.items()
            ]
            for each in registered:
                each.result()

    def _worker(self, rank: MeshRank, places: KVCacheConfig, extra_config: Any) -> ReshardWorker:
        has_draft = any(_number(name) >= self.num_layers for name in self.kept)
        config = worker_config(
            tp=self.mesh.tp_size,
            extra_config=extra_config,
            drafts=_mtp() if has_draft else None,
            use_mla=True,
            hf_text_config=SimpleNamespace(model_type="deepseek"),
            dtype=torch.bfloat16,
            get_total_num_kv_heads=lambda: 1,
            get_total_num_hidden_layers=lambda: self.num_layers,
            get_layers_start_end_indices=lambda _: get_pp_indices(
                self.num_layers, rank.pp_rank, self.mesh.pp_size
            ),
            get_head_size=lambda: 576,
        )
        with pytest.MonkeyPatch.context() as patch:
            stand_at(patch, rank)
            return ReshardWorker(config, self.engine_id, places)

    def block_ids(self, seed: int, num_tokens: int, cached_tokens: int = 0) -> list[list[int]]:
        """A request's last blocks in each group, of one pool: those that are not cached.

        Of a window only those are there that the last token sees.
        """
        random = np.random.default_rng(seed)
        (num_blocks,) = {len(view) for views in self.views.values() for view in views.values()}
        pool = iter(random.permutation(np.arange(1, num_blocks)).tolist())
        ids = []
        for spec, _ in self.groups:
            first = cached_tokens // spec.block_size
            if (window := _window(spec)) is not None:
                first = max(first, (num_tokens - window) // spec.block_size)
            ids.append([next(pool) for _ in range(first, -(-num_tokens // spec.block_size))])
        return ids

    def memory(self, rank: MeshRank) -> np.ndarray:
        """All bytes of a worker's caches, which are one piece."""
        storage = next(iter(self.views[rank].values())).untyped_storage()
        return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


def _number(name: str) -> int:
    """A layer's number in its model."""
    return int(name.split(".")[2])


def _window(spec: Any) -> int | None:
    """The last tokens that a group keeps, where these are all."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))
    return getattr(spec, "sliding_window", None)


def _mtp() -> SimpleNamespace:
    """As much of a `SpeculativeConfig` as the factors are taken from."""
    return SimpleNamespace(
        method="mtp",
        parallel_drafting=False,
        kv_cache_dtype=None,
        use_eagle=lambda: True,
        uses_draft_model=lambda: False,
        draft_model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(model_type="deepseek_mtp", hidden_size=64),
            hf_config=SimpleNamespace(),
            get_total_num_hidden_layers=lambda: 1,
        ),
    )


def blocks(view: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
    """The bytes of some blocks of a layer."""
    return view.view(torch.uint8)[list(ids)]


def transfer(
    p: ReleaseEngine, d: ReleaseEngine, num_tokens: int, cached_tokens: int = 0
) -> tuple[list[list[int]], list[list[int]]]:
    """Read a request; all of it is here then, nothing else has changed, and all let go.

    Args:
        p: Who is read from. Blocks of a layer that are all zeros are given random bytes.
        d: Who reads.
        num_tokens: Tokens of the request.
        cached_tokens: As many of these the reader has.

    Returns:
        The request's blocks at both.
    """
    src_ids, dst_ids = p.block_ids(3, num_tokens), d.block_ids(4, num_tokens, cached_tokens)
    random, content = np.random.default_rng(1), {}
    for (_, names), ids in zip(p.groups, src_ids, strict=True):
        for name in names:
            for view in (views[name] for views in p.views.values() if name in views):
                own = blocks(view, ids)
                if name not in content:
                    drawn = torch.from_numpy(random.integers(0, 256, own.shape, np.uint8))
                    content[name] = own if own.any() else drawn
                view.view(torch.uint8)[ids] = content[name]
    expected = {}
    for rank in d.workers:
        memory = d.memory(rank)
        memory[:] = np.random.default_rng(2).integers(0, 256, memory.shape, np.uint8)
        expected[rank] = memory.copy()
    address = p.serve()
    p.offer("p-a")
    receive = Receive(address, "p-a", dst_ids, src_ids, num_tokens, num_tokens, OFFER)
    d.start(receive={"d-a": receive})
    progress = Progress(p, d)
    progress.until(d, received="d-a")
    progress.until(p, sent="p-a")
    for rank, worker in d.workers.items():
        assert worker.report.take_failed() == {}
        storage = torch.from_numpy(expected[rank])
        for (_, names), ids in zip(d.groups, dst_ids, strict=True):
            for name in names:
                if (view := d.views[rank].get(name)) is None:
                    continue
                own = view.view(torch.uint8)
                here = storage.as_strided(own.shape, own.stride(), own.storage_offset())
                here[ids] = content[name][len(content[name]) - len(ids) :]
        np.testing.assert_array_equal(d.memory(rank), expected[rank])
    return src_ids, dst_ids

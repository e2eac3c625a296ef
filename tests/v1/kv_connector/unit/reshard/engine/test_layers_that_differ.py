# SPDX-License-Identifier: Apache-2.0
"""Models whose layers differ: whole workers over real NIXL, byte for byte.

Each family is as its own models are: other heads and sizes in windows, heads of each layer's own,
layers without attention, caches that are shared, an indexer beside MLA, drafts of another kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.layers.attention.attention import validate_kv_sharing_target
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from tests.bases import requires_base
from tests.v1.kv_connector.unit.reshard import forms
from tests.v1.kv_connector.unit.reshard.engine.workers import (
    OFFER,
    Engine,
    Progress,
    every_strategy,
    pairs_of_layouts,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine import worker as worker_module
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.worker import ReshardWorker
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.mesh import ParallelMesh
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import Shard, shard_model
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.description import (
    decode_worker,
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


@dataclass(frozen=True)
class Model:
    """A model, layer by layer.

    Attributes:
        layers: What each keeps; several things, or nothing.
        draft: The same of its draft, whose layers are numbered on.
    """

    layers: tuple[tuple[Kind, ...], ...]
    draft: tuple[tuple[Kind, ...], ...] = ()


WINDOW = Kind(heads=4, size=8, window=True, block_tokens=16)
GLOBAL = Kind(heads=2, size=16, block_tokens=16)
LATENT, INDEX = Kind(1, 12, mla=True), Kind(1, 20, mla=True, dtype=torch.uint8, suffix="indexer")
FP8_LATENT = replace(
    LATENT, size=656, dtype=torch.uint8, backend=("flashmla_sparse", "FLASHMLA_SPARSE")
)
FP8_INDEX = replace(INDEX, size=132, backend=("indexer", "DEEPSEEK_V32_INDEXER"))
MODELS = {
    # Gemma 4: other heads and head sizes where attention is global; the last layers share.
    "gemma4": Model(
        (
            *((WINDOW,), (WINDOW,), (GLOBAL,), (WINDOW,), (WINDOW,), (GLOBAL,)),
            (replace(WINDOW, shares=4),),
            (replace(GLOBAL, shares=5),),
        )
    ),
    # Gemma 4 with pages made equal: blocks of other sizes.
    "gemma4 of equal pages": Model(((replace(WINDOW, block_tokens=24),), (GLOBAL,)) * 2),
    # MiMo-V2, Step-3.5: other KV heads in windows, of one size.
    "mimo": Model(((Kind(2),), (WINDOW,), (WINDOW,), (Kind(2),))),
    # Nemotron-NAS: each layer its own, and some without attention.
    "nemotron": Model(((Kind(4),), (), (Kind(2),), (Kind(1),), (), (Kind(4),))),
    # MLA with the cache of an indexer.
    "indexer": Model(((LATENT, INDEX),) * 4),
    # LongCat Flash: two attentions in each layer.
    "longcat": Model(
        (tuple(replace(LATENT, suffix=f"self_attn.{number}.attn") for number in range(2)),) * 2
    ),
    # DeepSeek V3.2 and GLM 5 as they are: rows of 656 bytes and 132, the latter of whole blocks.
    "deepseek 3.2": pytest.param(
        Model(((FP8_LATENT, FP8_INDEX),) * 4),
        marks=requires_base("0.32.0", "0.33.0", reason="its caches are of other shapes"),
    ),
    # GQA drafts under MLA, and MLA with drafts like it.
    "mla with a draft": Model(((LATENT,),) * 4, ((Kind(4),),)),
    "heads with a draft": Model(((Kind(2),),) * 4, ((Kind(4, 16),),)),
}
LAYOUTS = {
    "TP2 to TP1": (dict(tp=2), dict(tp=1)),
    "TP1 to TP2": (dict(tp=1), dict(tp=2)),
    "TP4 to TP2": (dict(tp=4), dict(tp=2)),
    "PP2 to PP1": (dict(pp=2), dict(pp=1)),
    "PP2 to TP2": (dict(pp=2), dict(tp=2)),
    "PP2 x TP2 to TP4": (dict(pp=2, tp=2), dict(tp=4)),
}


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
        config = SimpleNamespace(
            model_config=SimpleNamespace(
                use_mla=any(kind.mla for kinds in model.layers for kind in kinds),
                hf_text_config=SimpleNamespace(model_type="llama"),
                multimodal_config=None,
                dtype=torch.float32,
                get_total_num_kv_heads=lambda: 4,
                get_total_num_hidden_layers=lambda: len(model.layers),
                get_layers_start_end_indices=lambda _: get_pp_indices(
                    len(model.layers), shard.rank.pp_rank, pp
                ),
                get_head_size=lambda: 8,
            ),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            attention_config=None,
            compilation_config=SimpleNamespace(
                pass_config=SimpleNamespace(), static_forward_context={}
            ),
            scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
            speculative_config=speculative(drafts) if drafts else None,
            num_prefill_lookahead_tokens=1,
            parallel_config=SimpleNamespace(
                tensor_parallel_size=tp,
                data_parallel_rank=0,
                data_parallel_index=0,
                decode_context_parallel_size=1,
                cp_kv_cache_interleave_size=1,
            ),
            kv_transfer_config=KVTransferConfig(
                kv_connector="NixlConnector",
                kv_role="kv_both",
                kv_connector_extra_config={"num_threads": 0, **extra_config},
            ),
        )
        tensors, members = {}, [[] for _ in self.groups]
        for name, holding in shard.holdings.items():
            kind = self.kinds[name]
            tensors[name] = forms.empty(
                *(NUM_BLOCKS, len(holding.units), kind.block_tokens, kind.size),
                mla=kind.mla,
                dtype=kind.dtype,
            )
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
            for group, number in (
                ("get_pp_group", shard.rank.pp_rank),
                ("get_tp_group", shard.rank.tp_rank),
            ):
                place = SimpleNamespace(rank_in_group=number)
                patch.setattr(worker_module, group, lambda place=place: place)
            # All workers of the engine hear of each other, as far as each knows itself.
            patch.setattr(worker_module, "_gather", lambda own: (said.append(own), said)[1])
            patch.setattr(
                ReshardWorker,
                "_backends",
                lambda _, names: {name: self.kinds[name].written_by for name in names},
            )
            places = forms.cache_tensors(list(shard.holdings), NUM_BLOCKS, 1)
            worker = ReshardWorker(
                config, self.engine_id, KVCacheConfig(NUM_BLOCKS, places, groups)
            )
            worker.register_kv_caches(tensors)
        self.workers[shard.rank] = worker
        self.caches[shard.rank] = {
            name: forms.as_planes(tensors[name], mla=self.kinds[name].mla).numpy()
            for name in shard.holdings
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


@pytest.fixture
def engines(request) -> Iterator:
    """Makes engines, which read direct unless something else is asked for, and closes them."""
    made: list[ModelEngine] = []

    def make(engine_id: str, model: Model, **options) -> ModelEngine:
        strategy = {"transfer_strategy": getattr(request, "param", "direct")}
        made.append(ModelEngine(engine_id, model, **{**strategy, **options}))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def fill(engine: ModelEngine, seed: int) -> dict[tuple[str, int], np.ndarray]:
    """Random bytes all over the caches: those of each head of each layer, the same on replicas."""
    heads = {}
    for shard in engine.shards:
        for name, holding in shard.holdings.items():
            cache = engine.caches[shard.rank][name]
            for position, head in enumerate(range(holding.units.start, holding.units.stop)):
                layer = list(engine.kinds).index(name)
                random = np.random.default_rng([seed, layer, head])
                content = random.integers(0, 100, cache[:, :, position].shape)
                cache[:, :, position] = heads[name, head] = content
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
    for shard in d.shards:
        assert d.workers[shard.rank].take_failed() == {}
        for name, holding in shard.holdings.items():
            group = d.groups.index(d.kinds[name])
            for position, head in enumerate(range(holding.units.start, holding.units.stop)):
                expected = before[name, head].copy()
                if name not in unread:
                    expected[:, dst_ids[group]] = sources[name, head][:, src_ids[group]]
                found = d.caches[shard.rank][name][:, :, position]
                np.testing.assert_array_equal(found, expected)


# Ranks that gather, and ranks and stages that part.
@pairs_of_layouts(LAYOUTS, {"TP4 to TP2", "PP2 x TP2 to TP4"})
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_every_layer_is_read_by_its_own_heads(engines, model, prefill, decode):
    """Every byte that belongs here arrives, and no other changes."""
    drafts = "eagle" if model.draft else ""
    transfer(
        engines("prefill", model, drafts=drafts, **prefill),
        engines("decode", model, drafts=drafts, **decode),
    )


@pytest.mark.parametrize("model", ["gemma4", "nemotron", "indexer"])
@every_strategy
def test_layers_that_differ_are_staged_too(engines, model):
    """However they are read, they are the same."""
    transfer(engines("prefill", MODELS[model], tp=2), engines("decode", MODELS[model]))


def test_layer_that_shares_a_cache_is_not_read_twice(engines):
    """It has none of its own: nobody says that he holds it."""
    engine = engines("engine", MODELS["gemma4"])
    (worker,) = engine.workers.values()
    shard = decode_worker(worker.handshake.body).shard
    assert sorted(int(name.split(".")[2]) for name in shard.holdings) == [0, 1, 2, 3, 4, 5]


def test_layer_and_owner_on_different_stages_are_refused_by_vllm():
    """Its error names both: this connector never sees such an engine."""
    sharing, owner = "model.layers.6.self_attn.attn", "model.layers.4.self_attn.attn"
    with pytest.raises(ValueError, match=f"for {sharing} is not valid: target layer {owner}"):
        validate_kv_sharing_target(sharing, owner, {sharing: object()})


@pytest.mark.parametrize("theirs", ["", "another draft"])
@pytest.mark.parametrize("pp", [1, 2])
def test_missing_drafts_may_be_computed(engines, caplog_vllm, theirs, pp):
    """The model's layers are read, the draft's are not, and the log says so."""
    model = MODELS["mla with a draft"]
    p = engines("prefill", model, drafts=theirs, pp=pp)
    d = engines("decode", model, drafts="eagle", tp=2, missing_draft_layers="compute")
    transfer(p, d, unread=frozenset({"model.layers.4.attn"}))
    assert "Drafts start cold" in caplog_vllm.text


def test_drafts_of_both_are_read_also_where_they_may_be_missing(engines, caplog_vllm):
    """What is there is read."""
    model = MODELS["mla with a draft"]
    p = engines("prefill", model, drafts="eagle")
    transfer(p, engines("decode", model, drafts="eagle", missing_draft_layers="compute"))
    assert "Drafts start cold" not in caplog_vllm.text


@pytest.mark.parametrize(
    ("theirs", "extra", "message"),
    [
        ("", {}, "draft_method is none there and eagle here"),
        ("another draft", {}, "draft_model is model_type llama, hidden_size 13 there"),
        (
            "",
            dict(enforce_handshake_compat=False),
            r"does not have the draft's layers that this engine has "
            r"\(model.layers.draft0.attn\): .*missing_draft_layers",
        ),
    ],
)
def test_missing_drafts_are_refused(engines, caplog_vllm, theirs, extra, message):
    """With what differs, or with the layers, and what to do."""
    model = MODELS["mla with a draft"]
    p = engines("prefill", model, drafts=theirs)
    d = engines("decode", model, drafts="eagle", **extra)
    address = p.serve()
    p.offer("p-a")
    receive = Receive(address, "p-a", d.block_ids(4), p.block_ids(3), NUM_TOKENS, NUM_TOKENS, OFFER)
    d.start(receive={"d-a": receive})
    Progress(p, d).until(d, received="d-a")
    (worker,) = d.workers.values()
    assert set(worker.take_failed()) == {"d-a"}
    assert re.search(message, caplog_vllm.text)


def test_engine_that_drafts_is_read_by_one_that_does_not(engines):
    """Layers that nobody needs are left where they are."""
    model = MODELS["heads with a draft"]
    p = engines("prefill", model, drafts="eagle", pp=2)
    transfer(p, engines("decode", model, missing_draft_layers="compute"))

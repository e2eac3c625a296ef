# SPDX-License-Identifier: Apache-2.0
"""Recurrent state: whole workers over real NIXL, byte for byte.

What a rank keeps is what vLLM says that it does: shapes by its calculator, channels of convolutions
by the loader that gives a rank its weights for them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.mamba_mixer2 import mamba_v2_sharded_weight_loader
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)

from tests.bases import requires_base
from tests.v1.kv_connector.unit.reshard import forms
from tests.v1.kv_connector.unit.reshard.engine.configs import stand_at, worker_config
from tests.v1.kv_connector.unit.reshard.engine.workers import (
    OFFER,
    Engine,
    Progress,
    every_strategy,
    kinds_in_layouts,
    stats_with,
)
from tests.v1.kv_connector.unit.reshard.memory.cases import select
from tools.verify import verify_plan
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine import worker as worker_module
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches import (
    recurrent_state as state_module,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches.geometry import (
    layers_of_worker,
    state_groups,
    token_layers,
    unserved_layer,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches.ownership import (
    Split,
    WorkerLayer,
    shard_of_worker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches.recurrent_state import (
    describe_state,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.metadata import (
    Offer,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.worker import ReshardWorker
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import LocalLayoutError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.cache import LayerCache, RankCache
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.lowering import lower_read
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.overlap import BlockRun
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.reshard import plan_reshard
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import (
    Holding,
    MeshRank,
    ParallelMesh,
    Shard,
    UnitInterval,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.fingerprint import with_blocks
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    Receive,
)

pytestmark = requires_base(
    "0.32.0", "0.33.0", reason="state is left to upstream's connector on 0.22.1"
)

NUM_BLOCKS, BLOCK_TOKENS, NUM_TOKENS = 12, 16, 47
HEADS, HEAD_SIZE = 4, 8
_CALCULATOR = mamba_utils.MambaStateShapeCalculator


@dataclass(frozen=True)
class StateFamily:
    """What a layer's state is made of, over the whole model.

    Attributes:
        kind: What vLLM calls it.
        heads: Heads of the recurrent state; channels of Mamba 1 and of short convolutions.
        head_size: Rows of a head.
        columns: Columns of a head; what the other components of the convolution have of each group.
        groups: Groups of Mamba 2, heads of queries of a gated delta net.
        kernel: Width of the convolution.
        dtype: Type of the recurrent state.
        replicated: Whether every rank has all of it, as of Qwen4's `PleShortConv`.
    """

    kind: str
    heads: int = 8
    head_size: int = 4
    columns: int = 6
    groups: int = 4
    kernel: int = 4
    dtype: torch.dtype = torch.float32
    replicated: bool = False

    def shapes(self, tp: int) -> tuple[tuple[int, ...], ...]:
        """What vLLM says that a rank keeps."""
        tp = 1 if self.replicated else tp
        heads, size, columns, groups = self.heads, self.head_size, self.columns, self.groups
        if self.kind == "MAMBA2":
            return _CALCULATOR.mamba2_state_shape(
                tp, heads * size, groups, heads, size, columns, self.kernel
            )
        if self.kind == "GDN_ATTN":
            return _CALCULATOR.gated_delta_net_state_shape(
                tp, groups, heads, columns, size, self.kernel
            )
        if self.kind == "MAMBA1":
            return _CALCULATOR.mamba1_state_shape(tp, heads, columns, self.kernel)
        if self.kind == "SHORT_CONV":
            return _CALCULATOR.short_conv_state_shape(tp, heads, self.kernel)
        return _CALCULATOR.linear_attention_state_shape(heads, tp, size)

    def spec(self, tp: int, page_bytes: int | None = None) -> MambaSpec:
        """What vLLM says of a layer on a rank."""
        shapes = self.shapes(tp)
        dtypes = (torch.bfloat16, self.dtype) if len(shapes) == 2 else (self.dtype,)
        return MambaSpec(
            block_size=1 << 20,
            shapes=shapes,
            dtypes=dtypes,
            page_size_padded=page_bytes,
            mamba_type=MambaAttentionBackendEnum[self.kind],
            tp_replicated=self.replicated,
        )

    def parts(self, tp: int) -> list[tuple[int, int, bool]]:
        """What the loader of the convolution's weights is told of its components."""
        tp = 1 if self.replicated else tp
        main = self.heads * (self.head_size if self.kind in ("MAMBA2", "GDN_ATTN") else 1)
        if self.kind == "MAMBA2":
            extra = _CALCULATOR.extra_groups_for_head_shards(self.groups, tp)
            groups = ((self.groups + extra) * self.columns, extra * self.columns, self.groups == 1)
            return [(main, 0, False), groups, groups]
        if self.kind == "GDN_ATTN":
            return [(self.groups * self.columns, 0, False)] * 2 + [(main, 0, False)]
        return [(main, 0, False)]

    @staticmethod
    def _random(random: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype):
        """Random numbers of as many bytes as those of a type."""
        return random.integers(0, 1 << 15, shape).astype(f"uint{8 * dtype.itemsize}")

    def pages(self, seed: int, tp: int, tp_rank: int, dim_first: bool) -> np.ndarray:
        """The pages of random state on a rank, those of all blocks; uint8 [blocks, bytes]."""
        tp, tp_rank = (1, 0) if self.replicated else (tp, tp_rank)
        random = np.random.default_rng(seed)
        parts, spec = self.parts(1), self.spec(tp)
        pages = []
        if self.kind != "LINEAR":
            num_rows = self.kernel - 1
            channels = sum(size for size, _, _ in parts)
            whole = self._random(random, (NUM_BLOCKS, channels, num_rows), spec.dtypes[0])
            local = torch.zeros(sum(size // tp for size, _, _ in self.parts(tp)), 1)
            loader = mamba_v2_sharded_weight_loader(self.parts(tp), tp, tp_rank)
            loader(local, torch.arange(channels, dtype=torch.float32)[:, None])
            mine = whole[:, local[:, 0].long().numpy()]
            mine = mine if dim_first else mine.swapaxes(1, 2)
            assert mine.shape[1:] == spec.shapes[0]
            pages.append(mine)
        if self.kind != "SHORT_CONV":
            shape = (NUM_BLOCKS, self.heads, *spec.shapes[-1][1:])
            whole = self._random(random, shape, spec.dtypes[-1])
            size = self.heads // tp
            pages.append(whole[:, tp_rank * size : (tp_rank + 1) * size])
        return np.concatenate(
            [np.ascontiguousarray(each).reshape(NUM_BLOCKS, -1).view(np.uint8) for each in pages],
            axis=1,
        )


FAMILIES = {
    "mamba 2": StateFamily("MAMBA2"),
    "mamba 2, one group": StateFamily("MAMBA2", groups=1),
    "gated delta net": StateFamily("GDN_ATTN"),
    "gated delta net, as many heads": StateFamily("GDN_ATTN", groups=8, columns=4),
    "mamba 1": StateFamily("MAMBA1", heads=24),
    "short convolution": StateFamily("SHORT_CONV", heads=24, dtype=torch.bfloat16),
    "short convolution, on every rank": StateFamily(
        "SHORT_CONV", heads=24, dtype=torch.bfloat16, replicated=True
    ),
    "linear attention": StateFamily("LINEAR"),
}
LAYOUTS = {
    "TP1 to TP1": (dict(), dict()),
    "TP2 to TP1": (dict(tp=2), dict()),
    "TP1 to TP2": (dict(), dict(tp=2)),
    "TP4 to TP2": (dict(tp=4), dict(tp=2)),
    "TP2 to TP4": (dict(tp=2), dict(tp=4)),
    "PP2 to PP1": (dict(pp=2), dict()),
    "PP2 x TP2 to TP4": (dict(pp=2, tp=2), dict(tp=4)),
    "TP2 to PP2": (dict(tp=2), dict(pp=2)),
}


class HybridEngine(Engine):
    """All workers of an engine, every other layer of which keeps state, the others a KV cache.

    As vLLM has it, a layer of each group lies in the same memory, in pages of one size.
    """

    def __init__(
        self,
        engine_id: str,
        family: StateFamily,
        *,
        pp: int = 1,
        tp: int = 1,
        num_layers: int = 4,
        dim_first: bool = True,
        **extra_config: Any,
    ) -> None:
        self.engine_id, self.server = engine_id, None
        self.family, self.tp, self.dim_first = family, tp, dim_first
        self.mesh = ParallelMesh(pp, tp)
        self.workers, self.memory, self.layers = {}, {}, {}
        said: list[Shard] = []
        attention = FullAttentionSpec(
            block_size=BLOCK_TOKENS,
            num_kv_heads=HEADS // tp,
            head_size=HEAD_SIZE,
            dtype=torch.float32,
        )
        needed = max(attention.page_size_bytes, family.spec(tp).page_size_bytes)
        self.page_bytes = -(-needed // 64) * 64 + 64
        for rank in self.mesh.ranks():
            first = rank.pp_rank * num_layers // pp
            self.layers[rank] = range(first, first + num_layers // pp)
            self._start_worker(rank, attention, extra_config, said)

    def _start_worker(self, rank, attention, extra_config, said) -> None:
        config = worker_config(
            tp=self.tp,
            extra_config=extra_config,
            use_mla=False,
            hf_text_config=SimpleNamespace(model_type="bamba"),
            dtype=torch.float32,
            get_total_num_kv_heads=lambda: HEADS,
            get_total_num_hidden_layers=lambda: 4,
            get_head_size=lambda: HEAD_SIZE,
        )
        layers = self.layers[rank]
        memory = torch.zeros(len(layers) // 2, NUM_BLOCKS, self.page_bytes, dtype=torch.uint8)
        state_spec = self.family.spec(self.tp, self.page_bytes)
        tensors, names = {}, ([], [])
        for number in layers:
            pages = memory[(number - layers.start) // 2]
            keeps_state = number % 2 == 0
            name = f"model.layers.{number}.{'mixer' if keeps_state else 'attn'}"
            names[keeps_state].append(name)
            if keeps_state:
                tensors[name] = pages.view(torch.int8)[:, None, None]
            else:
                heads, tokens, width = attention.num_kv_heads, BLOCK_TOKENS, 2 * HEAD_SIZE
                tensors[name] = pages.view(torch.float32).as_strided(
                    (NUM_BLOCKS, heads, tokens, width),
                    (self.page_bytes // 4, tokens * width, width, 1),
                    pages.storage_offset() // 4,
                )
        specs = replace(attention, page_size_padded=self.page_bytes), state_spec
        groups = [KVCacheGroupSpec(*each) for each in zip(names, specs, strict=True)]
        backend = SimpleNamespace(get_name=lambda: self.family.kind)
        with pytest.MonkeyPatch.context() as patch:
            stand_at(patch, rank)
            patch.setattr(
                worker_module, "gather_shards", lambda own, _: (said.append(own), said)[1]
            )
            patch.setattr(
                ReshardWorker,
                "_backends",
                lambda _, names: {
                    name: backend if name.endswith("mixer") else forms.backend() for name in names
                },
            )
            patch.setattr(state_module, "is_conv_state_dim_first", lambda: self.dim_first)
            patch.setattr(ReshardWorker, "_make_probe", lambda _: None)
            places = forms.cache_tensors([*tensors], NUM_BLOCKS, self.page_bytes)
            worker = ReshardWorker(
                config, self.engine_id, KVCacheConfig(NUM_BLOCKS, places, groups)
            )
            worker.register_kv_caches(tensors)
        self.workers[rank] = worker
        self.memory[rank] = memory.numpy()

    def fill(self, seed: int, block_ids: tuple[list[int], list[int]]) -> None:
        """Random bytes all over; in a request's blocks those of a model of this seed."""
        for rank, memory in self.memory.items():
            memory[:] = np.random.default_rng([seed, rank.pp_rank, rank.tp_rank]).integers(
                0, 256, memory.shape
            )
            self.write(memory, rank, seed, block_ids)

    def write(self, memory, rank: MeshRank, seed: int, block_ids) -> None:
        """Write a request's KV and state of a model of this seed, in blocks of these ids."""
        layers = self.layers[rank]
        for number in layers:
            pages = memory[(number - layers.start) // 2]
            if number % 2 == 0:
                state = self.pages(seed, rank, number)
                pages[block_ids[1], : state.shape[1]] = state[0]
                continue
            whole = np.random.default_rng([seed, number]).random(
                (HEADS, -(-NUM_TOKENS // BLOCK_TOKENS), BLOCK_TOKENS, 2 * HEAD_SIZE), np.float32
            )
            size = HEADS // self.tp
            mine = whole[rank.tp_rank * size : (rank.tp_rank + 1) * size].swapaxes(0, 1)
            mine = np.ascontiguousarray(mine).reshape(len(mine), -1).view(np.uint8)
            pages[block_ids[0], : mine.shape[1]] = mine

    def pages(self, seed: int, rank: MeshRank, number: int) -> np.ndarray:
        """The state of a layer of a model of this seed, as this rank keeps it."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mamba_utils, "is_conv_state_dim_first", lambda: self.dim_first)
            return self.family.pages(seed * 100 + number, self.tp, rank.tp_rank, self.dim_first)


@pytest.fixture
def engines(request) -> Iterator:
    """Makes engines, which read direct unless something else is asked for, and closes them."""
    made: list[HybridEngine] = []

    def make(engine_id: str, family: StateFamily, **options) -> HybridEngine:
        strategy = {"transfer_strategy": getattr(request, "param", "direct")}
        with pytest.MonkeyPatch.context() as patch:
            dim_first = options.get("dim_first", True)
            patch.setattr(mamba_utils, "is_conv_state_dim_first", lambda: dim_first)
            made.append(HybridEngine(engine_id, family, **{**strategy, **options}))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


P_IDS, D_IDS = ([7, 2, 5], [4]), ([3, 9, 1], [8])


def read(p: HybridEngine, d: HybridEngine, **receive: Any) -> Progress:
    """Read a request until the destination has reported it."""
    address = p.serve()
    p.offer("p-a")
    values = dict(local_tokens=NUM_TOKENS, remote_tokens=NUM_TOKENS, fingerprint=OFFER)
    values |= dict(local_block_ids=list(D_IDS), remote_block_ids=list(P_IDS))
    request = Receive(address, "p-a", **{**values, **receive})
    d.start(receive={"d-a": request})
    progress = Progress(p, d)
    progress.until(d, received="d-a")
    return progress


def transfer(p: HybridEngine, d: HybridEngine) -> None:
    """Read a request; all of it is here then, nothing else has changed, and all let go."""
    p.fill(1, P_IDS)
    d.fill(2, D_IDS)
    expected = {rank: memory.copy() for rank, memory in d.memory.items()}
    for rank, memory in expected.items():
        d.write(memory, rank, 1, D_IDS)
    read(p, d).until(p, sent="p-a")
    for rank, memory in d.memory.items():
        assert d.workers[rank].report.take_failed() == {}
        np.testing.assert_array_equal(memory, expected[rank])


# Ranks that gather, ranks and stages that part, and stages that are filled.
@kinds_in_layouts("family", FAMILIES, LAYOUTS, ["TP4 to TP2", "PP2 x TP2 to TP4", "TP2 to PP2"])
def test_state_is_read_component_by_component(engines, family, prefill, decode):
    """Every byte that belongs here arrives, among pages of a KV cache, and no other changes."""
    transfer(engines("prefill", family, **prefill), engines("decode", family, **decode))


@pytest.mark.parametrize(("here", "there"), [(True, False), (False, True), (False, False)])
@every_strategy
def test_either_order_of_a_convolutions_state_is_read(engines, here, there):
    """Rows of channels, or channels of rows, at either end, on however many ranks."""
    family = FAMILIES["mamba 2, one group"]
    transfer(
        engines("prefill", family, tp=2, dim_first=there),
        engines("decode", family, dim_first=here),
    )


@pytest.mark.parametrize("decode", [dict(), dict(tp=2)], ids=["TP1", "TP2"])
def test_state_of_a_prompt_that_is_prefetched_is_read_at_its_end(engines, decode):
    """It is the state after all tokens: what it is after some of them is of no use."""
    family = FAMILIES["mamba 2"]
    p = engines("prefill", family)
    d = engines("decode", family, **decode)
    computed_tokens = 2 * BLOCK_TOKENS
    p.fill(1, P_IDS)
    d.fill(2, D_IDS)
    before = {rank: memory.copy() for rank, memory in d.memory.items()}
    expected = {rank: memory.copy() for rank, memory in d.memory.items()}
    for rank, memory in expected.items():
        d.write(memory, rank, 1, D_IDS)
    address, progress = p.serve(), Progress(p, d)
    p.start(admitted={"p-a"})
    told = [P_IDS[0][:2], []]
    part = Receive(address, "p-a", list(D_IDS), told, NUM_TOKENS, computed_tokens, attempt=1)
    d.start(prefetch={"d-a": part})
    for worker in d.workers.values():
        stats_with(worker, "prefetched_bytes", progress)
    for rank, memory in d.memory.items():
        # A block of the cache is whole, and of the state nothing is here.
        np.testing.assert_array_equal(memory[:, D_IDS[0][:2]], expected[rank][:, D_IDS[0][:2]])
        np.testing.assert_array_equal(memory[:, D_IDS[1]], before[rank][:, D_IDS[1]])
    bound = with_blocks(OFFER, list(P_IDS))
    p.start(offered={"p-a": Offer(bound, 30.0)})
    ids, counts = (list(D_IDS), list(P_IDS)), (NUM_TOKENS, NUM_TOKENS)
    d.start(receive={"d-a": Receive(address, "p-a", *ids, *counts, bound, attempt=1)})
    progress.until(d, received="d-a")
    progress.until(p, sent="p-a")
    for rank, memory in d.memory.items():
        assert d.workers[rank].report.take_failed() == {}
        np.testing.assert_array_equal(memory, expected[rank])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(remote_tokens=NUM_TOKENS + 1),
            "needs the state after 47 .*the state after 48",
        ),
        (dict(remote_block_ids=[P_IDS[0], []]), r"blocks at the two ends: 0, 1"),
        (dict(remote_block_ids=[P_IDS[0], [4, 6]]), r"blocks at the two ends: 1, 2"),
        (dict(remote_block_ids=[P_IDS[0], [0]]), r"needs tokens \[0, 3\)"),
        (dict(remote_block_ids=[P_IDS[0], [NUM_BLOCKS]]), f"names block {NUM_BLOCKS} but"),
        (dict(remote_block_ids=[P_IDS[0]]), "names blocks of 1 KV-cache groups"),
    ],
)
def test_state_of_other_tokens_or_blocks_is_refused(engines, caplog_vllm, changes, message):
    """It costs the request, all of whose blocks are lost in every group, and nothing else."""
    p, d = (engines(name, FAMILIES["mamba 2"]) for name in ("prefill", "decode"))
    p.fill(1, P_IDS)
    d.fill(2, D_IDS)
    before = {rank: memory.copy() for rank, memory in d.memory.items()}
    read(p, d, **changes)
    (worker,) = d.workers.values()
    assert worker.report.take_failed() == {"d-a": frozenset([*D_IDS[0], *D_IDS[1]])}
    assert re.search(message, caplog_vllm.text)
    for rank, memory in d.memory.items():
        np.testing.assert_array_equal(memory, before[rank])


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (
            dict(dtype=torch.bfloat16),
            "numbers of the state is bfloat16 there and float32 here: .*--mamba-ssm-cache-dtype",
        ),
        (dict(kernel=5), "has blocks of 4 rows of state, . channels to a unit at the source"),
        (dict(columns=8), r"6 channels to a unit here"),
        (dict(heads=4), "is of 4 units at the source but of 8 here"),
    ],
)
def test_state_of_another_form_is_refused_at_the_handshake(engines, caplog_vllm, theirs, message):
    """The component is named, with what differs and what to do."""
    family = FAMILIES["mamba 2"]
    p, d = engines("prefill", replace(family, **theirs)), engines("decode", family)
    read(p, d)
    (worker,) = d.workers.values()
    assert set(worker.report.take_failed()) == {"d-a"}
    assert re.search(rf"layer model.layers.\d.mixer/\w+ .*{message}", caplog_vllm.text)


@pytest.mark.parametrize(
    "shapes",
    [((1,),), ((3, 33), (4, 4, 4)), ((3, 16), (4, 4, 4)), ((3, 28), (4, 4, 4)), ((3, 24), (4, 4))],
)
def test_state_that_is_not_known_is_none_of_ours(monkeypatch, shapes):
    """Its parts are not those of its kind, which its specification tells before any cache is."""
    monkeypatch.setattr(state_module, "is_conv_state_dim_first", lambda: False)
    spec = MambaSpec(block_size=16, shapes=shapes, dtypes=(torch.float32,) * len(shapes))
    cache = KVCacheConfig(4, [], [KVCacheGroupSpec(["a"], spec)])
    named = "layer a keeps MambaSpec in a form that is not known here"
    assert unserved_layer(cache) == named
    with pytest.raises(LocalLayoutError, match=named):
        layers_of_worker({"a": torch.zeros(4, 1, 1, 4096, dtype=torch.int8)}, cache, {})
    known = replace(spec, shapes=((3, 24), (4, 4, 4)), dtypes=(torch.float32,) * 2)
    assert unserved_layer(KVCacheConfig(4, [], [KVCacheGroupSpec(["a"], known)])) is None


def test_state_of_every_rank_is_one_unit():
    """Each rank says that it has all of it, but where ranks compute parts of a prompt."""
    spec = FAMILIES["short convolution, on every rank"].spec(2)
    cache_config = KVCacheConfig(4, [], [KVCacheGroupSpec(["conv"], spec)])
    assert unserved_layer(cache_config) is None
    assert unserved_layer(cache_config, 2, over_pcp=True).startswith("layer conv keeps no latent")
    tensor = torch.zeros(4, 1, 1, spec.page_size_bytes, dtype=torch.int8)
    backend = SimpleNamespace(get_name=lambda: "SHORT_CONV")
    layers = layers_of_worker({"conv": tensor}, cache_config, {"conv": backend})
    for rank in range(2):
        shard = shard_of_worker(MeshRank(0, rank), 2, layers)
        assert shard.holdings == {"conv/x": Holding(UnitInterval(0, 1), 1)}


def test_layers_of_state_are_none_of_drafts():
    """Falcon-H1 numbers them on from those of attention, as vLLM does those of drafts."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
    config = KVCacheConfig(
        4,
        [],
        [
            KVCacheGroupSpec(["model.layers.0.attn", "model.layers.1.attn"], spec),
            KVCacheGroupSpec(["model.2.mixer", "model.3.mixer"], FAMILIES["mamba 2"].spec(1)),
        ],
    )
    assert token_layers(config) == ["model.layers.0.attn", "model.layers.1.attn"]
    assert state_groups(config) == {1}


@st.composite
def _families(draw) -> StateFamily:
    """A family of any sizes that vLLM could run on up to twelve ranks."""
    kind = draw(st.sampled_from(["MAMBA1", "MAMBA2", "GDN_ATTN", "SHORT_CONV", "LINEAR"]))
    groups = draw(st.sampled_from([1, 12] if kind == "MAMBA2" else [12]))
    return StateFamily(
        kind,
        heads=12 * draw(st.integers(1, 2)),
        head_size=draw(st.integers(1, 3)),
        columns=draw(st.integers(1, 3)),
        groups=groups,
        kernel=draw(st.integers(2, 4)),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float32])),
    )


@settings(max_examples=60, deadline=None)
@given(
    family=_families(),
    sizes=st.tuples(*[st.sampled_from([1, 2, 3, 4, 6, 12])] * 2),
    orders=st.tuples(st.booleans(), st.booleans()),
    replica_offset=st.integers(0, 5),
)
def test_every_component_lands_where_its_rank_keeps_it(family, sizes, orders, replica_offset):
    """Whatever sizes and ranks: pages become what the loader of vLLM's weights says they are."""
    ends = []
    for tp, dim_first in zip(sizes, orders, strict=True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mamba_utils, "is_conv_state_dim_first", lambda value=dim_first: value)
            patch.setattr(state_module, "is_conv_state_dim_first", lambda value=dim_first: value)
            ends.append([_described(family, tp, rank, dim_first) for rank in range(tp)])
    src, dst = ends
    said = [[shard for shard, _, _ in end] for end in ends]
    plan = plan_reshard(*said, replica_offset=replica_offset)
    assert verify_plan(*said, plan) == []
    sources = {shard.rank: (cache, pages) for shard, cache, pages in src}
    blocks = BlockRun(np.array([3]), 0), BlockRun(np.array([1]), 0)
    for shard, cache, pages in dst:
        found = np.zeros_like(pages)
        for planned in plan.reads_of(shard.rank):
            their_cache, their_pages = sources[planned.src_rank]
            for leg in lower_read(planned, their_cache, cache):
                length = np.arange(int(leg.src.rows[0, 1]))
                from_, to = (
                    end.addresses(indices.astype(np.int64))[:, np.newaxis] + length
                    for end, indices in zip(
                        (leg.src, leg.dst),
                        leg.indices(select(leg, [blocks[0]], [blocks[1]])),
                        strict=True,
                    )
                )
                found.reshape(-1)[to] = their_pages.reshape(-1)[from_]
        np.testing.assert_array_equal(found[1], pages[3])
        assert not found[[0, *range(2, NUM_BLOCKS)]].any()


def _described(family: StateFamily, tp: int, tp_rank: int, dim_first: bool):
    """A rank's shard and cache as from address 0 on, and its pages."""
    pages = family.pages(7, tp, tp_rank, dim_first)
    tensor = torch.from_numpy(pages.view(np.int8))[:, None, None]
    caches = {
        part.name: LayerCache(
            (replace(part.plane, address=part.plane.address - tensor.data_ptr()),), 0
        )
        for part in describe_state(tensor, family.spec(tp))
    }
    split = Split.LATENT if family.replicated else Split.UNITS
    layers = {name: WorkerLayer(cache, split) for name, cache in caches.items()}
    shard = shard_of_worker(MeshRank(0, tp_rank), tp, layers)
    return shard, RankCache(NUM_BLOCKS, 0, caches), pages

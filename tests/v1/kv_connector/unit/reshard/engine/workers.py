# SPDX-License-Identifier: Apache-2.0
"""Whole engines of workers in one process: real NIXL, real side channels, no model.

Every worker has its own KV cache, agent and ledgers; what vLLM's engine would do, calling
`submit` and `collect` in every step, the test does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from tests.v1.kv_connector.unit.reshard import forms
from tests.v1.kv_connector.unit.reshard.engine.configs import stand_at
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine import worker as worker_module
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches import (
    geometry as geometry_module,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.metadata import (
    Offer,
    ReshardConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.stats import ReshardStats
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.transfer_engine import (
    TransferEngine,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.worker import ReshardWorker
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import (
    MeshRank,
    ParallelMesh,
    Shard,
    TokenShare,
    shard_model,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.fingerprint import (
    OfferFingerprint,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    Receive,
    RemoteEngineAddress,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.metadata import (
    encode_replies,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.connection import PeerConnection
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.handshake_client import (
    HandshakeClient,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.side_channel import (
    HandshakeServer,
)

NUM_LAYERS, NUM_BLOCKS, HEAD_SIZE = 4, 16, 8
OFFER = OfferFingerprint(48, 1, 2)
"""What schedulers say is offered, and what they say is wanted."""
DEADLINE_S = 120.0


class Engine:
    """All workers of an engine, and the side channel that its scheduler would serve.

    Args:
        model_layers: Layers of the model's that have their caches bound, as its runner does.
        shaped_by_backends: Whether its caches have the form of 0.22.1, or of later bases.
        probes: Whether other engines' NIXL metadata is tried in another process first, which takes
            longer.

    Attributes:
        transfer_engines: What each rank's worker has its thread poll.
        caches: Of each layer of each rank, as planes.
    """

    def __init__(
        self,
        engine_id: str,
        *,
        pp: int = 1,
        tp: int = 1,
        heads: int = 2,
        block_tokens: int = 16,
        mla: bool = False,
        partition: list[int] | None = None,
        lease_s: float = 30.0,
        dtype: torch.dtype = torch.float32,
        window_tokens: int | None = None,
        cache_dtype: str = "auto",
        blocks_per_id: int = 1,
        dcp: int = 1,
        pcp: int = 1,
        interleave: int = 1,
        token_major: bool = False,
        cross_layers: bool = False,
        replica: int = 0,
        head_size: int = HEAD_SIZE,
        backend: type | None = None,
        model_layers: Mapping[str, Any] = MappingProxyType({}),
        clock: Callable[[], float] = time.monotonic,
        shaped_by_backends: bool = forms.SHAPED_BY_BACKENDS,
        probes: bool = False,
        role: str = "kv_both",
        **extra_config,
    ) -> None:
        self.engine_id, self.block_tokens, self.mla = engine_id, block_tokens, mla
        self.dtype, self.head_size, self.dcp = dtype, head_size, dcp
        # Others know the ranks of PCP as those of the stage, one TP group behind another.
        assert pcp == 1 or dcp > 1, "replicas have nothing that they say"
        self.mesh = ParallelMesh(pp, tp * pcp)
        self.shards = tuple(
            Shard(s.rank, {f"layers.{n}": held for n, held in s.holdings.items()})
            for s in shard_model(
                self.mesh, NUM_LAYERS, 1 if mla else heads, partition, dcp, interleave
            )
        )
        if pcp > 1:
            self.shards = tuple(dealt_over_pcp(shard, pcp, tp) for shard in self.shards)
        config = SimpleNamespace(
            load_config=SimpleNamespace(load_format="dummy"),
            model_config=SimpleNamespace(
                use_mla=mla,
                hf_text_config=SimpleNamespace(model_type="llama"),
                multimodal_config=None,
                dtype=dtype,
                get_total_num_kv_heads=lambda: heads,
                get_total_num_hidden_layers=lambda: NUM_LAYERS,
                get_head_size=lambda: head_size,
            ),
            cache_config=SimpleNamespace(cache_dtype=cache_dtype),
            attention_config=None,
            compilation_config=SimpleNamespace(
                pass_config=SimpleNamespace(), static_forward_context=model_layers
            ),
            scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=not window_tokens),
            speculative_config=None,
            # A dense model's replicas all have rank 0.
            parallel_config=SimpleNamespace(
                tensor_parallel_size=tp,
                data_parallel_rank=0,
                data_parallel_index=replica,
                prefill_context_parallel_size=pcp,
                decode_context_parallel_size=dcp,
                cp_kv_cache_interleave_size=interleave,
            ),
            kv_transfer_config=KVTransferConfig(
                kv_connector="NixlConnector",
                kv_role=role,
                kv_connector_extra_config={
                    "kv_lease_duration": lease_s,
                    "num_threads": 0,
                    **extra_config,
                },
            ),
        )
        self.workers: dict[MeshRank, ReshardWorker] = {}
        self.transfer_engines: dict[MeshRank, TransferEngine] = {}
        self.caches: dict[MeshRank, dict[str, torch.Tensor]] = {}
        backend = backend or forms.backend(mla=mla, shaped_by_backends=shaped_by_backends)
        describe_layer = forms.describe_layer(shaped_by_backends)
        for shard in self.shards:
            num_heads = len(next(iter(shard.holdings.values())).units)
            spec = (MLAAttentionSpec if mla else FullAttentionSpec)(
                block_size=block_tokens * blocks_per_id,
                num_kv_heads=num_heads,
                head_size=head_size,
                dtype=dtype,
            )
            names = list(shard.holdings)
            num_blocks = NUM_BLOCKS * blocks_per_id
            sizes = num_blocks, num_heads, block_tokens, head_size
            tensors = {
                name: forms.empty(
                    *sizes,
                    mla=mla,
                    dtype=dtype,
                    token_major=token_major,
                    shaped_by_backends=shaped_by_backends,
                )
                for name in names
            }
            for name in model_layers:
                model_layers[name].kv_cache = tensors[name]
            groups = [KVCacheGroupSpec(names, spec)]
            if window_tokens:
                groups = split(names, spec, window_tokens)
                # One tensor for a layer of each group, as vLLM's hybrid allocator has it.
                for full, sliding in zip(*(group.layer_names for group in groups), strict=False):
                    tensors[sliding] = tensors[full]
            with pytest.MonkeyPatch.context() as patch:
                pcp_rank, tp_rank = divmod(shard.rank.tp_rank, tp)
                stand_at(patch, MeshRank(shard.rank.pp_rank, tp_rank), pcp_rank)
                patch.setattr(
                    worker_module,
                    "gather_shards",
                    lambda own, _: self.shards if len(self.shards) > 1 else (own,),
                )
                patch.setattr(geometry_module, "describe_layer", describe_layer)
                patch.setattr(worker_module, "TransferEngine", partial(self._kept, shard.rank))
                patch.setattr(
                    ReshardWorker, "_backends", lambda _, names: dict.fromkeys(names, backend)
                )
                if not probes:
                    patch.setattr(ReshardWorker, "_make_probe", lambda _: None)
                places = forms.cache_tensors(names, NUM_BLOCKS, spec.page_size_bytes)
                cache_config = KVCacheConfig(NUM_BLOCKS, places, groups)
                worker = ReshardWorker(config, engine_id, cache_config, clock)
                if cross_layers:
                    tensors = forms.register_together(worker, cache_config, sizes, dtype)
                else:
                    worker.register_kv_caches(tensors)
            self.workers[shard.rank] = worker
            self.caches[shard.rank] = {
                name: forms.as_planes(tensor, mla=mla, shaped_by_backends=shaped_by_backends)
                for name, tensor in tensors.items()
            }
        self.server: HandshakeServer | None = None

    def _kept(self, rank: MeshRank, *parts: object) -> TransferEngine:
        """A worker's transfer engine, which is kept for tests to look at."""
        self.transfer_engines[rank] = TransferEngine(*parts)
        return self.transfer_engines[rank]

    @property
    def connections(self) -> list[PeerConnection]:
        """Those with other engines that its only worker has, or is about to have."""
        (transfer_engine,) = self.transfer_engines.values()
        lanes = transfer_engine.peers.lanes.ready
        return [connection for lane in lanes for connection in lane.connections]

    def is_connected_with(self, address: RemoteEngineAddress) -> bool:
        """Whether its only worker has connected all workers of an engine."""
        (transfer_engine,) = self.transfer_engines.values()
        return any(
            each.address == address and each.connection is not None
            for each in transfer_engine.peers
        )

    def serve(self, port: int = 0) -> RemoteEngineAddress:
        """Answer handshakes; returns where."""
        self.server = HandshakeServer(
            "127.0.0.1",
            port,
            encode_replies(
                {(rank.pp_rank, rank.tp_rank): w.handshake for rank, w in self.workers.items()}
            ),
        )
        self.server.start()
        return RemoteEngineAddress(self.engine_id, "127.0.0.1", self.server.port)

    def start(self, **metadata) -> None:
        """Tell all workers what the scheduler asks for in this step."""
        for worker in self.workers.values():
            worker.submit(ReshardConnectorMetadata(**metadata))

    def offer(
        self,
        *request_ids: str,
        lease_s: float = 30.0,
        trace_headers: dict[str, str] | None = None,
        block_ids: tuple[list[int], ...] = (),
        **metadata,
    ) -> None:
        """Compute requests, and hold their blocks."""
        self.start(admitted=set(request_ids))
        offer = Offer(OFFER, lease_s, trace_headers=trace_headers, block_ids=block_ids)
        self.start(offered=dict.fromkeys(request_ids, offer), **metadata)

    def blocks(self, rank: MeshRank, layer: str, block_ids) -> np.ndarray:
        """The bytes of some blocks of a layer: planes, heads, tokens, size."""
        cache = self.caches[rank][layer].numpy()
        return np.concatenate(cache[:, block_ids].swapaxes(0, 1), axis=2)

    def close(self) -> None:
        """Give everything back."""
        for worker in self.workers.values():
            worker.close()
        if self.server is not None:
            self.server.close()


def dealt_over_pcp(shard: Shard, pcp: int, tp: int) -> Shard:
    """A rank's shard where a group of DCP goes along PCP first, as vLLM makes it."""
    pcp_rank, tp_rank = divmod(shard.rank.tp_rank, tp)
    return Shard(
        shard.rank,
        {
            layer: replace(
                held,
                tokens=replace(
                    held.tokens, index=(tp_rank * pcp + pcp_rank) % held.tokens.num_shares
                ),
            )
            for layer, held in shard.holdings.items()
        },
    )


def split(names: list[str], spec: FullAttentionSpec, window_tokens: int) -> list[KVCacheGroupSpec]:
    """Two groups: every other layer has a sliding window."""
    sliding = SlidingWindowSpec(
        block_size=spec.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        dtype=spec.dtype,
        sliding_window=window_tokens,
    )
    odd = [name for name in names if int(name.removeprefix("layers.")) % 2]
    even = [name for name in names if name not in odd]
    return [KVCacheGroupSpec(even, spec), KVCacheGroupSpec(odd, sliding)]


def pairs_of_layouts(layouts: Mapping[str, tuple[dict, dict]], deciding: Iterable[str]) -> Any:
    """A parameter for each pair of layouts; those that need not decide a change are nightly.

    Random layouts test the plan. For a kind of cache it is enough that ranks are gathered, that
    ranks are parted, and that stages become ranks.

    Args:
        layouts: Those of P and of D, by name.
        deciding: The names of those that decide.
    """
    unknown = {*deciding} - {*layouts}
    assert not unknown, unknown
    return pytest.mark.parametrize(
        ("prefill", "decode"),
        [
            pytest.param(*pair, id=name, marks=() if name in deciding else pytest.mark.nightly)
            for name, pair in layouts.items()
        ],
    )


_PARAM = type(pytest.param())


def kinds_in_layouts(
    name: str,
    kinds: Mapping[str, Any],
    layouts: Mapping[str, tuple[dict, dict]],
    deciding: Sequence[str],
) -> Any:
    """A parameter for each kind of cache in each pair of layouts.

    The first kind decides a change in all layouts that decide, and the others take turns in them.

    Args:
        name: That of the parameter.
        kinds: Its values, by their names.
        layouts: Those of P and of D, by name.
        deciding: The names of those that decide.
    """
    cases = []
    for number, (kind, value) in enumerate(kinds.items()):
        decides = set(deciding if not number else [deciding[number % len(deciding)]])
        assert decides <= {*layouts}
        for layout, pair in layouts.items():
            values, marks = (
                (value.values, value.marks) if isinstance(value, _PARAM) else ((value,), ())
            )
            if layout not in decides:
                marks = (*marks, pytest.mark.nightly)
            cases.append(pytest.param(*values, *pair, id=f"{kind}-{layout}", marks=marks))
    return pytest.mark.parametrize((name, "prefill", "decode"), cases)


every_strategy = pytest.mark.parametrize(
    "engines",
    # Either of the two, by sizes that `test_staging` has.
    ["direct", "staged", pytest.param("auto", marks=pytest.mark.nightly)],
    indirect=True,
)
"""For tests that compare bytes: however they are read, they are the same."""


@pytest.fixture
def engines(request, monkeypatch) -> Iterator:
    """Makes engines, which read once and direct unless something else is asked for; closes them."""
    # Few of them see another engine: the process that tries metadata starts with the first.
    monkeypatch.setattr(HandshakeClient, "prepare", lambda *_: None)
    strategy = getattr(request, "param", "direct")
    options = {"transfer_strategy": strategy, "verify_reads": 0}
    made: list[Engine] = []

    def make(engine_id: str, **layout) -> Engine:
        made.append(Engine(engine_id, **{**options, **layout}))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


class Progress:
    """Steps engines until something has happened, and remembers what was reported."""

    def __init__(self, *engines: Engine) -> None:
        self.engines = engines
        self.sent: dict[tuple[str, MeshRank], set[str]] = {}
        self.received: dict[tuple[str, MeshRank], set[str]] = {}
        for engine in engines:
            for rank in engine.workers:
                self.sent[engine.engine_id, rank] = set()
                self.received[engine.engine_id, rank] = set()

    def step(self) -> None:
        """One step of every worker; nothing is reported twice."""
        for engine in self.engines:
            for rank, worker in engine.workers.items():
                sent, received = worker.collect().take_finished()
                for seen, new in ((self.sent, sent), (self.received, received)):
                    assert not seen[engine.engine_id, rank] & new
                    seen[engine.engine_id, rank] |= new

    def until(self, engine: Engine, *, sent: str = "", received: str = "") -> None:
        """Step until every worker of an engine has reported a request."""
        deadline = time.monotonic() + DEADLINE_S

        def reported(rank):
            return (not sent or sent in self.sent[engine.engine_id, rank]) and (
                not received or received in self.received[engine.engine_id, rank]
            )

        while not all(map(reported, engine.workers)):
            assert time.monotonic() < deadline, (self.sent, self.received)
            self.step()
            time.sleep(1e-3)


def wait_until(condition: Callable[[], object], step: Callable[[], None] = lambda: None) -> None:
    """Wait for the other threads, and take a step now and then."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        step()
        time.sleep(1e-3)


def lost_blocks(worker: ReshardWorker) -> set[int]:
    """The blocks of all requests that could not be read."""
    return set().union(*worker.report.take_failed().values())


def failures(worker: ReshardWorker, progress: Progress, count: int = 1) -> dict[str, set[int]]:
    """Step until so many requests could not be read; returns their blocks."""
    failed: dict[str, set[int]] = {}

    def has_failed() -> bool:
        failed.update(worker.report.take_failed())
        return len(failed) >= count

    wait_until(has_failed, progress.step)
    return failed


def stats_with(worker: ReshardWorker, name: str, progress: Progress) -> ReshardStats:
    """Step until something of a name was counted; returns all that was meanwhile."""
    stats = ReshardStats()

    def is_counted() -> bool:
        if (taken := worker.report.take_stats()) is not None:
            stats.aggregate(taken)
        return bool(stats.data[name])

    wait_until(is_counted, progress.step)
    return stats


def receive(address, local, remote, *, tokens=48, remote_request_id="p-a") -> Receive:
    """A request of a number of tokens."""
    return Receive(address, remote_request_id, [local], [remote], tokens, tokens, OFFER)


def fill(engine: Engine, block_ids, *, seed: int = 1, num_blocks: int | None = None) -> np.ndarray:
    """Give a sequence random KV; returns it whole: layers, planes, heads, tokens, size.

    Args:
        engine: Whose caches.
        block_ids: Its blocks.
        seed: Of what is random.
        num_blocks: How many blocks it will have, where these are only the first ones.
    """
    num_tokens = (num_blocks or len(block_ids)) * engine.block_tokens * engine.dcp
    heads = max(holding.num_units for shard in engine.shards for holding in shard.holdings.values())
    shape = (NUM_LAYERS, 1 if engine.mla else 2, heads, num_tokens, engine.head_size)
    random = np.random.default_rng(seed)
    if engine.dtype == torch.uint8:
        whole = random.integers(0, 256, shape, np.uint8)
    else:
        whole = random.random(shape, np.float32)
    for shard in engine.shards:
        for layer, holding in shard.holdings.items():
            interval = holding.units
            cache = engine.caches[shard.rank][layer].numpy()
            part = whole[int(layer.removeprefix("layers.")), :, interval.start : interval.stop]
            own = part[:, :, dealt_tokens(holding.tokens, num_tokens)]
            for position, block in enumerate(block_ids):
                start = position * engine.block_tokens
                page = own[:, :, start : start + engine.block_tokens]
                cache[:, block] = page
    return whole


def dealt_tokens(share: TokenShare, num_tokens: int) -> list[int]:
    """The tokens of a sequence that a rank is dealt, one run after another, as cards are."""
    dealt: list[list[int]] = [[] for _ in range(share.num_shares)]
    for number, first in enumerate(range(0, num_tokens, share.run_tokens)):
        run = range(first, min(first + share.run_tokens, num_tokens))
        dealt[number % share.num_shares] += run
    return dealt[share.index]


def assert_received(engine: Engine, block_ids, whole: np.ndarray, *, start_token: int = 0) -> None:
    """Every worker holds its part of the sequence in the given blocks."""
    for shard in engine.shards:
        for layer, holding in shard.holdings.items():
            interval = holding.units
            tokens = dealt_tokens(holding.tokens, whole.shape[3])
            own = [token for token in tokens if token >= start_token]
            number = int(layer.removeprefix("layers."))
            expected = whole[number, :, interval.start : interval.stop][:, :, own]
            found = engine.blocks(shard.rank, layer, block_ids)
            np.testing.assert_array_equal(found[:, :, : expected.shape[2]], expected)

# SPDX-License-Identifier: Apache-2.0
"""Models that mix full attention with sliding windows: several KV-cache groups over real NIXL.

Odd layers have a window, and share their tensors with even ones. The request has 100 tokens in 7
blocks of 16, of which the last 4 hold a window of 50; the prefill engine names one more, as vLLM's
scheduler does, and that one is the null block by now.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler import NixlConnectorScheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from tests.v1.kv_connector.unit.reshard import forms
from tests.v1.kv_connector.unit.reshard.engine.workers import (
    OFFER,
    Engine,
    Progress,
    every_strategy,
    lost_blocks,
    pairs_of_layouts,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches.geometry import (
    layers_of_worker,
    unserved_layer,
    window_groups,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.compat import CACHES_ARE_VIEWS
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.scheduling.receives import (
    TokenCounts,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.scheduling.remote_reads import (
    RemoteReads,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.scheduling.scheduler import (
    ReshardScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import LocalLayoutError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import MeshRank
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import Receive
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.subscriber import Subscriber

NUM_TOKENS, WINDOW_TOKENS = 100, 50
# Blocks of both groups are of one pool: none is in both.
SRC_FULL, SRC_SLIDING = [5, 2, 9, 14, 7, 1, 12], [0, 3, 8, 15, 4]
DST_FULL, DST_SLIDING = [6, 3, 11, 1, 15, 8, 2], [13, 4, 10, 5]
COMMON = dict(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)


def receive(address, full, sliding, *, remote=(SRC_FULL, SRC_SLIDING)) -> Receive:
    """The request, to be read into the given blocks."""
    return Receive(address, "p-a", [full, sliding], list(remote), NUM_TOKENS, NUM_TOKENS, OFFER)


def blocks_of(engine: Engine, rank, layer: str, block_ids) -> np.ndarray:
    """A view of a layer's blocks: planes, blocks, heads, tokens, size."""
    return engine.caches[rank][layer].numpy()[:, block_ids]


def is_sliding(layer: str) -> bool:
    """Whether a layer has a window."""
    return int(layer.removeprefix("layers.")) % 2 == 1


def fill_everything(engine: Engine, *, seed: int) -> dict[tuple[str, int], np.ndarray]:
    """Write random bytes all over the caches; returns them by layer and global head.

    Layers that share a tensor hold the same: they are told apart by their blocks.
    """
    heads: dict[tuple[str, int], np.ndarray] = {}
    for shard in engine.shards:
        for layer, holding in shard.holdings.items():
            interval = holding.units
            cache = engine.caches[shard.rank][layer].numpy()
            for local_head, head in enumerate(range(interval.start, interval.stop)):
                # Of one pair of layers, whether one worker holds both or not.
                pair = int(layer.removeprefix("layers.")) // 2
                generator = np.random.default_rng([seed, pair, head])
                cache[:, :, local_head] = generator.random(cache[:, :, local_head].shape)
                heads[layer, head] = cache[:, :, local_head].copy()
    return heads


LAYOUTS = {
    "TP1 to TP2": (dict(tp=1), dict(tp=2)),
    "TP2 to TP1": (dict(tp=2), dict(tp=1)),
    "PP2 to PP1": (dict(pp=2), dict(pp=1)),
    "PP1 to PP2": (dict(pp=1), dict(pp=2)),
    "PP2 x TP2 to PP1": (dict(pp=2, tp=2), dict()),
}


@pytest.mark.parametrize("cached", [0, 5], ids=["nothing cached", "prefix cached"])
@pairs_of_layouts(LAYOUTS, {"TP2 to TP1", "TP1 to TP2", "PP2 x TP2 to PP1"})
@every_strategy
def test_groups_are_read_block_by_block(engines, prefill, decode, cached):
    """Every layer's blocks arrive in its own group's blocks, and no other byte changes."""
    p = engines("prefill", window_tokens=WINDOW_TOKENS, **prefill)
    d = engines("decode", window_tokens=WINDOW_TOKENS, **decode)
    sources, before = fill_everything(p, seed=1), fill_everything(d, seed=2)
    address = p.serve()
    p.offer("p-a")
    full, sliding = DST_FULL[cached:], DST_SLIDING[max(cached - 3, 0) :]
    d.start(receive={"d-a": receive(address, full, sliding)})
    progress = Progress(p, d)
    progress.until(d, received="d-a")
    progress.until(p, sent="p-a")
    for shard in d.shards:
        assert d.workers[shard.rank].report.take_failed() == {}
        # A tensor is written for both of the layers that share it.
        expected = {
            layer: torch.zeros_like(tensor).numpy()
            for layer, tensor in d.caches[shard.rank].items()
        }
        for layer, holding in shard.holdings.items():
            interval = holding.units
            pair = {f"layers.{n}" for n in (int(layer[7:]) // 2 * 2, int(layer[7:]) // 2 * 2 + 1)}
            for local_head, head in enumerate(range(interval.start, interval.stop)):
                whole = before[layer, head].copy()
                for name in pair & shard.holdings.keys():
                    dst = sliding if is_sliding(name) else full
                    src = (SRC_SLIDING if is_sliding(name) else SRC_FULL)[-len(dst) :]
                    whole[:, dst] = sources[name, head][:, src]
                expected[layer][:, :, local_head] = whole
            np.testing.assert_array_equal(d.caches[shard.rank][layer].numpy(), expected[layer])


@pytest.mark.parametrize(
    "sliding", [[0, 0, 8, 15, 4], [8, 15, 4]], ids=["null blocks", "too few blocks"]
)
def test_a_window_that_has_moved_on_is_refused(engines, caplog_vllm, sliding):
    """Nothing is read in place of what is gone, and the blocks of both groups are invalid."""
    p, d = (engines(name, window_tokens=WINDOW_TOKENS) for name in ("prefill", "decode"))
    address = p.serve()
    p.offer("p-a")
    wanted = receive(address, DST_FULL, DST_SLIDING, remote=(SRC_FULL, sliding))
    d.start(receive={"d-a": wanted})
    Progress(p, d).until(d, received="d-a")
    assert "needs tokens [48, 100) but the blocks" in caplog_vllm.text
    assert "are those of tokens [64, 112)" in caplog_vllm.text
    for worker in d.workers.values():
        assert lost_blocks(worker) == {*DST_FULL, *DST_SLIDING}
        assert worker.report.take_stats().data["bytes_transferred"] == []


@pytest.mark.parametrize(
    ("src", "dst", "served"),
    [
        ((32, 1), (16, 1), True),
        ((8, 1), (16, 1), False),
        ((24, 1), (16, 1), False),
        # The kernel's blocks are as large, and the scheduler's are not.
        ((16, 1), (16, 2), False),
        # The scheduler's blocks are as large, and the kernel's are not.
        ((8, 2), (16, 1), True),
        ((8, 4), (16, 2), True),
    ],
)
def test_windows_in_blocks_of_other_sizes(engines, caplog_vllm, src, dst, served):
    """Blocks that begin where ours do, or earlier, hold all that ours want; others need not."""
    p, d = (
        engines(name, window_tokens=WINDOW_TOKENS, block_tokens=tokens, blocks_per_id=blocks)
        for name, (tokens, blocks) in (("prefill", src), ("decode", dst))
    )
    fill_everything(p, seed=1)
    address = p.serve()
    p.offer("p-a")
    (full, sliding), (full_here, sliding_here) = (
        ([1 + block for block in range(num_ids)], [8 + block for block in range(num_ids)])
        for num_ids in (-(-NUM_TOKENS // (tokens * blocks)) for tokens, blocks in (src, dst))
    )
    # Of 51 tokens, the window has left as many whole blocks here.
    gone = (NUM_TOKENS - WINDOW_TOKENS + 1) // (dst[0] * dst[1])
    wanted = receive(address, full_here, sliding_here[gone:], remote=(full, sliding))
    d.start(receive={"d-a": wanted})
    Progress(d).until(d, received="d-a")
    refusal = f"may not fill blocks of {dst[0] * dst[1]} tokens"
    assert (refusal in caplog_vllm.text) is not served
    (worker,) = d.workers.values()
    assert (worker.report.take_failed() == {}) is served
    if served:
        rank = MeshRank(0, 0)
        sent = p.blocks(rank, "layers.1", of_kernel(sliding, src[1]))
        found = d.blocks(rank, "layers.1", of_kernel(sliding_here[gone:], dst[1]))
        start = gone * dst[0] * dst[1]
        wanted_tokens = slice(0, NUM_TOKENS - start)
        np.testing.assert_array_equal(found[:, :, wanted_tokens], sent[:, :, start:NUM_TOKENS])


def of_kernel(block_ids, blocks_per_id: int) -> list[int]:
    """The kernel's blocks that the scheduler's stand for."""
    return [id_ * blocks_per_id + block for id_ in block_ids for block in range(blocks_per_id)]


def cache_of(spec) -> None:
    """Describe the cache of one layer."""
    tensors = {"layer": forms.empty(4, 2, 16, 8)}
    config = KVCacheConfig(4, [], [KVCacheGroupSpec(["layer"], spec)])
    layers_of_worker(tensors, config, {"layer": forms.backend()})


def test_caches_that_hold_no_slots_for_tokens_are_refused():
    """Blocks that cannot be matched by tokens of the sequence are refused at startup."""
    with pytest.raises(LocalLayoutError, match="keeps CrossAttentionSpec in a form that is not"):
        cache_of(CrossAttentionSpec(**COMMON))


def test_slots_of_several_tokens():
    """They are served where caches are views, and left to upstream's elsewhere."""
    latent = SlidingWindowMLASpec(**{**COMMON, "num_kv_heads": 1}, sliding_window=32)
    spec = forms.compressed(latent, 4)
    unserved = unserved_layer(KVCacheConfig(4, [], [KVCacheGroupSpec(["layer"], spec)]))
    assert (unserved is None) is CACHES_ARE_VIEWS
    if CACHES_ARE_VIEWS:
        tensors = {"layer": forms.empty(4, 1, 4, 8, mla=True)}
        config = KVCacheConfig(4, [], [KVCacheGroupSpec(["layer"], spec)])
        layers = layers_of_worker(tensors, config, {"layer": forms.backend(mla=True)})
        (plane,) = layers["layer"].cache.planes
        assert (plane.block_tokens, plane.slot_tokens) == (16, 4)


def test_groups_with_windows_are_recognised():
    """Sliding windows and chunks lose their first blocks, full attention does not."""
    specs = [
        FullAttentionSpec(**COMMON),
        SlidingWindowSpec(**COMMON, sliding_window=32),
        FullAttentionSpec(**COMMON, sliding_window=32),
        ChunkedLocalAttentionSpec(**COMMON, attention_chunk_size=32),
        SlidingWindowMLASpec(**COMMON, sliding_window=32),
    ]
    groups = [KVCacheGroupSpec([f"layer{n}"], spec) for n, spec in enumerate(specs)]
    assert window_groups(KVCacheConfig(4, [], groups)) == {1, 3, 4}
    for spec in specs[:4]:
        cache_of(spec)


@pytest.mark.parametrize(
    ("spec", "cached", "expected"),
    [
        (FullAttentionSpec(**COMMON), 32, (68, True)),
        (SlidingWindowSpec(**COMMON, sliding_window=50), 32, (67, True)),
        (SlidingWindowSpec(**COMMON, sliding_window=50), 99, (0, False)),
    ],
)
def test_the_last_token_of_a_prompt_keeps_its_window(monkeypatch, spec, cached, expected):
    """It is not counted as computed, so that its window's blocks are kept until it is."""
    monkeypatch.setattr(
        NixlConnectorScheduler,
        "get_num_new_matched_tokens",
        lambda _, request, num_computed_tokens: (NUM_TOKENS - num_computed_tokens, True),
    )
    scheduler = ReshardScheduler.__new__(ReshardScheduler)
    scheduler.kv_cache_config = KVCacheConfig(4, [], [KVCacheGroupSpec(["layer"], spec)])
    has_windows = bool(window_groups(scheduler.kv_cache_config))
    scheduler._counts = TokenCounts((16,), frozenset(), has_windows)
    scheduler._reads, scheduler._block_pool = RemoteReads(Subscriber(print), None, print), None
    request = SimpleNamespace(
        request_id="d",
        num_tokens=NUM_TOKENS,
        prompt_token_ids=[0] * NUM_TOKENS,
        kv_transfer_params=None,
        skip_reading_prefix_cache=False,
    )
    assert scheduler.get_num_new_matched_tokens(request, cached) == expected

# SPDX-License-Identifier: Apache-2.0
"""Workers whose ranks share tokens out, over NIXL: every byte, judged by dealing them out here."""

from __future__ import annotations

import numpy as np
import pytest

from tests.bases import requires_base
from tests.v1.kv_connector.unit.reshard.engine.workers import (
    OFFER,
    Progress,
    assert_received,
    every_strategy,
    fill,
    lost_blocks,
    pairs_of_layouts,
    receive,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.metadata import (
    Offer,
    ReshardConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import MeshRank

pytestmark = requires_base("0.32.0", "0.33.0", reason="its layers do not say what is shared out")

PAIRS = {
    "TP2 to TP2 DCP2": (dict(tp=2), dict(tp=2, dcp=2, interleave=16)),
    "TP1 to TP4 DCP4 by token": (dict(tp=1), dict(tp=4, dcp=4)),
    "TP4 DCP4 by token to TP2": (dict(tp=4, dcp=4), dict(tp=2)),
    "TP4 to TP4 DCP2": (dict(tp=4), dict(tp=4, dcp=2, interleave=16)),
    "TP4 to TP4 DCP4 unequally": (dict(tp=4), dict(tp=4, dcp=4, interleave=4, block_tokens=24)),
    "TP4 DCP2 to TP4 DCP4": (dict(tp=4, dcp=2, interleave=16), dict(tp=4, dcp=4, interleave=16)),
    "TP4 DCP4 to TP2 DCP2 by token": (dict(tp=4, dcp=4, interleave=16), dict(tp=2, dcp=2)),
    "TP3 DCP3 to TP2 DCP2 unequally": (
        dict(tp=3, dcp=3, interleave=4),
        dict(tp=2, dcp=2, interleave=8),
    ),
    "DCP2 by token to the same": (dict(tp=2, dcp=2), dict(tp=2, dcp=2, block_tokens=24)),
    "PP2 to TP2 DCP2": (dict(pp=2), dict(tp=2, dcp=2, interleave=8)),
    "PP2 x TP2 DCP2 to PP2": (dict(pp=2, tp=2, dcp=2, interleave=8), dict(pp=2)),
    "other blocks": (
        dict(tp=2, dcp=2, interleave=8, block_tokens=24),
        dict(tp=2, dcp=2, interleave=16, block_tokens=32),
    ),
    "blocks of a kernel's": (
        dict(tp=2, block_tokens=8, blocks_per_id=2),
        dict(tp=2, dcp=2, interleave=4, block_tokens=8),
    ),
}
WAYS = {
    "heads, direct": ("direct", dict(heads=1)),
    "latents, by way of the arena": ("staged", dict(mla=True)),
}


def ids_for(engine, num_tokens: int, blocks_per_id: int = 1) -> int:
    """How many block ids hold so many tokens."""
    return -(-num_tokens // (engine.block_tokens * blocks_per_id * engine.dcp))


def expanded(ids: list[int], blocks_per_id: int) -> list[int]:
    """The blocks that ids stand for."""
    return [each * blocks_per_id + part for each in ids for part in range(blocks_per_id)]


@pytest.mark.parametrize(("engines", "kind"), WAYS.values(), ids=WAYS.keys(), indirect=["engines"])
@pairs_of_layouts(
    PAIRS,
    {
        *("TP3 DCP3 to TP2 DCP2 unequally", "TP4 to TP4 DCP4 unequally", "other blocks"),
        *("PP2 x TP2 DCP2 to PP2", "TP4 DCP4 to TP2 DCP2 by token"),
    },
)
def test_every_rank_receives_its_share(engines, prefill, decode, kind):
    """However tokens are shared out at either end: a long prompt, and one that few ranks have."""
    p, d = engines("prefill", **kind, **prefill), engines("decode", **kind, **decode)
    address, progress = p.serve(), Progress(p, d)
    sizes = [engine.get("blocks_per_id", 1) for engine in (prefill, decode)]
    for name, num_tokens in (("long", 92), ("short", 3)):
        src_ids = [5, 2, 9, 7, 4, 11][: ids_for(p, num_tokens, sizes[0])]
        dst_ids = [3, 4, 1, 8, 6, 2][: ids_for(d, num_tokens, sizes[1])]
        whole = fill(p, expanded(src_ids, sizes[0]))[:, :, :, :num_tokens]
        p.offer(f"p-{name}")
        wanted = receive(
            address, dst_ids, src_ids, tokens=num_tokens, remote_request_id=f"p-{name}"
        )
        d.start(receive={f"d-{name}": wanted})
        progress.until(d, received=f"d-{name}")
        progress.until(p, sent=f"p-{name}")
        assert not any(lost_blocks(worker) for worker in d.workers.values())
        assert_received(d, expanded(dst_ids, sizes[1]), whole)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (dict(pcp=2, dcp=2, interleave=16), dict()),
        (dict(pp=2, pcp=2, dcp=2, interleave=8), dict(tp=2, dcp=2, interleave=16)),
        (dict(tp=2, pcp=2, dcp=2, interleave=16), dict()),
        (dict(tp=2, pcp=2, dcp=4), dict(pp=2)),
    ],
    ids=["PCP2", "PP2 x PCP2 to DCP2", "TP2 x PCP2, replicas", "TP2 x PCP2, all shared out"],
)
def test_shares_of_prefill_context_parallelism(engines, prefill, decode):
    """Its ranks are read as those of one stage; every one of them is released."""
    p = engines("prefill", mla=True, **prefill)
    d = engines("decode", mla=True, **decode)
    address, progress = p.serve(), Progress(p, d)
    src_ids = [5, 2, 9, 7, 4, 11][: ids_for(p, 92)]
    dst_ids = [3, 4, 1, 8, 6, 2][: ids_for(d, 92)]
    whole = fill(p, src_ids)[:, :, :, :92]
    p.offer("p-a")
    d.start(receive={"d-a": receive(address, dst_ids, src_ids, tokens=92)})
    progress.until(d, received="d-a")
    progress.until(p, sent="p-a")
    assert not any(lost_blocks(worker) for worker in d.workers.values())
    assert_received(d, dst_ids, whole)


@every_strategy
def test_nothing_else_is_written(engines):
    """Other blocks, and those of a prefix that is cached, stay as they are."""
    p = engines("prefill", heads=1, tp=4, dcp=4, interleave=4)
    d = engines("decode", heads=1, tp=2, dcp=2, interleave=8)
    before = {}
    for rank, caches in d.caches.items():
        for layer, cache in caches.items():
            cache.fill_(7.0)
            before[rank, layer] = cache.numpy().copy()
    address = p.serve()
    whole = fill(p, [5, 2])
    p.offer("p-a")
    # Of four blocks of 32 tokens, the first two are cached.
    d.start(receive={"d-a": receive(address, [6, 1], [5, 2], tokens=128)})
    Progress(p, d).until(d, received="d-a")
    assert_received(d, [6, 1], whole, start_token=64)
    others = [block for block in range(16) if block not in (6, 1)]
    for (rank, layer), cache in before.items():
        found = d.caches[rank][layer].numpy()
        np.testing.assert_array_equal(found[:, others], cache[:, others])


def test_rank_without_a_token_reads_nothing_and_releases(engines):
    """It has no read that could be bound, and says that it is through all the same."""
    p, d = engines("prefill", heads=1), engines("decode", heads=1, tp=2, dcp=2, interleave=16)
    address = p.serve()
    whole = fill(p, [5])
    p.offer("p-a")
    d.start(receive={"d-a": receive(address, [3], [5], tokens=9)})
    progress = Progress(p, d)
    progress.until(d, received="d-a")
    progress.until(p, sent="p-a")
    assert_received(d, [3], whole[:, :, :, :9])
    moved = [
        sum(worker.report.take_stats().data["bytes_transferred"])
        for worker in (d.workers[MeshRank(0, 0)], d.workers[MeshRank(0, 1)])
    ]
    assert moved[0] > moved[1] == 0


def test_ranks_with_other_tokens_are_no_replicas(engines):
    """A request that the holders of its last tokens do not know is lost on their readers only."""
    p, d = engines("prefill", heads=1, tp=2, dcp=2, interleave=16), engines("decode", heads=1)
    address = p.serve()
    fill(p, [5])
    only = p.workers[MeshRank(0, 0)]
    only.submit(ReshardConnectorMetadata(admitted={"p-a"}))
    only.submit(ReshardConnectorMetadata(offered={"p-a": Offer(OFFER, 30.0)}))
    d.start(receive={"d-a": receive(address, [3, 4], [5], tokens=32)})
    progress = Progress(p, d)
    progress.until(d, received="d-a")
    assert lost_blocks(d.workers[MeshRank(0, 0)]) == {3, 4}

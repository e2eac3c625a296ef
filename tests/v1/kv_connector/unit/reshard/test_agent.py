# SPDX-License-Identifier: Apache-2.0
"""Plans carried out byte for byte by real NIXL, every rank with an agent and memory of its own."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Iterator

import numpy as np
import pytest
from vllm.distributed.nixl_utils import NixlWrapper

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.agent import NixlAgent, TransferState
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.cache import (
    LayerCache,
    Plane,
    RankCache,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import TransferError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.lowering import BlockSpan, lower_read
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.mesh import MeshRank, ParallelMesh
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan import plan_reshard
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.shards import Shard, shard_model

NUM_BLOCKS = 8
SLOT_BYTES = 64
DEADLINE_S = 120


class Rank:
    """A rank with a KV cache in host memory, and its agent.

    The cache is an array of shape (layers, planes, blocks, heads, tokens, slot bytes), or with
    heads and tokens exchanged. Where there are two groups, every other layer is of group 1.
    """

    def __init__(
        self, shard: Shard, *, block_tokens: int, token_major: bool, planes: int, groups: int
    ) -> None:
        self.rank = shard.rank
        self.shard = shard
        self.block_tokens = block_tokens
        num_heads = len(next(iter(shard.heads_by_layer.values())))
        head_axes = (block_tokens, num_heads) if token_major else (num_heads, block_tokens)
        self.array = np.zeros(
            (len(shard.heads_by_layer), planes, NUM_BLOCKS, *head_axes, SLOT_BYTES), np.uint8
        )
        self.by_head = self.array.swapaxes(3, 4) if token_major else self.array
        strides = self.by_head.strides
        self.cache = RankCache(
            NUM_BLOCKS,
            0,
            {
                layer: LayerCache(
                    tuple(
                        Plane(
                            self.array.ctypes.data + position * strides[0] + plane * strides[1],
                            strides[2],
                            strides[3],
                            strides[4],
                            SLOT_BYTES,
                            num_heads,
                            block_tokens,
                        )
                        for plane in range(planes)
                    ),
                    group=int(layer) % groups,
                )
                for position, layer in enumerate(shard.heads_by_layer)
            },
        )
        self.agent = NixlAgent(f"{shard.rank}-{uuid.uuid4()}", num_threads=1)
        self.agent.register([(self.array.ctypes.data, self.array.nbytes, 0)])

    def fill(self, sequence: np.ndarray, blocks: list[BlockSpan]) -> None:
        """Write the whole model's KV of a sequence, as far as this rank holds it."""
        for layer, plane, block, heads, tokens in self._cells(blocks):
            self.by_head[layer[0], plane, block] = sequence[layer[1], plane, heads, tokens]

    def expected(self, sequence: np.ndarray, blocks: list[BlockSpan]) -> np.ndarray:
        """What this rank's cache should hold after it received the sequence."""
        filled = np.zeros_like(self.by_head)
        for layer, plane, block, heads, tokens in self._cells(blocks):
            filled[layer[0], plane, block] = sequence[layer[1], plane, heads, tokens]
        return filled

    def _cells(self, blocks: list[BlockSpan]) -> Iterator[tuple]:
        for position, (layer, heads) in enumerate(self.shard.heads_by_layer.items()):
            span = blocks[self.cache.layers[layer].group]
            for index, block in enumerate(span.block_ids):
                start = span.start_token + index * self.block_tokens
                tokens = slice(start, start + self.block_tokens)
                for plane in range(self.array.shape[1]):
                    yield (position, layer), plane, block, slice(heads.start, heads.stop), tokens


def wait_until(condition) -> None:
    """Poll until a condition holds; fail after a deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "timed out"


def spans(block_tokens: int, num_tokens: int, groups: int, *, seed: int) -> list[BlockSpan]:
    """Blocks of a request in each group: shuffled, a window of the last tokens in group 1."""
    random = np.random.default_rng(seed)
    count = num_tokens // block_tokens
    result = []
    for group in range(groups):
        ids = random.permutation(NUM_BLOCKS)[:count].astype(np.int32)
        skipped = count // 2 if group else 0
        result.append(BlockSpan(ids[skipped:], skipped * block_tokens))
    return result


CASES = {
    "TP down": dict(src=(1, 4), dst=(1, 2), heads=8),
    "TP up": dict(src=(1, 1), dst=(1, 4), heads=8),
    "TP3 to TP2": dict(src=(1, 3), dst=(1, 2), heads=6),
    "TP2 to TP3": dict(src=(1, 2), dst=(1, 3), heads=6),
    "replicated to sliced": dict(src=(1, 4), dst=(1, 2), heads=2),
    "sliced to replicated": dict(src=(1, 2), dst=(1, 4), heads=2),
    "replicated on both sides": dict(src=(1, 4), dst=(1, 6), heads=2),
    "PP2 to PP1": dict(src=(2, 1), dst=(1, 1), heads=2),
    "PP1 to PP2": dict(src=(1, 1), dst=(2, 1), heads=2),
    "PP2 x TP3 to PP3 x TP2": dict(src=(2, 3), dst=(3, 2), heads=6),
    "uneven stages": dict(src=(2, 1), dst=(2, 1), heads=2, src_stages=[1, 3], dst_stages=[3, 1]),
    "MLA": dict(src=(1, 4), dst=(1, 2), heads=1, planes=1),
    "MLA over stages": dict(src=(2, 2), dst=(1, 1), heads=1, planes=1),
    "hybrid groups": dict(src=(2, 2), dst=(1, 4), heads=4, groups=2),
    "larger blocks at the destination": dict(src=(1, 2), dst=(1, 1), heads=2, dst_block=16),
    "smaller blocks at the destination": dict(src=(1, 2), dst=(1, 1), heads=2, dst_block=4),
    "blocks that do not divide": dict(src=(2, 1), dst=(1, 2), heads=2, src_block=8, dst_block=12),
    "HND to NHD": dict(src=(1, 2), dst=(1, 1), heads=4, dst_token_major=True),
    "NHD to HND": dict(src=(1, 1), dst=(1, 2), heads=4, src_token_major=True),
    "NHD on both sides": dict(
        src=(1, 2), dst=(1, 1), heads=4, src_token_major=True, dst_token_major=True
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_kv_arrives_byte_for_byte(case):
    """Every destination rank ends with the bytes of its own layers and heads, and no others."""
    num_layers, planes, groups = 4, case.get("planes", 2), case.get("groups", 1)
    num_tokens = 48
    sides = {}
    for seed, side in enumerate(("src", "dst")):
        block_tokens = case.get(f"{side}_block", 8)
        shards = shard_model(
            ParallelMesh(*case[side]), num_layers, case["heads"], case.get(f"{side}_stages")
        )
        ranks = {
            shard.rank: Rank(
                shard,
                block_tokens=block_tokens,
                token_major=case.get(f"{side}_token_major", False),
                planes=planes,
                groups=groups,
            )
            for shard in shards
        }
        tokens = min(num_tokens, NUM_BLOCKS * block_tokens)
        sides[side] = ranks, spans(block_tokens, tokens, groups, seed=seed)
    (src, src_blocks), (dst, dst_blocks) = sides["src"], sides["dst"]
    shape = (num_layers, planes, case["heads"], num_tokens, SLOT_BYTES)
    sequence = np.random.default_rng(7).integers(1, 256, shape).astype(np.uint8)
    for rank in src.values():
        rank.fill(sequence, src_blocks)

    plan = plan_reshard(
        (rank.shard for rank in src.values()), (rank.shard for rank in dst.values())
    )
    for rank in dst.values():
        run_reads(plan.reads_of(rank.rank), rank, src, src_blocks, dst_blocks)
        np.testing.assert_array_equal(rank.by_head, rank.expected(sequence, dst_blocks))


def run_reads(reads, rank: Rank, src: dict[MeshRank, Rank], src_blocks, dst_blocks) -> None:
    """Lower and post the reads of one rank, and give everything back."""
    agent = rank.agent
    peers = {
        source: agent.connect(src[source].agent.metadata())
        for source in {read.src_rank for read in reads}
    }
    for read in reads:
        for leg in lower_read(read, src[read.src_rank].cache, rank.cache):
            src_indices, dst_indices = leg.indices(src_blocks, dst_blocks)
            local = agent.prepare(leg.dst.rows)
            remote = agent.prepare(leg.src.rows, peers[read.src_rank])
            transfer = agent.read(local, dst_indices, remote, src_indices)
            wait_until(lambda t=transfer: agent.poll(t) is not TransferState.IN_FLIGHT)
            assert agent.poll(transfer) is TransferState.DONE
            agent.release(transfer)
            for prepared in (local, remote):
                agent.release_prepared(prepared)
    for peer in peers.values():
        agent.disconnect(peer)


@pytest.fixture
def agents() -> tuple[NixlAgent, NixlAgent]:
    """Two agents that have nothing registered."""
    return tuple(NixlAgent(f"{role}-{uuid.uuid4()}", num_threads=1) for role in ("a", "b"))


def test_notifications_name_their_sender(agents):
    """A message arrives as it was sent."""
    one, other = agents
    peer = one.connect(other.metadata())
    assert peer == other.name
    one.notify(peer, b"done: request 1")
    received: list[tuple[str, bytes]] = []
    wait_until(lambda: received.extend(other.take_notifications()) or received)
    assert received == [(one.name, b"done: request 1")]


def test_memory_that_is_not_registered_is_refused(agents):
    """The error names whose memory it is."""
    rows = np.array([[4096, 64, 0, 64, 2]], dtype=np.uint64)
    with pytest.raises(TransferError, match="1 rows of this worker's memory"):
        agents[0].prepare(rows)


def test_unknown_peer_is_refused(agents):
    """Lists and messages for a peer that never shook hands are errors, not crashes."""
    with pytest.raises(TransferError, match="nobody's memory"):
        agents[0].prepare(np.array([[4096, 64, 0, 64, 2]], dtype=np.uint64), "nobody")
    with pytest.raises(TransferError, match="cannot notify nobody"):
        agents[0].notify("nobody", b"")


def test_garbage_is_no_peer(agents):
    """Metadata that no agent wrote is refused with a typed error."""
    with pytest.raises(TransferError, match="does not accept a peer's metadata"):
        agents[0].connect(b"garbage")


def test_progress_delay_reaches_nixl(monkeypatch):
    """What NIXL is configured with is the delay that was asked for, and only for this agent."""
    bindings = sys.modules[NixlWrapper.__module__].nixlBind
    make_agent, settings, delays_us = bindings.nixlAgent, bindings.nixlAgentConfig, []

    def spy(name, config):
        delays_us.append(config.pthrDelay)
        return make_agent(name, config)

    monkeypatch.setattr(bindings, "nixlAgent", spy)
    NixlAgent(f"patient-{uuid.uuid4()}", num_threads=1, progress_delay_us=250)
    assert delays_us == [250]
    assert bindings.nixlAgentConfig is settings

# SPDX-License-Identifier: Apache-2.0
"""Plans carried out byte for byte, by every transport.

Real NIXL reads from source ranks in processes of their own. The agent of the tests' own memory is
held to the same, so that tests may use it where they decide what happens when.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from tests.v1.kv_connector.unit.reshard.memory.cases import select
from tests.v1.kv_connector.unit.reshard.transport.backends import BACKENDS, available
from tests.v1.kv_connector.unit.reshard.transport.memory_agent import MemoryAgent
from tests.v1.kv_connector.unit.reshard.transport.ranks import (
    NUM_LAYERS,
    Format,
    Rank,
    blocks_of,
    sequence_of,
)
from tests.v1.kv_connector.unit.reshard.transport.sources import (
    PackingRank,
    Source,
    SourceProcess,
)
from tools.verify import verify_plan
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import TransferError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.leg import Rows, side_by_side
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.lowering import lower_read
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.overlap import BlockRun
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.packing import (
    PACK_UNIT_BYTES,
    PackedCache,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.staging import (
    StagingPolicy,
    Strategy,
    stage_leg,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.reshard import Read, plan_reshard
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import (
    ParallelMesh,
    Shard,
    shard_model,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.fingerprint import (
    OfferFingerprint,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.packing import TABLE_BYTES
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import (
    NixlAgent,
    Prepared,
    TransferState,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.arena import (
    StagingArea,
    open_area,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.lease_check import RowBuffer
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.packed_windows import (
    Claim,
    PackedWindows,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.parts import RequestReads, cut
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.remote import (
    PreparedLeg,
    PreparedPacking,
    PreparedStaging,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.transfers import Transfers

DEADLINE_S = 120.0
MAX_SOURCES = 8

Agent = NixlAgent | MemoryAgent
Hold = Callable[[Sequence[Shard], Format, np.ndarray, list[BlockRun]], "Sources"]

NHD = dict(token_major=True)
MLA = dict(planes=1)
HYBRID = dict(groups=2)

# name: source (pp, tp), destination (pp, tp), KV heads, and what else is not as usual
SIDE_BY_SIDE = dict(side_by_side=True)
LAYOUTS: dict[str, tuple[tuple[int, int], tuple[int, int], int, dict]] = {
    "the same": ((1, 1), (1, 1), 2, {}),
    "the same mesh": ((2, 2), (2, 2), 4, {}),
    "TP4 to TP2": ((1, 4), (1, 2), 8, {}),
    "TP8 to TP1": ((1, 8), (1, 1), 8, {}),
    "TP1 to TP4": ((1, 1), (1, 4), 8, {}),
    "TP2 to TP8": ((1, 2), (1, 8), 8, {}),
    "TP3 to TP2": ((1, 3), (1, 2), 6, {}),
    "TP2 to TP3": ((1, 2), (1, 3), 6, {}),
    "TP8 replicated to TP2": ((1, 8), (1, 2), 2, {}),
    "TP2 to TP8 replicated": ((1, 2), (1, 8), 2, {}),
    "TP8 to TP4, both replicated": ((1, 8), (1, 4), 2, {}),
    "TP4 to TP6, both replicated": ((1, 4), (1, 6), 2, {}),
    "PP2 to PP1": ((2, 1), (1, 1), 2, {}),
    "PP1 to PP2": ((1, 1), (2, 1), 2, {}),
    "PP2 to PP3": ((2, 1), (3, 1), 2, {}),
    "PP4 to PP2": ((4, 1), (2, 1), 2, {}),
    "PP8 to TP8": ((8, 1), (1, 8), 8, {}),
    "TP8 to PP8": ((1, 8), (8, 1), 8, {}),
    "PP2 TP3 to PP3 TP2": ((2, 3), (3, 2), 6, {}),
    "PP4 TP2 to PP2 TP4": ((4, 2), (2, 4), 4, {}),
    "uneven stages": ((3, 1), (2, 1), 2, dict(src_stages=[1, 5, 2], dst_stages=[7, 1])),
    "uneven stages and TP": ((2, 2), (1, 4), 4, dict(src_stages=[3, 5])),
    "MLA TP8 to TP1": ((1, 8), (1, 1), 1, dict(both=MLA)),
    "MLA TP8 to TP4": ((1, 8), (1, 4), 1, dict(both=MLA)),
    "MLA PP2 TP4 to PP1": ((2, 4), (1, 1), 1, dict(both=MLA)),
    "MLA TP1 to PP2 TP2": ((1, 1), (2, 2), 1, dict(both=MLA)),
    "hybrid TP4 to TP1": ((1, 4), (1, 1), 4, dict(both=HYBRID)),
    "hybrid PP2 TP2 to TP4": ((2, 2), (1, 4), 4, dict(both=HYBRID)),
    "hybrid PP2 to PP3": ((2, 1), (3, 1), 2, dict(both=HYBRID)),
    "blocks twice as large": ((1, 2), (1, 1), 2, dict(dst=dict(block_tokens=16))),
    "blocks half as large": ((1, 2), (1, 1), 2, dict(src=dict(block_tokens=16))),
    "blocks of 8 to 12 tokens": ((2, 1), (1, 2), 2, dict(dst=dict(block_tokens=12))),
    "HND to NHD": ((1, 2), (1, 1), 4, dict(dst=NHD)),
    "NHD to HND": ((1, 1), (1, 2), 4, dict(src=NHD)),
    "NHD to NHD": ((1, 2), (1, 1), 4, dict(both=NHD)),
    "NHD to NHD, PP2 to PP1": ((2, 1), (1, 1), 4, dict(both=NHD)),
    "planes to side by side": ((2, 1), (1, 2), 4, dict(dst=SIDE_BY_SIDE)),
    "side by side to planes": ((1, 2), (2, 1), 4, dict(src=SIDE_BY_SIDE)),
    "side by side to planes in NHD": ((1, 1), (1, 2), 4, dict(src=SIDE_BY_SIDE, dst=NHD)),
    "planes to side by side, other blocks": (
        (1, 2),
        (1, 1),
        4,
        dict(dst=dict(side_by_side=True, block_tokens=16)),
    ),
}

ARENAS = {"direct": 0, "staged": 1 << 20, "packed": 1 << 20}
POLICIES = {"packed": StagingPolicy(packs_all=True)}

OF_ALL_TRANSPORTS = (
    *("TP2 to TP3", "TP8 replicated to TP2", "PP2 TP3 to PP3 TP2"),
    *("MLA PP2 TP4 to PP1", "hybrid PP2 TP2 to TP4", "HND to NHD"),
)
"""UCX carries out every layout. What its bytes are, a transport does not know."""


ALSO_PACKED = (
    *("NHD to NHD", "NHD to HND", "blocks of 8 to 12 tokens", "TP1 to TP4"),
    *("side by side to planes in NHD", "planes to side by side, other blocks"),
)
"""One of each way in which pieces become small. What is gathered, is scattered as if staged."""


class Sources:
    """The source ranks of one test."""

    def __init__(
        self,
        sources: list[Source],
        unchanged: Callable[[], bool],
        serve: Callable[[], None] = lambda: None,
    ) -> None:
        self.by_rank = {source.rank: source for source in sources}
        self.unchanged = unchanged
        self.serve = serve


@pytest.fixture(scope="module")
def processes() -> Iterator[list[SourceProcess]]:
    """Source processes; started when a test needs so many, and shared by all."""
    started: list[SourceProcess] = []
    yield started
    for each in started:
        each.stop()


def hold_in_processes(processes: list[SourceProcess], backend: str) -> Hold:
    """Source ranks with real NIXL, each in a process of its own."""

    def hold(shards, form, sequence, blocks):
        while len(processes) < len(shards):
            processes.append(SourceProcess())
        used = processes[: len(shards)]
        sources = [
            each.hold(shard, form, sequence, blocks, backend)
            for each, shard in zip(used, shards, strict=True)
        ]
        return Sources(sources, lambda: all(each.unchanged() for each in used))

    return hold


def hold_here(make_agent: Callable[[], Agent]) -> Hold:
    """Source ranks in this process."""

    def hold(shards, form, sequence, blocks):
        ranks = [Rank(shard, form, make_agent()) for shard in shards]
        for rank in ranks:
            rank.fill(sequence, blocks)
        held = [PackingRank(rank, blocks) for rank in ranks]

        def serve() -> None:
            for each in held:
                each.serve()

        return Sources(
            [each.source for each in held],
            lambda: all(
                np.array_equal(rank.bytes(), rank.expected(sequence, blocks)) for rank in ranks
            ),
            serve,
        )

    return hold


def make_memory_agent() -> MemoryAgent:
    """An agent of the tests' own."""
    return MemoryAgent(str(uuid.uuid4()))


def make_nixl_agent(backend: str = "UCX", num_threads: int = 0) -> NixlAgent:
    """A real agent for host memory."""
    return NixlAgent(
        str(uuid.uuid4()), backends=[backend], num_threads=num_threads, progress_delay_us=100
    )


def make_device_agent() -> NixlAgent:
    """A real agent for device memory."""
    return NixlAgent(str(uuid.uuid4()), num_threads=1, memory="VRAM")


@pytest.fixture
def transport(request, processes) -> tuple[Callable[[], Agent], Hold, str]:
    """How to make agents, where source ranks live, and on which device."""
    if request.param == "memory":
        return make_memory_agent, hold_here(make_memory_agent), "cpu"
    if request.param in BACKENDS:
        backend = available(request.param)
        return partial(make_nixl_agent, backend), hold_in_processes(processes, backend), "cpu"
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return make_device_agent, hold_here(make_device_agent), "cuda"


@pytest.mark.parametrize(
    ("transport", "layout", "strategy"),
    [
        pytest.param(transport, layout, strategy, id=f"{transport}-{name}-{strategy}")
        for strategy in ARENAS
        for transport in ("UCX", "memory", "LIBFABRIC", "device")
        for name, layout in LAYOUTS.items()
        if name in OF_ALL_TRANSPORTS
        or (transport == "UCX" and (strategy != "packed" or name in ALSO_PACKED))
    ],
    indirect=["transport"],
)
def test_kv_arrives_byte_for_byte(transport, layout, strategy):
    """Each rank has the bytes of its own layers and heads; all others are what they were."""
    assert_arrives(transport, layout, ARENAS[strategy], POLICIES.get(strategy))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_kv_arrives_in_windows(layout):
    """The same by way of an arena that holds some blocks of one plane."""
    assert_arrives((make_memory_agent, hold_here(make_memory_agent), "cpu"), layout, 48 << 10)


def assert_arrives(transport, layout, arena_bytes, policy=None):
    """Carry out a plan, and compare all bytes of all ranks."""
    make_agent, hold, device = transport
    src_mesh, dst_mesh, num_heads, extra = layout
    src_form, dst_form = (
        replace(Format(device=device), **extra.get("both", {}), **extra.get(side, {}))
        for side in ("src", "dst")
    )
    src, dst = (
        shard_model(ParallelMesh(*mesh), NUM_LAYERS, num_heads, extra.get(stages))
        for mesh, stages in ((src_mesh, "src_stages"), (dst_mesh, "dst_stages"))
    )
    assert len(src) <= MAX_SOURCES
    src_blocks, dst_blocks = blocks_of(src_form, seed=1), blocks_of(dst_form, seed=2)
    sequence = sequence_of(num_heads, src_form.planes)
    sources = hold(src, src_form, sequence, src_blocks)
    plan = plan_reshard(src, dst)
    assert verify_plan(src, dst, plan) == []
    for shard in dst:
        rank = Rank(shard, dst_form, make_agent())
        area = open_area([rank.tensor], arena_bytes, policy=policy)
        if area is not None:
            rank.agent.register([area.region])
        run_reads(plan.reads_of(shard.rank), rank, area, sources, (src_blocks, dst_blocks))
        np.testing.assert_array_equal(rank.bytes(), rank.expected(sequence, dst_blocks))
        rank.agent.close()
    assert sources.unchanged()


def run_reads(
    reads: Sequence[Read],
    rank: Rank,
    area: StagingArea | None,
    sources: Sources,
    blocks: tuple[list[BlockRun], list[BlockRun]],
) -> None:
    """Make all reads of a rank, and give everything back."""
    agent = rank.agent
    names = {
        source: agent.connect(sources.by_rank[source].agent_metadata)
        for source in {read.src_rank for read in reads}
    }

    def prepare(rows: Rows, peer: str | None = None) -> Prepared:
        return agent.prepare(rows, peer)

    packed: dict[str, PackedWindows] = {}
    if area is not None and area.policy is not None:
        looks = RowBuffer(agent, 2, TABLE_BYTES // 8)
        local = prepare(area.rows(PACK_UNIT_BYTES))
        for source, name in names.items():
            at = sources.by_rank[source].packing
            count, device_id = at.arena_bytes // PACK_UNIT_BYTES, rank.cache.device_id
            packed[name] = PackedWindows(
                looks,
                agent,
                agent.prepare(side_by_side(at.table, TABLE_BYTES, 0, 1), name, "DRAM"),
                prepare(side_by_side(at.arena, PACK_UNIT_BYTES, device_id, count), name),
                local,
                partial(agent.notify, name),
            )
    transfers, parts = Transfers(area), []
    claim = Claim("request", OfferFingerprint(1, 2, 3))
    for read in reads:
        src, peer = sources.by_rank[read.src_rank].cache, names[read.src_rank]
        for leg in lower_read(read, src, rank.cache):
            staged = stage_leg(leg, src)
            staging = area and PreparedStaging(
                staged,
                prepare(area.rows(staged.descriptor_bytes)),
                prepare(staged.src.rows, peer),
            )
            packing = None
            if peer in packed:
                packing = PreparedPacking(PackedCache(src).lower(staged), packed[peer])
            lists = prepare(leg.dst.rows), prepare(leg.src.rows, peer)
            prepared = PreparedLeg(leg, *lists, staging, packing)
            parts += cut(prepared, select(leg, *blocks), transfers.area, claim)
    # No time passes, so that no window loses its patience and goes direct.
    request = RequestReads("request")
    transfers.start(request, parts, agent)
    wait_until(lambda: sources.serve() or transfers.advance(now_s=0.0) or not request.parts)
    assert request.error is None and len(request.arrived) == len(parts)
    if area is not None:
        how = Strategy.PACKED if packed else Strategy.STAGED
        assert {each.strategy for each in request.arrived} <= {how}
        assert area.spans.free_bytes == area.spans.size_bytes
    transfers.close()


def wait_until(condition: Callable[[], object]) -> None:
    """Poll until a condition holds; fail after a deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "timed out"


@pytest.fixture(params=[make_memory_agent, make_nixl_agent], ids=["memory", "nixl"])
def agents(request) -> tuple[Agent, Agent]:
    """Two agents that have nothing registered."""
    return request.param(), request.param()


def test_notifications_name_their_sender(agents):
    """A message arrives as it was sent, once."""
    one, other = agents
    peer = one.connect(other.metadata())
    assert peer == other.name
    one.notify(peer, b"done: request 1")
    received: list[tuple[str, bytes]] = []
    wait_until(lambda: received.extend(other.take_notifications()) or received)
    assert received == [(one.name, b"done: request 1")]
    assert other.take_notifications() == []


def test_memory_that_is_not_registered_is_refused(agents):
    """Nothing is prepared that could not be read."""
    rows = np.array([[4096, 64, 0, 64, 2]], dtype=np.uint64)
    with pytest.raises(TransferError):
        agents[0].prepare(rows)


def test_unknown_peer_is_refused(agents):
    """Lists and messages for a peer that never shook hands are errors, not crashes."""
    with pytest.raises(TransferError):
        agents[0].prepare(np.array([[4096, 64, 0, 64, 2]], dtype=np.uint64), "nobody")
    with pytest.raises(TransferError, match="cannot notify"):
        agents[0].notify("nobody", b"")


def test_garbage_is_no_peer(agents):
    """Metadata that no agent wrote is refused with a typed error."""
    with pytest.raises(TransferError, match="accept"):
        agents[0].connect(b"garbage")


def test_forgotten_peer_is_unknown_and_may_come_back(agents):
    """Nothing can be read from it, or be said to it, until it is connected again."""
    one, other = agents
    memory = np.arange(128, dtype=np.uint8).reshape(2, 64)
    for agent, own in zip(agents, memory, strict=True):
        agent.register([(own.ctypes.data, own.nbytes, 0)])
    rows = [np.array([[own.ctypes.data, 64, 0, 64, 1]], dtype=np.uint64) for own in memory]
    index = np.zeros(1, dtype=np.int32)
    for _ in range(3):
        memory[0] = 0
        peer = one.connect(other.metadata())
        local, remote = one.prepare(rows[0]), one.prepare(rows[1], peer)
        transfer = one.read(local, index, remote, index)
        wait_until(lambda each=transfer: one.poll(each) is TransferState.DONE)
        one.release(transfer)
        assert (memory[0] == memory[1]).all()
        for prepared in (local, remote):
            one.release_prepared(prepared)
        one.disconnect(peer)
        with pytest.raises(TransferError):
            one.prepare(rows[1], peer)
        with pytest.raises(TransferError, match="cannot notify"):
            one.notify(peer, b"")


def test_forgotten_peer_leaves_the_others(agents):
    """Reads in flight from another peer, and what is said to it, go on."""
    one, other = agents
    kept = type(one)(str(uuid.uuid4()), num_threads=1, progress_delay_us=100)
    memory = np.arange(192, dtype=np.uint8).reshape(3, 64)
    for agent, own in zip((one, other, kept), memory, strict=True):
        agent.register([(own.ctypes.data, own.nbytes, 0)])
    gone, stays = one.connect(other.metadata()), one.connect(kept.metadata())
    local, remote = (
        one.prepare(np.array([[own.ctypes.data, 64, 0, 64, 1]], dtype=np.uint64), whose)
        for own, whose in ((memory[0], None), (memory[2], stays))
    )
    index = np.zeros(1, dtype=np.int32)
    transfer = one.read(local, index, remote, index)
    one.disconnect(gone)
    wait_until(lambda: one.poll(transfer) is TransferState.DONE)
    one.release(transfer)
    assert (memory[0] == memory[2]).all()
    one.notify(stays, b"done")
    received: list[tuple[str, bytes]] = []
    wait_until(lambda: received.extend(kept.take_notifications()) or received)


def test_lists_of_different_length_are_refused(agents):
    """A read whose ends do not correspond is not posted."""
    one, other = agents
    memory = np.zeros((2, 4, 64), np.uint8)
    for agent, own in zip(agents, memory, strict=True):
        agent.register([(own.ctypes.data, own.nbytes, 0)])
    peer = one.connect(other.metadata())
    local, remote = (
        one.prepare(np.array([[own.ctypes.data, 64, 0, 64, 4]], dtype=np.uint64), whose)
        for own, whose in zip(memory, (None, peer), strict=True)
    )
    with pytest.raises(TransferError):
        one.read(local, np.arange(2, dtype=np.int32), remote, np.arange(3, dtype=np.int32))


def test_closed_agent_says_so(agents):
    """Who holds it can see that it left; the other agent did not."""
    one, other = agents
    assert one.is_open and other.is_open
    one.close()
    assert not one.is_open and other.is_open


def test_agent_of_the_tests_offers_what_nixls_does():
    """What may be asked of one may be asked of the other."""
    public = {name for name in vars(NixlAgent) if not name.startswith("_")}
    assert public <= set(vars(MemoryAgent))


def test_source_that_dies_during_a_read_is_noticed():
    """The read fails soon, instead of being in flight for ever, and so does the next one."""
    # With a thread, it does not post all of the read before it comes back.
    source, agent = SourceProcess(), make_nixl_agent(num_threads=1)
    shard = shard_model(ParallelMesh(1, 1), NUM_LAYERS, 1)[0]
    form = Format()
    held = source.hold(shard, form, sequence_of(1, 2), blocks_of(form, seed=1))
    plane = held.cache.layers[0].planes[0]
    landing = np.zeros(1 << 22, np.uint8)
    agent.register([(landing.ctypes.data, landing.nbytes, 0)])
    peer = agent.connect(held.agent_metadata)
    # The same few bytes over and over: no two adjoin, so that it takes long enough.
    count = 1 << 18
    local = agent.prepare(np.array([[landing.ctypes.data, 8, 0, 16, count]], dtype=np.uint64))
    remote = agent.prepare(np.array([[plane.address, 8, 0, 16, 4]], dtype=np.uint64), peer)
    indices = np.arange(count, dtype=np.int32)
    transfer = agent.read(local, indices, remote, indices % 4)
    source.kill()
    wait_until(lambda: agent.poll(transfer) is not TransferState.IN_FLIGHT)
    assert agent.poll(transfer) is TransferState.FAILED
    with pytest.raises(TransferError, match="cannot read"):
        agent.read(local, indices, remote, indices % 4)
    source.stop()

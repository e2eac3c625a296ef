# SPDX-License-Identifier: Apache-2.0
"""Floors 1 to 4 between two processes: whole workers' caches on one device, compared and timed.

One process holds all workers of a prefill engine, the other is every worker of a decode engine, one
after the other: it plans, lowers, connects, reads, looks the lease up and compares every byte.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tools.verify import verify_plan
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.cache import RankCache
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.reshard import (
    ReshardPlan,
    plan_reshard,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import MeshRank, Shard
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.description import (
    WorkerDescription,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.fingerprint import fingerprint
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.leases import (
    LeaseTable,
    LeaseTableAddress,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    Receive,
    RemoteEngineAddress,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.request_blocks import (
    RequestBlocks,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.tasks import Tasks
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import NixlAgent
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.arena import (
    StagingArea,
    open_area,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.connection import (
    PeerConnection,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.lane import Lane
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.lease_check import LeaseError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.parts import (
    Part,
    RequestReads,
    cut,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.remote import (
    LocalCache,
    lower_engine,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.transfers import Transfers

from .ranks import DEADLINE_S, Layout, Model, Rank, make_agent, tokens_of, wait_until

REQUEST = "request"
ARENA_BYTES = 64 << 20
LARGE = Model(num_layers=32, num_heads=8, head_bytes=256, num_tokens=4096)
SMALL = Model(num_layers=4, num_heads=4, head_bytes=64, num_tokens=200)
PAIRS = (
    (Layout(), Layout()),
    (Layout(tp_size=2), Layout()),
    (Layout(), Layout(tp_size=2)),
    (Layout(pp_size=2), Layout(tp_size=2)),
    (Layout(tp_size=4), Layout(tp_size=2, token_major=True)),
    (Layout(pp_size=2, token_major=True), Layout(block_tokens=64)),
)
"""Of a prefill and a decode engine."""


@dataclass(frozen=True)
class Measured:
    """How one pair was read.

    Attributes:
        way: `direct` or `staged`.
        seconds: Of reading, for all workers one after the other: the median of some times.
        fault: What is wrong with it; empty where all bytes are right.
    """

    prefill: str
    decode: str
    way: str
    kv_bytes: int
    seconds: float
    fault: str

    def __str__(self) -> str:
        rate = f"{self.kv_bytes / self.seconds / 1e9:8.2f} GB/s" if self.seconds else ""
        pair = f"{self.prefill} -> {self.decode}"
        return f"{pair:36} {self.way:7} {self.seconds * 1e3:9.2f} ms {rate:14} {self.fault or 'ok'}"


def measure(
    device: str, model: Model, pairs: Sequence[tuple[Layout, Layout]], repetitions: int = 5
) -> Iterator[Measured]:
    """Read all pairs, both ways.

    Args:
        device: As torch names it.
        repetitions: How often each is read.
    """
    with _prefill_process(device) as pipe:
        for prefill, decode in pairs:
            pipe.send((model, prefill))
            descriptions = [
                WorkerDescription(
                    "prefill", Shard(rank, holdings), RankCache(*cache), table, metadata
                )
                for rank, holdings, cache, table, metadata in _answer(pipe)
            ]
            for way, arena_bytes in (("direct", 0), ("staged", ARENA_BYTES)):
                seconds, fault = _read(
                    device, model, prefill, decode, descriptions, arena_bytes, repetitions
                )
                yield Measured(str(prefill), str(decode), way, model.kv_bytes, seconds, fault)


def report(measured: Sequence[Measured], device: str, path: Path | None) -> None:
    """Write what was measured as JSON, with what it was measured on."""
    if path is not None:
        name = torch.cuda.get_device_name(device) if device != "cpu" else "cpu"
        rows = [asdict(each) for each in measured]
        text = json.dumps({"device": name, "torch": torch.__version__, "lane": rows}, indent=2)
        path.write_text(text + "\n")


def _read(
    device: str,
    model: Model,
    prefill: Layout,
    decode: Layout,
    descriptions: Sequence[WorkerDescription],
    arena_bytes: int,
    repetitions: int,
) -> tuple[float, str]:
    """Be every worker of a decode engine; returns how long reading took, and what is wrong."""
    src, dst = [each.shard for each in descriptions], decode.shards(model)
    plan = plan_reshard(src, dst)
    faults = verify_plan(src, dst, plan)
    by_rank = {each.shard.rank: each for each in descriptions}
    seconds = 0.0
    for shard in dst:
        if faults:
            break
        reader = _Reader(Rank(model, decode, shard, device), device, by_rank, plan, arena_bytes)
        try:
            taken_s = [reader.read(prefill) for _ in range(repetitions)]
            seconds += statistics.median(taken_s)
            faults = [f"{shard.rank}: {fault}" for fault in reader.faults]
        finally:
            reader.close()
    return seconds, "; ".join(faults)


class _Reader:
    """A worker of a decode engine, connected with a prefill engine.

    Attributes:
        faults: What is wrong with what was read.
    """

    def __init__(
        self,
        rank: Rank,
        device: str,
        descriptions: dict[MeshRank, WorkerDescription],
        plan: ReshardPlan,
        arena_bytes: int,
    ) -> None:
        self.faults: list[str] = []
        self._rank = rank
        self._area: StagingArea | None = open_area([rank.tensor], arena_bytes)
        agent = make_agent(device, polled=True)
        agent.register([rank.region])
        if self._area is not None:
            agent.register([self._area.region])
        self._lane = Lane(agent)
        local = LocalCache(rank.shard.rank, rank.cache, frozenset())
        lowered = lower_engine(descriptions, plan, local, self._area)
        self._connection = PeerConnection(self._lane, lowered, DEADLINE_S, time.monotonic)
        while not self._connection.connect_next():
            pass
        self._transfers = Transfers(self._area)

    def read(self, prefill: Layout) -> float:
        """Read the prompt once; returns how long it took."""
        rank, model = self._rank, self._rank.model
        rank.clear()
        blocks, held = [rank.block_ids], [prefill.block_ids(model)]
        offered = fingerprint(tokens_of(model), model.num_tokens, None, held)
        source = RemoteEngineAddress("prefill", "localhost", 0)
        receive = Receive(
            source, REQUEST, blocks, held, model.num_tokens, model.num_tokens, offered
        )
        began_s = time.perf_counter()
        selected, parts = RequestBlocks(receive), list[Part]()
        for leg in self._connection.legs:
            parts += cut(leg, selected.select(leg.leg), self._transfers.area)
        reads = RequestReads(REQUEST)
        self._transfers.start(reads, parts, self._connection)

        def is_over() -> bool:
            # No time passes for windows, which would go direct once they lose their patience.
            self._transfers.advance(0.0)
            return not reads.parts or reads.error is not None

        wait_until(is_over, "a read")
        taken_s = time.perf_counter() - began_s
        self.faults = [] if reads.error is None else [str(reads.error)]
        self.faults += self._lease_faults(receive)
        if difference := rank.difference():
            self.faults.append(difference)
        return taken_s

    def close(self) -> None:
        """Give everything back."""
        self._transfers.close()
        self._connection.close()
        self._lane.close()

    def _lease_faults(self, receive: Receive) -> list[str]:
        """Look the lease up at every worker that was read from."""
        leases, tasks, faults = self._connection.leases, Tasks(), list[str]()
        fingerprint = receive.fingerprint
        assert fingerprint is not None

        async def confirm() -> None:
            tables = self._connection.lease_tables.values()
            due_at_s = time.monotonic() + DEADLINE_S
            await leases.confirm(tasks, REQUEST, fingerprint, tables, due_at_s)

        async def leave(error: Exception | None) -> None:
            if isinstance(error, LeaseError):
                faults.append(str(error))
            elif error is not None:
                raise error

        task = tasks.start(confirm(), leave)

        def is_over() -> bool:
            tasks.run(time.monotonic())
            leases.advance()
            return task.is_over

        wait_until(is_over, "a check")
        return faults


@contextmanager
def _prefill_process(device: str) -> Iterator[Connection]:
    """Start the process that holds prefill engines, one after the other."""
    context = multiprocessing.get_context("spawn")
    pipe, child = context.Pipe()
    # By a module that imports nothing: the process has to stand in for vLLM first.
    from .serving import serve

    process = context.Process(target=serve, args=(child, device), daemon=True)
    process.start()
    child.close()
    try:
        yield pipe
    finally:
        pipe.close()
        process.join(DEADLINE_S)
        process.kill()


def _answer(pipe: Connection) -> Any:
    if not pipe.poll(DEADLINE_S):
        raise TimeoutError("the prefill process does not answer")
    return pipe.recv()


def hold(pipe: Connection, device: str) -> None:
    """Be a prefill engine, and then the next, until nobody asks."""
    agents: list[NixlAgent] = []
    while True:
        try:
            model, layout = pipe.recv()
        except EOFError:
            return
        for agent in agents:
            agent.close()
        agents = []
        # What is registered has to live as long as its agent.
        engine = [
            _Holder(Rank(model, layout, shard, device), device) for shard in layout.shards(model)
        ]
        agents = [each.agent for each in engine]
        pipe.send([each.describe() for each in engine])


class _Holder:
    """A worker of a prefill engine, which holds and offers one prompt."""

    def __init__(self, rank: Rank, device: str) -> None:
        self.rank, self.agent = rank, make_agent(device, polled=False)
        rank.fill()
        self._table = LeaseTable()
        offered = fingerprint(tokens_of(rank.model), rank.model.num_tokens, None, [rank.block_ids])
        self._table.add(REQUEST)
        self._table.publish(REQUEST, offered)
        address = self._table.address
        self.agent.register([rank.region])
        self.agent.register([(address.address, address.size_bytes, 0)], "DRAM")

    def describe(
        self,
    ) -> tuple[MeshRank, dict[Any, Any], tuple[Any, ...], LeaseTableAddress, bytes]:
        """What a reader is told, in values that can be sent."""
        rank, cache = self.rank, self.rank.cache
        held = cache.num_block_ids, cache.device_id, dict(cache.layers)
        holdings = dict(rank.shard.holdings)
        return rank.shard.rank, holdings, held, self._table.address, self.agent.metadata()

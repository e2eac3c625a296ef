# SPDX-License-Identifier: Apache-2.0
"""Processes that hold source ranks, each with NIXL of its own."""

from __future__ import annotations

import multiprocessing
import uuid
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tests.v1.kv_connector.unit.reshard.transport.ranks import Format, Rank
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.cache import RankCache
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.overlap import BlockRun
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.mesh import MeshRank
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import Shard
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import NixlAgent

_ANSWER_S = 120.0


@dataclass(frozen=True)
class Source:
    """What a reader needs of a source rank."""

    rank: MeshRank
    cache: RankCache
    agent_metadata: bytes


class SourceProcess:
    """A process that holds one source rank at a time."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pipe, child = context.Pipe()
        self.process = context.Process(target=_serve, args=(child,), daemon=True)
        self.process.start()
        child.close()

    def hold(
        self,
        shard: Shard,
        form: Format,
        sequence: np.ndarray,
        blocks: list[BlockRun],
        backend: str = "UCX",
    ) -> Source:
        """Let it hold a rank with the KV of a sequence, instead of what it held before."""
        held = shard.rank, dict(shard.holdings), form, sequence, blocks
        self._pipe.send(("hold", backend, *held))
        planes, metadata = self._answer()
        num_block_ids, device_id, layer_caches = planes
        return Source(shard.rank, RankCache(num_block_ids, device_id, layer_caches), metadata)

    def unchanged(self) -> bool:
        """Whether its cache is still what it was filled with."""
        self._pipe.send(("unchanged",))
        return bool(self._answer())

    def notifications(self) -> list[tuple[str, bytes]]:
        """What its agent has heard since the last call."""
        self._pipe.send(("notifications",))
        return list(self._answer())

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        self.process.join()

    def stop(self) -> None:
        """End it."""
        if self.process.is_alive():
            self._pipe.send(("stop",))
            self.process.join(_ANSWER_S)
        self._pipe.close()

    def _answer(self) -> Any:
        assert self._pipe.poll(_ANSWER_S), "the source process does not answer"
        return self._pipe.recv()


def _serve(pipe: Connection) -> None:
    """The process: one agent and rank after the other."""
    held: Rank | None = None
    filled = np.empty(0)
    agent: NixlAgent | None = None
    while True:
        match pipe.recv():
            case ("hold", backend, rank, holdings, form, sequence, blocks):
                if agent is not None:
                    agent.close()
                agent = NixlAgent(
                    f"source-{uuid.uuid4()}",
                    backends=[backend],
                    num_threads=0,
                    progress_delay_us=100,
                )
                held = Rank(Shard(rank, holdings), form, agent)
                held.fill(sequence, blocks)
                filled = held.bytes().copy()
                cache = (held.cache.num_block_ids, held.cache.device_id, dict(held.cache.layers))
                pipe.send((cache, agent.metadata()))
            case ("unchanged",):
                assert held is not None
                pipe.send(np.array_equal(held.bytes(), filled))
            case ("notifications",):
                assert agent is not None
                pipe.send(agent.take_notifications())
            case _:
                return

# SPDX-License-Identifier: Apache-2.0
"""Source ranks, in processes that have NIXL of their own or here, which pack for their readers."""

from __future__ import annotations

import multiprocessing
import uuid
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tests.v1.kv_connector.unit.reshard.transport.ranks import Format, Rank
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import RemoteLayoutError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.cache import RankCache
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.overlap import BlockRun
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.packing import PACK_UNIT_BYTES
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import MeshRank, Shard
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    Pack,
    decode_notification,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.packing import PackAddress
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import NixlAgent
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.budget import UNLIMITED
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.pack_area import open_packs

_ANSWER_S = 120.0

PACKING_BYTES = 4 * PACK_UNIT_BYTES
"""Room for four windows, of which readers ask for more at once."""


@dataclass(frozen=True)
class Source:
    """What a reader needs of a source rank."""

    rank: MeshRank
    cache: RankCache
    agent_metadata: bytes
    packing: PackAddress


class PackingRank:
    """A rank that packs its blocks for whoever asks.

    Args:
        rank: The rank.
        blocks: Blocks of its sequence.
    """

    def __init__(self, rank: Rank, blocks: list[BlockRun]) -> None:
        self.rank, self._agent = rank, rank.agent
        self._block_ids = tuple(each.block_ids.tolist() for each in blocks)
        self._packs = open_packs([rank.tensor], PACKING_BYTES, rank.cache, rank.agent)
        assert self._packs is not None

    @property
    def source(self) -> Source:
        """What a reader needs of it."""
        rank = self.rank
        metadata, packing = rank.agent.metadata(), self._packs.address
        return Source(rank.shard.rank, rank.cache, metadata, packing)

    def serve(self) -> list[tuple[str, bytes]]:
        """Pack what is asked for; returns what else was said."""
        others = []
        for sender, message in self._agent.take_notifications():
            try:
                said = decode_notification(message)
            except RemoteLayoutError:
                said = None
            if isinstance(said, Pack):
                self._packs.hear(said, 0.0)
            else:
                others.append((sender, message))
        self._packs.serve(lambda _: self._block_ids, 0.0, UNLIMITED)
        return others


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
        planes, metadata, packing = self._answer()
        num_block_ids, device_id, layer_caches = planes
        cache = RankCache(num_block_ids, device_id, layer_caches)
        return Source(shard.rank, cache, metadata, packing)

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
    held: PackingRank | None = None
    filled = np.empty(0)
    agent: NixlAgent | None = None
    heard: list[tuple[str, bytes]] = []
    while True:
        while held is not None and not pipe.poll(1e-3):
            heard += held.serve()
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
                own = Rank(Shard(rank, holdings), form, agent)
                own.fill(sequence, blocks)
                filled = own.bytes().copy()
                held, heard = PackingRank(own, blocks), []
                said = held.source
                cache = said.cache
                planes = (cache.num_block_ids, cache.device_id, dict(cache.layers))
                pipe.send((planes, said.agent_metadata, said.packing))
            case ("unchanged",):
                assert held is not None
                pipe.send(np.array_equal(held.rank.bytes(), filled))
            case ("notifications",):
                assert held is not None
                pipe.send(heard + held.serve())
                heard = []
            case _:
                return

# SPDX-License-Identifier: Apache-2.0
"""The limits: the same bytes by NIXL without a connector, and by memcpy."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import (
    NixlAgent,
    TransferState,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.cpu import PROGRESS_REST_US

from .caches import reserve_bytes
from .config import RankConfig, memory_kind, rank_config
from .errors import BenchmarkError
from .network import move_to
from .specs import EngineSpec, RawRank, Reading
from .tables import stretches

_LIMIT_S = 120.0
_STEP_S = 50e-6


class RawHost:
    """A rank without a connector. Engines have one stage.

    Args:
        spec: The engine.
        rank: Its position in the engine.
    """

    def __init__(self, spec: EngineSpec, rank: int) -> None:
        move_to(spec.site)
        self._config: RankConfig = rank_config(spec, 0, rank)
        self._rank = rank
        self._agent = NixlAgent(
            f"{spec.engine_id}/{rank}/{uuid.uuid4()}",
            memory=memory_kind(),
            progress_delay_us=PROGRESS_REST_US,
        )
        caches = self._config.caches
        self._agent.register(caches.regions())
        self._device = caches.regions()[0][2]
        self._slot_bytes = caches.slot_bytes
        self._own = self._described(b"")
        self._sources: list[tuple[str, RawRank]] = []

    def describe(self) -> RawRank:
        """What readers need to know."""
        return self._described(self._agent.metadata())

    def _described(self, metadata: bytes) -> RawRank:
        caches = self._config.caches
        addresses, strides = caches.plane_addresses(), caches.strides
        return RawRank(metadata, caches.heads, addresses, strides, caches.block_tokens)

    def connect(self, ranks: Sequence[RawRank]) -> None:
        """Choose the ranks to read from: those that hold heads of this one's, each head once."""
        missing = set(self._own.heads)
        for rank in ranks:
            if missing & set(rank.heads):
                self._sources.append((self._agent.connect(rank.metadata), rank))
                missing -= set(rank.heads)
        assert not missing

    def fill(self) -> None:
        """Give all blocks known bytes."""
        self._config.caches.fill()

    def clear(self) -> None:
        """Give all blocks bytes that are no request's."""
        self._config.caches.clear()

    def check(
        self, block_ids: Sequence[int], source_block_ids: Sequence[int], source_block_tokens: int
    ) -> None:
        """See that blocks hold what they were read from."""
        self._config.caches.check(block_ids, source_block_ids, source_block_tokens)

    def read(self, block_ids: list[int], source_block_ids: list[int]) -> Reading:
        """Read blocks with as few descriptors as there can be, which are made before."""
        wanted = [
            (peer, *self._descriptors(rank, block_ids, source_block_ids))
            for peer, rank in self._sources
        ]
        lists = [
            (self._agent.prepare(local), self._agent.prepare(remote, peer), len(local))
            for peer, local, remote in wanted
        ]
        indices = [np.arange(count, dtype=np.int32) for _, _, count in lists]
        began_s = time.monotonic()
        transfers = [
            self._agent.read(local, each, remote, each)
            for (local, remote, _), each in zip(lists, indices, strict=True)
        ]
        posted_s = time.monotonic()
        left = list(transfers)
        while True:
            states = [(transfer, self._agent.poll(transfer)) for transfer in left]
            if any(state is TransferState.FAILED for _, state in states):
                raise BenchmarkError("raw NIXL could not read")
            left = [transfer for transfer, state in states if state is TransferState.IN_FLIGHT]
            if not left:
                break
            if time.monotonic() - began_s > _LIMIT_S:
                raise BenchmarkError(f"raw NIXL did not read in {_LIMIT_S:.0f} s")
            time.sleep(_STEP_S)
        ended_s = time.monotonic()
        for transfer in transfers:
            self._agent.release(transfer)
        for local, remote, _ in lists:
            self._agent.release_prepared(local)
            self._agent.release_prepared(remote)
        return Reading(began_s, ended_s, posted_s)

    def _descriptors(
        self, source: RawRank, block_ids: list[int], source_block_ids: list[int]
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Local and remote descriptors, as strided rows of one each."""
        own, size = self._own, self._slot_bytes
        heads = np.array(sorted(set(own.heads) & set(source.heads)))
        offsets = [
            _offsets(rank, ids, heads - rank.heads.start)
            for rank, ids in ((own, block_ids), (source, source_block_ids))
        ]
        # Blocks of the smaller size, then heads or tokens: whichever leaves longer stretches.
        tokens = math.gcd(own.block_tokens, source.block_tokens)
        in_blocks = [each.reshape(-1, tokens, len(heads)) for each in offsets]
        orders = [in_blocks, [each.transpose(0, 2, 1) for each in in_blocks]]
        starts, lengths = min(
            (stretches([each.reshape(-1) for each in order], size) for order in orders),
            key=lambda found: len(found[1]),
        )
        rows = []
        for rank, begins in zip((own, source), starts, strict=True):
            addresses = (np.array(rank.planes)[:, None] + begins).reshape(-1)
            table = np.zeros((len(addresses), 5), np.uint64)
            table[:, 0], table[:, 2] = addresses, self._device
            table[:, 1] = table[:, 3] = np.tile(lengths, len(rank.planes))
            table[:, 4] = 1
            rows.append(table)
        return rows[0], rows[1]


def _offsets(rank: RawRank, block_ids: list[int], heads: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Where slots of some blocks begin in a plane: tokens x heads."""
    of_block, of_head, of_token = rank.strides
    tokens = np.arange(rank.block_tokens) * of_token
    in_blocks = (np.array(block_ids)[:, None] * of_block + tokens).reshape(-1)
    offsets: npt.NDArray[Any] = in_blocks[:, None] + heads * of_head
    return offsets


class MemcpyHost:
    """Copies within one process, on one core.

    Args:
        spec: The engine that would read; the bytes of all ranks are copied, plane by plane.
        rank: Of the process, which stands for all.
    """

    def __init__(self, spec: EngineSpec, rank: int) -> None:
        shape = spec.shape
        block_bytes = shape.bytes_read(shape.block_tokens) // shape.num_planes
        size = (shape.num_planes, spec.num_blocks, block_bytes)
        self._source, self._destination = (reserve_bytes(size) for _ in range(2))
        self._source.fill(1)
        self._destination.fill(0)

    def read(self, block_ids: list[int], source_block_ids: list[int]) -> Reading:
        """Copy as many blocks, from where the first would begin were they contiguous."""
        count = len(block_ids)
        here, there = (
            min(min(ids), self._source.shape[1] - count) for ids in (block_ids, source_block_ids)
        )
        began_s = time.monotonic()
        for source, destination in zip(self._source, self._destination, strict=True):
            np.copyto(destination[here : here + count], source[there : there + count])
        return Reading(began_s, time.monotonic(), began_s)

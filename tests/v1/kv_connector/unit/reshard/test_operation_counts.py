# SPDX-License-Identifier: Apache-2.0
"""What keeps it fast, counted instead of timed.

Benchmarks say how fast it is. These say that nothing is done for each block, that what adjoins is
read in one piece, and that nothing is copied twice.
"""

from __future__ import annotations

import tracemalloc
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.v1.kv_connector.unit.reshard.memory.cases import read, select, span
from tests.v1.kv_connector.unit.reshard.profiling import calls
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory import leg as leg_module
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.cache import (
    LayerCache,
    Plane,
    RankCache,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.leg import count_merged
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.lowering import lower_read
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.staging import (
    ArenaCopy,
    StagingPolicy,
    stage_leg,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol import request_blocks
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    Receive,
    RemoteEngineAddress,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.request_blocks import (
    RequestBlocks,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import (
    Prepared,
    Transfer,
    TransferState,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.arena import StagingArea
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.budget import UNLIMITED
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.parts import RequestReads, cut
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.remote import (
    PreparedLeg,
    PreparedStaging,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.transfers import Transfers

SLOT_BYTES, BLOCK_TOKENS, PLANES = 128, 16, 4
PAGE_BYTES = BLOCK_TOKENS * SLOT_BYTES


def cache(num_heads: int, num_blocks: int) -> RankCache:
    """Two layers in memory that is nobody's: nothing here looks at it."""
    plane_bytes = num_blocks * num_heads * PAGE_BYTES
    return RankCache(
        num_blocks,
        0,
        {
            f"layer.{layer}": LayerCache(
                tuple(
                    Plane(
                        (2 * layer + plane) * plane_bytes,
                        num_heads * PAGE_BYTES,
                        PAGE_BYTES,
                        SLOT_BYTES,
                        SLOT_BYTES,
                        num_heads,
                        BLOCK_TOKENS,
                    )
                    for plane in range(2)
                ),
                group=0,
            )
            for layer in range(2)
        },
    )


class Counting:
    """An agent and a copier for which everything is done at once; both count."""

    def __init__(self) -> None:
        self.posts = self.merged = self.bytes_read = self.copies = self.bytes_copied = 0
        self.rows: dict[int, np.ndarray] = {}

    def read(self, local, local_indices, remote, remote_indices) -> Transfer:
        """Count a read, its descriptors as NIXL merges them, and its bytes."""
        addresses = []
        for prepared, indices in ((local, local_indices), (remote, remote_indices)):
            rows = prepared.handle.astype(np.int64)
            row, block = np.divmod(indices.astype(np.int64), rows[0, 4])
            addresses.append(rows[row, 0] + block * rows[row, 3])
        self.posts += 1
        self.merged += count_merged(addresses, int(rows[0, 1]))
        self.bytes_read += len(local_indices) * int(rows[0, 1])
        return Transfer("peer", None)

    def poll(self, transfer: Transfer) -> TransferState:
        """It is done."""
        return TransferState.DONE

    def telemetry(self, transfer: Transfer) -> None:
        """Nothing is measured."""

    def release(self, transfer: Transfer) -> None:
        """Nothing is held."""

    def scatter(self, copy: ArenaCopy) -> None:
        """Count a copy and its bytes."""
        self.copies += 1
        chunk_bytes = copy.num_heads * copy.num_slots * copy.slot_bytes
        self.bytes_copied += len(copy.arena_offsets) * chunk_bytes

    def close(self) -> None:
        """Nothing runs."""


def prepared(src_heads: int, dst_heads: int, num_blocks: int, area: StagingArea | None):
    """A leg of all of the source's heads, with lists that name their rows."""
    src, dst = cache(src_heads, num_blocks), cache(dst_heads, num_blocks)
    (leg,) = lower_read(read(min(src_heads, dst_heads)), src, dst)
    staging = None
    if area is not None:
        staged = stage_leg(leg, src)
        staging = PreparedStaging(
            staged,
            Prepared(None, area.rows(staged.descriptor_bytes)),
            Prepared("peer", staged.src.rows),
        )
    return PreparedLeg(leg, Prepared(None, leg.dst.rows), Prepared("peer", leg.src.rows), staging)


def run(src_heads, dst_heads, block_ids, *, staged: bool, num_blocks: int = 4096) -> Counting:
    """Read a request's blocks from and to the given ids."""
    counting = Counting()
    area = StagingArea(torch.empty(64 << 20, dtype=torch.uint8), counting) if staged else None
    leg = prepared(src_heads, dst_heads, num_blocks, area)
    transfers = Transfers(area)
    selections = select(leg.leg, [span(block_ids[0])], [span(block_ids[1])])
    parts = list(cut(leg, selections, area))
    request = RequestReads("r")
    transfers.start(request, parts, counting)
    transfers.post(0.0, UNLIMITED)
    transfers.advance(0.0)
    assert len(request.arrived) == len(parts) and not request.parts
    return counting


ASCENDING, DESCENDING = range(64), range(63, -1, -1)
SHUFFLED = np.random.default_rng(0).permutation(64)


@pytest.mark.parametrize("tables", [(ASCENDING, ASCENDING), (DESCENDING, DESCENDING)])
def test_equal_layouts_are_read_in_one_piece_a_plane(tables):
    """Nothing is staged for them that direct reads do as well."""
    counted = run(2, 2, tables, staged=False)
    assert (counted.posts, counted.merged) == (1, PLANES)
    assert counted.bytes_read == PLANES * 64 * 2 * PAGE_BYTES


@pytest.mark.parametrize("dst", [ASCENDING, DESCENDING, SHUFFLED])
@pytest.mark.parametrize("src", [ASCENDING, DESCENDING, SHUFFLED])
def test_half_pages_are_staged_in_one_piece_a_plane(src, dst):
    """In whatever order a request has its blocks: direct, each of them is a piece in each plane."""
    direct, staged = (run(1, 2, (src, dst), staged=each) for each in (False, True))
    assert direct.merged == PLANES * 64 and staged.merged == PLANES
    assert (direct.copies, staged.copies) == (0, 1)
    assert staged.bytes_copied == staged.bytes_read == direct.bytes_read


@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
def test_calls_do_not_grow_with_blocks(staged):
    """A prompt of sixteen times as many blocks takes no more, but for what numpy does by itself."""
    few, many = (
        calls(lambda n=number: run(1, 2, (range(n), range(n)), staged=staged))
        for number in (16, 256)
    )
    assert abs(many - few) < 16


def test_what_many_ranks_have_in_common_is_found_once(monkeypatch):
    """A request that is read from 128 ranks is matched, and counted, for one of them."""
    match, count = Mock(wraps=request_blocks.overlap), Mock(wraps=count_merged)
    monkeypatch.setattr(request_blocks, "overlap", match)
    monkeypatch.setattr(leg_module, "count_merged", count)
    area = StagingArea(torch.empty(64 << 20, dtype=torch.uint8), Counting(), StagingPolicy())
    legs = [prepared(1, 1, 4096, area) for _ in range(128)]
    transfers = Transfers(area)
    # Of a long read it matters how it merges; of a short one it does not.
    for num_blocks, num_counts in ((2048, 1), (16, 0)):
        match.reset_mock()
        count.reset_mock()
        blocks, num_tokens = [[*range(1, 1 + num_blocks)]], num_blocks * BLOCK_TOKENS
        source = RemoteEngineAddress("engine", "p.example", 5600)
        receive = Receive(source, "r", blocks, blocks, num_tokens, num_tokens)
        request = RequestBlocks(receive)
        parts = [part for leg in legs for part in cut(leg, request.select(leg.leg), transfers.area)]
        assert {part.window is None for part in parts} == {True} and len(parts) == len(legs)
        assert (match.call_count, count.call_count) == (1, num_counts)


def test_what_cannot_merge_is_not_compared(monkeypatch):
    """Heads of which the other end has more lie apart there, wherever their blocks are."""
    monkeypatch.setattr(leg_module, "count_merged", count := Mock())
    leg = prepared(1, 2, 4096, None).leg
    blocks = [span(range(1, 1025))]
    assert leg.num_merged(select(leg, blocks, blocks)) == 1024 * PLANES
    assert count.call_count == 0


@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
def test_handshake_does_not_grow_with_blocks(staged):
    """Lists for a hundred times as many blocks are as long, and take as much memory."""
    sizes, peaks = set(), []
    for num_blocks in (1_000, 100_000):
        src, dst = cache(1, num_blocks), cache(2, num_blocks)
        tracemalloc.start()
        (leg,) = lower_read(read(1), src, dst)
        ends = (stage_leg(leg, src).src,) if staged else (leg.src, leg.dst)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        sizes.update(end.rows.nbytes for end in ends)
    assert len(sizes) == 1
    assert peaks[1] < 1.2 * peaks[0] + 4096

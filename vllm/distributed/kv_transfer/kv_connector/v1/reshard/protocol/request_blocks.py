# SPDX-License-Identifier: Apache-2.0
"""Which of a request's blocks a leg moves, and whether the source holds what is needed of them.

Engines ask for each request, and `kv-plan` for one of a given length.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence, Set

import numpy as np
import numpy.typing as npt

from ..errors import RemoteLayoutError, quote
from ..memory.leg import Leg, LegEnd, Selection
from ..memory.overlap import BlockRun, Overlap, overlap
from ..plan.shards import TokenShare
from .messages import Receive


class RequestBlocks:
    """A request's blocks at both ends, and where their tokens overlap.

    Legs with the same block geometry share one computed overlap.

    Args:
        receive: The request.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._overlaps: dict[Hashable, Overlap | None] = {}

    def select(self, leg: Leg) -> list[Selection]:
        """Return the selections of a leg to read for the request.

        Raises:
            RemoteLayoutError: The blocks that the request names do not exist, or do not hold all
                the tokens needed.
        """
        if leg.per_sequence:
            self._check_state(leg)
        src, dst = leg.src, leg.dst
        geometry = (
            (src.num_blocks, src.block_tokens, src.blocks_per_id, leg.read.src_tokens),
            (dst.block_tokens, dst.blocks_per_id, leg.read.dst_tokens),
            leg.per_sequence,
        )
        selections: list[Selection] = []
        for groups, planes in leg.planes_by_groups:
            key = groups, geometry
            if key not in self._overlaps:
                self._overlaps[key] = self._overlap(leg, *groups)
            if (common := self._overlaps[key]) is not None:
                selections.append(Selection(common, planes))
        return selections

    def _overlap(self, leg: Leg, src_group: int, dst_group: int) -> Overlap | None:
        receive, (src, dst) = self._receive, (leg.src, leg.dst)
        if src_group >= len(receive.remote_block_ids):
            raise RemoteLayoutError(
                f"request {quote(receive.remote_request_id)} names blocks of "
                f"{len(receive.remote_block_ids)} KV-cache groups but "
                f"{quote(receive.source.engine_id)} "
                "has more: the router must pass remote_block_ids on unchanged"
            )
        remote_tokens, local_tokens = receive.remote_tokens, receive.local_tokens
        if leg.per_sequence:
            # A sequence's state is one block of `chunk_tokens` rows, however long the sequence is.
            remote_tokens = local_tokens = leg.chunk_tokens
        read = leg.read
        src_ids, dst_ids = receive.remote_block_ids[src_group], receive.local_block_ids[dst_group]
        src_span = _span(src_ids, remote_tokens, src, read.src_tokens)
        dst_span = _span(dst_ids, local_tokens, dst, read.dst_tokens)
        _check(receive, src_span, src, dst_span, dst, local_tokens)
        return overlap(src_span, dst_span, src.block_tokens, dst.block_tokens)

    def _check_state(self, leg: Leg) -> None:
        """Check that the source holds the state after exactly the tokens needed.

        Keys and values of more tokens include those of fewer; state does not.
        """
        receive = self._receive
        counts = {
            len(ids[group])
            for (src_group, dst_group), _ in leg.planes_by_groups
            for ids, group in (
                (receive.remote_block_ids, src_group),
                (receive.local_block_ids, dst_group),
            )
            if group < len(ids)
        }
        if receive.remote_tokens == receive.local_tokens and counts == {1}:
            return
        raise RemoteLayoutError(
            f"request {quote(receive.remote_request_id)} needs the state after "
            f"{receive.local_tokens} "
            f"tokens in one block, but {quote(receive.source.engine_id)} holds the state after "
            f"{receive.remote_tokens} (blocks at the two ends: "
            f"{', '.join(map(str, sorted(counts)))}): send the request to the engine that computed "
            "it, with the same prompt"
        )


def check_windows(leg: Leg, dst_window_groups: Set[int]) -> None:
    """Check that blocks with a sliding window at the source can fill such blocks here.

    Only sizes of scheduler blocks matter, not of kernel blocks: the scheduler frees a block once
    the window has left all of it.

    Args:
        leg: The leg.
        dst_window_groups: KV-cache groups here that keep only the last tokens of a sequence.

    Raises:
        RemoteLayoutError: They cannot.
    """
    src_tokens = leg.src.tokens_per_id * leg.read.src_tokens.num_shares
    dst_tokens = leg.dst.tokens_per_id * leg.read.dst_tokens.num_shares
    if src_tokens % dst_tokens == 0:
        return
    if any(dst_group in dst_window_groups for (_, dst_group), _ in leg.planes_by_groups):
        raise RemoteLayoutError(
            f"blocks of {src_tokens} tokens at the source that hold a sliding window "
            f"may not fill blocks of {dst_tokens} tokens here: use one --block-size on "
            "both engines, or a multiple of this one there"
        )


def _check(
    receive: Receive,
    span: BlockRun,
    end: LegEnd,
    dst: BlockRun,
    dst_end: LegEnd,
    local_tokens: int,
) -> None:
    """Check that a group's remote blocks exist and hold all tokens of the local blocks.

    Tokens before a window count, too: once a block is full, requests with other windows find it in
    the prefix cache.
    """
    ids = span.block_ids
    lowest, highest = (int(ids.min()), int(ids.max())) if len(ids) else (0, 0)
    if not (lowest >= 0 and highest < end.num_blocks):
        raise RemoteLayoutError(
            f"request {quote(receive.remote_request_id)} names block {highest} but "
            f"{quote(receive.source.engine_id)} has {end.num_blocks} blocks: the router must "
            "pass remote_block_ids on unchanged"
        )
    if span.start_token < 0 or dst.start_token < 0:
        raise RemoteLayoutError(
            f"request {quote(receive.remote_request_id)} has more blocks than its tokens fill, "
            f"{len(span.block_ids)} at {quote(receive.source.engine_id)} and {len(dst.block_ids)} "
            "here: turn off speculative decoding on both engines"
        )
    if not len(dst.block_ids):
        return
    # The null block stands in for blocks that were freed when a window moved on.
    num_gone = 0
    if lowest < end.blocks_per_id:
        null = np.flatnonzero(ids < end.blocks_per_id)
        num_gone = int(null[-1]) + 1 if len(null) else 0
    start, stop = span.stretch(end.block_tokens)
    start += num_gone * end.block_tokens * span.tokens.num_shares
    needed_from, _ = dst.stretch(dst_end.block_tokens)
    if start > needed_from or stop < local_tokens:
        raise RemoteLayoutError(
            f"request {quote(receive.remote_request_id)} needs tokens [{needed_from}, "
            f"{local_tokens}) but the blocks that {quote(receive.source.engine_id)} holds "
            f"are those of tokens [{start}, {stop}): send the request to the "
            "engine that computed it"
        )


def _span(block_ids: Sequence[int], num_tokens: int, end: LegEnd, share: TokenShare) -> BlockRun:
    """Return the span of a request's last blocks, the last of which holds its last token.

    Args:
        block_ids: The scheduler's block ids.
        num_tokens: Tokens of the request up to its last one in these blocks.
        end: The end of the leg that has these blocks.
        share: Share of the tokens held there. Ranks that share tokens have the same block ids.
    """
    num_ids = -(-num_tokens // (end.tokens_per_id * share.num_shares))
    return BlockRun(
        _expand(block_ids, end.blocks_per_id),
        (num_ids - len(block_ids)) * end.tokens_per_id,
        share,
    )


def _expand(block_ids: Sequence[int], blocks_per_id: int) -> npt.NDArray[np.int64]:
    """Replace each scheduler block id (below 2**31) with the ids of its kernel blocks."""
    ids = np.asarray(block_ids, dtype=np.int64)
    if blocks_per_id == 1:
        return ids
    blocks: npt.NDArray[np.int64] = ids[:, np.newaxis] * blocks_per_id + np.arange(blocks_per_id)
    return blocks.ravel()

# SPDX-License-Identifier: Apache-2.0
"""Lowering: from a planned read to the descriptors of a leg, once for each peer.

A descriptor of a leg (`leg`) is a *run* of heads and tokens: the largest that is contiguous at both
ends. Each list has one strided row for each run of a block, so preparing it costs the same for any
number of blocks. The run depends on how the two ends differ (`T` tokens in a block, `n` heads to
read):

    both ends                            run                    rows of a plane
    HND, same T                          n heads x T tokens     1
    HND, T and T'                        1 head x gcd(T, T')    n * T / gcd
    NHD, all heads                       n heads x gcd(T, T')   T / gcd
    NHD, some heads                      n heads x 1 token      T
    HND and NHD                          1 head x 1 token       n * T

If a slot stands for several tokens, a run has at least that many, and `T` counts slots. If keys and
values lie side by side at one end and in separate planes at the other, they count as two planes at
both. Slots of the first end then do not adjoin, so a run is one slot.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ..errors import LocalLayoutError, RemoteLayoutError
from ..plan.reshard import Read
from ..plan.shards import Layer
from .cache import Plane, RankCache
from .leg import MAX_DESCRIPTORS, Leg, LegEnd, PlanePair, Run
from .overlap import tokens_of_chunk

_MAX_ROWS = 1 << 20
"""Most rows of one list: more than the runs of any model's block, and few enough to build."""


def lower_read(read: Read, src: RankCache, dst: RankCache) -> tuple[Leg, ...]:
    """Lower a planned read to legs: one for each shape that its planes have.

    Args:
        read: The read.
        src: Cache of `read.src_rank`.
        dst: Cache of `read.dst_rank`.

    Raises:
        RemoteLayoutError: The planes or slots of the two caches do not match.
        LocalLayoutError: A list would have more descriptors than NIXL's indices can count.
    """
    pairs_by_shape: dict[tuple[Run, tuple[int, int], Plane, Plane], list[PlanePair]] = defaultdict(
        list
    )
    for layer in read.layers:
        for pair in _paired_planes(layer, src, dst):
            run = _common_run(read, layer, pair)
            src_shape, dst_shape = (replace(each, address=0) for each in (pair.src, pair.dst))
            pairs_by_shape[run, pair.blocks_per_id, src_shape, dst_shape].append(pair)
    return tuple(_leg(read, run, pairs, src, dst) for (run, *_), pairs in pairs_by_shape.items())


def _leg(read: Read, run: Run, pairs: Sequence[PlanePair], src: RankCache, dst: RankCache) -> Leg:
    """Build the leg of planes that have one shape."""
    planes: dict[tuple[int, int], list[int]] = defaultdict(list)
    src_blocks_per_id, dst_blocks_per_id = pairs[0].blocks_per_id
    # Equal at both ends.
    heads_per_unit = pairs[0].dst.heads_per_unit
    slice_ = read.num_units * heads_per_unit, run
    for position, pair in enumerate(pairs):
        planes[pair.groups].append(position)
    src_end = write_end(
        [pair.src for pair in pairs],
        src,
        src_blocks_per_id,
        read.src_unit_offset * heads_per_unit,
        *slice_,
    )
    dst_end = write_end(
        [pair.dst for pair in pairs],
        dst,
        dst_blocks_per_id,
        read.dst_unit_offset * heads_per_unit,
        *slice_,
    )
    return Leg(
        read,
        tuple(pairs),
        run,
        src_end,
        dst_end,
        tuple(
            (groups, np.asarray(positions, dtype=np.int64))
            for groups, positions in sorted(planes.items())
        ),
        (run, src_end.shape, dst_end.shape),
    )


def _paired_planes(layer: Layer, src: RankCache, dst: RankCache) -> Iterator[PlanePair]:
    """Match a layer's planes by position, splitting keys and values if one end has them apart."""
    src_layer, dst_layer = src.layers[layer], dst.layers[layer]
    groups = src_layer.group, dst_layer.group
    blocks_per_id = src_layer.blocks_per_id, dst_layer.blocks_per_id
    src_planes, dst_planes = src_layer.planes, dst_layer.planes
    if dst_layer.keys_lead:
        src_planes, dst_planes = _apart(src_planes, dst_planes), _apart(dst_planes, src_planes)
    if len(src_planes) != len(dst_planes):
        raise RemoteLayoutError(
            f"layer {layer} has {len(src_planes)} planes at the source but {len(dst_planes)} here: "
            "run both engines with the same attention backend"
        )
    for src_plane, dst_plane in zip(src_planes, dst_planes, strict=True):
        if _page_kind(src_plane) != _page_kind(dst_plane):
            options = "attention backend and --block-size"
            if dst_plane.per_sequence:
                options = "model and --speculative-config"
            raise RemoteLayoutError(
                f"layer {layer} has blocks of {_page_text(src_plane)} at the source but of "
                f"{_page_text(dst_plane)} here: run both engines with the same {options}"
            )
        if src_plane.slot_bytes != dst_plane.slot_bytes:
            raise RemoteLayoutError(
                f"a slot of layer {layer} takes {src_plane.slot_bytes} bytes at the source but "
                f"{dst_plane.slot_bytes} here: run both engines with the same model, dtype and "
                "--kv-cache-dtype"
            )
        yield PlanePair(layer, src_plane, dst_plane, groups, blocks_per_id)


def _apart(planes: tuple[Plane, ...], others: tuple[Plane, ...]) -> tuple[Plane, ...]:
    """Split a plane of keys and values into two if the other end has two.

    Args:
        planes: A layer's planes at one end; their slots begin with a key.
        others: The layer's planes at the other end.
    """
    if len(planes) != 1 or len(others) != 2:
        return planes
    (plane,), (key_bytes, value_bytes) = planes, (other.slot_bytes for other in others)
    if plane.slot_bytes != key_bytes + value_bytes:
        return planes
    return (
        replace(plane, slot_bytes=key_bytes),
        replace(plane, address=plane.address + key_bytes, slot_bytes=value_bytes),
    )


def _page_kind(plane: Plane) -> tuple[object, ...]:
    """Return the properties of a plane that must be equal at both ends."""
    return (
        plane.slot_tokens,
        plane.per_sequence,
        plane.heads_per_unit,
        plane.per_sequence and plane.block_tokens,
    )


def _page_text(plane: Plane) -> str:
    if plane.per_sequence:
        return f"{plane.block_tokens} rows of state, {plane.heads_per_unit} channels to a unit"
    text = f"{plane.block_tokens} tokens"
    if plane.slot_tokens > 1:
        text += f", {plane.slot_tokens} to a slot"
    return text if plane.heads_per_unit == 1 else f"{text}, {plane.heads_per_unit} slots to a unit"


def _common_run(read: Read, layer: Layer, pair: PlanePair) -> Run:
    """Return the largest run that is contiguous at both ends in the same order."""
    num_heads, slot_tokens = read.num_units * pair.dst.heads_per_unit, pair.dst.slot_tokens
    num_tokens = tokens_of_chunk(
        read.src_tokens, read.dst_tokens, pair.src.block_tokens, pair.dst.block_tokens
    )
    if num_tokens % slot_tokens:
        raise RemoteLayoutError(
            f"{slot_tokens} tokens of layer {layer} are in one piece, but ranks share tokens out "
            f"in pieces of {num_tokens} (tokens {read.src_tokens} at the source, "
            f"{read.dst_tokens} here): give both engines one --block-size and "
            "--cp-kv-cache-interleave-size, both of the same number"
        )
    candidates = [
        Run(heads, tokens) for heads in (num_heads, 1) for tokens in (num_tokens, slot_tokens)
    ]
    candidates.sort(key=lambda run: run.num_heads * run.num_tokens, reverse=True)
    # There is always one: a single slot.
    return next(
        run
        for run in candidates
        if pair.src.orders(run.num_heads, run.num_tokens)
        & pair.dst.orders(run.num_heads, run.num_tokens)
    )


def write_end(
    planes: Sequence[Plane],
    cache: RankCache,
    blocks_per_id: int,
    head_offset: int,
    num_heads: int,
    run: Run,
) -> LegEnd:
    """Write the strided rows of one end.

    Args:
        planes: The planes, all of one shape.
        cache: The rank's cache that has these planes.
        blocks_per_id: Number of their blocks that one block id stands for.
        head_offset: Position of the first head within the planes.
        num_heads: Number of heads.
        run: Heads and tokens that one descriptor moves; must be contiguous.

    Raises:
        LocalLayoutError: There would be more descriptors than NIXL's indices can count.
    """
    block_tokens = planes[0].block_tokens
    num_blocks = cache.num_block_ids * blocks_per_id
    num_rows = len(planes) * (num_heads // run.num_heads) * (block_tokens // run.num_tokens)
    if num_rows > _MAX_ROWS or num_rows * num_blocks > MAX_DESCRIPTORS:
        remedy = "use a larger --block-size, the same on both engines, or fewer blocks"
        if planes[0].per_sequence:
            remedy = "set VLLM_SSM_CONV_STATE_LAYOUT to the same on both engines"
        raise LocalLayoutError(
            f"{num_rows} runs in each of {num_blocks} blocks are more descriptors than one "
            f"transfer list can hold, {_MAX_ROWS} runs and {MAX_DESCRIPTORS} in all: {remedy}"
        )
    rows = [
        (
            plane.address + plane.offset_bytes(head, token),
            run.num_heads * (run.num_tokens // plane.slot_tokens) * plane.slot_bytes,
            cache.device_id,
            plane.block_stride_bytes,
            num_blocks,
        )
        for plane in planes
        for head in range(head_offset, head_offset + num_heads, run.num_heads)
        for token in range(0, block_tokens, run.num_tokens)
    ]
    return LegEnd(
        np.array(rows, dtype=np.uint64),
        num_blocks,
        block_tokens,
        block_tokens // run.num_tokens,
        blocks_per_id,
    )

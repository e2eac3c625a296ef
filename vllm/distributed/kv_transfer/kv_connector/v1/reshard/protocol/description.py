# SPDX-License-Identifier: Apache-2.0
"""A worker's description of itself for its readers, and its form on the wire.

A peer's description is bounded and checked before it is used, and decoding raises nothing but
`RemoteHandshakeError`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from ..errors import LocalLayoutError, RemoteHandshakeError, ReshardError, one_line, quote
from ..memory.cache import LayerCache, Plane, RankCache
from ..plan.shards import Holding, Layer, MeshRank, Shard, TokenShare, UnitInterval
from .bounds import MAX_AGENT_METADATA_BYTES, MAX_STAGE_RANKS
from .compatibility import SPOKEN
from .leases import LeaseTableAddress
from .packing import NOTHING_PACKED, PackAddress

# Bounds of a peer's values, all far above any that exist. With `_MAX_PLANE_BYTES` they keep every
# address computed from a description within 64 bits.
_Rank: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 16)]
_Address: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Stride: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 40)]
_SlotBytes: TypeAlias = Annotated[int, Meta(ge=1, lt=1 << 32)]
_Head: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 17)]
_HeadsPerUnit: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 14)]
_Units: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 16)]
_Tokens: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 14)]
_Blocks: TypeAlias = Annotated[int, Meta(ge=1, lt=1 << 31)]
_BlocksPerId: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 10)]
_LeaseBuckets: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 24)]
_Group: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 12)]
_LayerIndex: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 20)]
_LayerName: TypeAlias = Annotated[str, Meta(max_length=1 << 10, pattern=r"\A[ -~]+\Z")]
_Meaning: TypeAlias = Annotated[
    dict[Annotated[str, Meta(max_length=1 << 6)], Annotated[str, Meta(max_length=1 << 11)]],
    Meta(max_length=1 << 4),
]
_Meanings: TypeAlias = Annotated[list[_Meaning], Meta(min_length=1, max_length=1 << 8)]
_EngineId: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1 << 10)]
_AgentMetadata: TypeAlias = Annotated[bytes, Meta(max_length=MAX_AGENT_METADATA_BYTES)]

_MAX_LAYERS = 1 << 12

_PACKS_SINCE = 7
"""Version in which workers tell where they pack windows."""

_MAX_PLANE_BYTES = 1 << 62
"""Exclusive upper bound of a plane's size: its block stride times its number of blocks."""

_Struct = TypeVar("_Struct")


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """One worker's description of itself.

    Attributes:
        engine_id: Id of its engine; a new one after a restart.
        shard: Its place in the mesh, and the layers and heads that it holds.
        cache: Where the bytes of the same layers are in memory.
        lease_table: Address of the table of requests that it holds.
        agent_metadata: NIXL's metadata, which is needed to connect to it.
        packing: Where it packs windows for its readers.
    """

    engine_id: str
    shard: Shard
    cache: RankCache
    lease_table: LeaseTableAddress
    agent_metadata: bytes
    packing: PackAddress = NOTHING_PACKED


class _WirePlane(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`Plane`, field by field in the same order."""

    address: _Address
    block_stride_bytes: _Stride
    head_stride_bytes: _Stride
    slot_stride_bytes: _Stride
    slot_bytes: _SlotBytes
    num_heads: _Head
    block_tokens: _Tokens
    slot_tokens: _Tokens
    heads_per_unit: _HeadsPerUnit
    per_sequence: bool


class _WireLayer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One layer of a shard and of its cache: `Holding` and `LayerCache`.

    `meaning` is an index into the worker's `meanings`, of which most layers share one.
    """

    layer: _LayerIndex | _LayerName
    start: _Units
    stop: _Units
    num_units: _Units
    may_repeat: bool
    group: _Group
    blocks_per_id: _BlocksPerId
    meaning: _Rank
    planes: Annotated[list[_WirePlane], Meta(min_length=1, max_length=4)]


class _WireShare(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`TokenShare`."""

    index: _Rank
    num_shares: Annotated[int, Meta(ge=1, le=MAX_STAGE_RANKS)]
    run_tokens: _Tokens


class _WireWorker(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`WorkerDescription`, with each layer's share of tokens; none if all layers hold all tokens.

    A field is left out if it and all fields after it have their defaults. Then a build without
    shares can read the description; it refuses others. The field after the shares is older builds',
    and means nothing any more; those after it are new in version 7.
    """

    engine_id: _EngineId
    pp_rank: _Rank
    tp_rank: _Rank
    num_block_ids: _Blocks
    device_id: _Rank
    lease_address: _Address
    num_lease_buckets: _LeaseBuckets
    agent_metadata: _AgentMetadata
    meanings: _Meanings
    layers: Annotated[list[_WireLayer], Meta(min_length=1, max_length=_MAX_LAYERS)]
    shares: list[_WireShare] = []
    unused_address: _Address = 0
    pack_table: _Address = 0
    pack_arena: _Address = 0
    pack_arena_bytes: Annotated[int, Meta(ge=0, lt=1 << 40)] = 0


_ENCODER = msgspec.msgpack.Encoder()
_WORKER_DECODER = msgspec.msgpack.Decoder(_WireWorker)


def encode_worker(description: WorkerDescription, version: int = SPOKEN.newest) -> bytes:
    """Write a worker's description for the wire, in one version of the protocol.

    Raises:
        LocalLayoutError: A peer would refuse it.
    """
    shard, cache = description.shard, description.cache
    meanings: list[dict[str, str]] = []
    for each in cache.layers.values():
        if each.meaning not in meanings:
            meanings.append(dict(each.meaning))
    # A list: msgspec would write all fields of a struct, including defaults.
    said: list[object] = [
        description.engine_id,
        shard.rank.pp_rank,
        shard.rank.tp_rank,
        cache.num_block_ids,
        cache.device_id,
        description.lease_table.address,
        description.lease_table.num_buckets,
        description.agent_metadata,
        meanings,
        [
            _wire_layer(layer, holding, cache.layers[layer], meanings)
            for layer, holding in shard.holdings.items()
        ],
    ]
    shares = [holding.tokens for holding in shard.holdings.values()]
    holds_all = all(share.is_all for share in shares)
    packing = description.packing if version >= _PACKS_SINCE else NOTHING_PACKED
    if not holds_all or packing.arena_bytes:
        said.append([] if holds_all else [dataclasses.astuple(share) for share in shares])
    if packing.arena_bytes:
        said += [0, *dataclasses.astuple(packing)]
    data = _ENCODER.encode(said)
    # The same rules for both directions: we write nothing that we would not accept.
    _read_worker(data, LocalLayoutError, "this worker's description")
    return data


def decode_worker(data: bytes, max_layers: int = _MAX_LAYERS) -> WorkerDescription:
    """Read a worker's description from the wire.

    Args:
        data: The description.
        max_layers: Maximum number of layers.

    Raises:
        RemoteHandshakeError: It is malformed, out of bounds, or contradicts itself.
    """
    return _read_worker(data, RemoteHandshakeError, "a worker's description", max_layers)


def _wire_layer(
    layer: Layer, holding: Holding, cache: LayerCache, meanings: list[dict[str, str]]
) -> _WireLayer:
    return _WireLayer(
        layer,
        holding.units.start,
        holding.units.stop,
        holding.num_units,
        holding.may_repeat,
        cache.group,
        cache.blocks_per_id,
        meanings.index(dict(cache.meaning)),
        [_WirePlane(*dataclasses.astuple(plane)) for plane in cache.planes],
    )


def _read_worker(
    data: bytes, error: type[ReshardError], what: str, max_layers: int = _MAX_LAYERS
) -> WorkerDescription:
    """Decode a description, and check what types cannot express."""
    wire = decode(_WORKER_DECODER, data, error, what)
    rank = MeshRank(wire.pp_rank, wire.tp_rank)
    if len(wire.layers) > max_layers:
        raise error(
            f"rank {rank} describes {len(wire.layers)} layers, but at most {max_layers} are read, "
            "twice as many as this engine has: run the same model on both engines"
        )
    if wire.shares and len(wire.shares) != len(wire.layers):
        raise error(
            f"rank {rank} says which tokens it holds of {len(wire.shares)} layers, but describes "
            f"{len(wire.layers)}: run the same build on both engines"
        )
    holdings: dict[Layer, Holding] = {}
    layers: dict[Layer, LayerCache] = {}
    shares = wire.shares or [_WireShare(0, 1, 1)] * len(wire.layers)
    for layer, wire_share in zip(wire.layers, shares, strict=True):
        if layer.layer in layers:
            name = quote(str(layer.layer))
            raise error(f"rank {rank} describes layer {name} twice: describe every layer once")
        try:
            share = TokenShare(*msgspec.structs.astuple(wire_share))
            interval = UnitInterval(layer.start, layer.stop)
            holding = Holding(interval, layer.num_units, layer.may_repeat, share)
        except ValueError as fault:
            raise error(
                f"rank {rank} cannot hold what it says of layer {quote(str(layer.layer))} "
                f"({one_line(fault)}): run the same build on both engines"
            ) from fault
        num_held = len(interval)
        if layer.meaning >= len(wire.meanings):
            raise error(
                f"rank {rank} says that layer {quote(str(layer.layer))} means what is not among "
                f"the {len(wire.meanings)} meanings that it names: run the same build on both "
                "engines"
            )
        num_blocks = wire.num_block_ids * layer.blocks_per_id
        for plane in layer.planes:
            if plane.block_stride_bytes * num_blocks >= _MAX_PLANE_BYTES:
                raise error(
                    f"rank {rank} keeps {num_blocks} blocks of layer {quote(str(layer.layer))} "
                    f"{plane.block_stride_bytes} bytes apart, which no memory holds: run the same "
                    "build on both engines"
                )
            if not share.is_all and (plane.per_sequence or plane.block_tokens % share.run_tokens):
                kept = "state" if plane.per_sequence else f"blocks of {plane.block_tokens} tokens"
                raise error(
                    f"rank {rank} holds tokens of layer {quote(str(layer.layer))} in runs of "
                    f"{share.run_tokens}, which do not fit its {kept}: set "
                    "--cp-kv-cache-interleave-size to a divisor of the attention kernel's blocks"
                )
            if plane.block_tokens % plane.slot_tokens:
                raise error(
                    f"rank {rank} keeps {plane.slot_tokens} tokens in a slot of layer "
                    f"{quote(str(layer.layer))}, which do not divide the {plane.block_tokens} of a "
                    "block: run the same build on both engines"
                )
            if plane.num_heads != num_held * plane.heads_per_unit:
                units = f" of {plane.heads_per_unit} channels" if plane.heads_per_unit > 1 else ""
                raise error(
                    f"rank {rank} holds {num_held} heads{units} of layer "
                    f"{quote(str(layer.layer))}, but its cache has {plane.num_heads}: run the same "
                    "build on both engines"
                )
        holdings[layer.layer] = holding
        layers[layer.layer] = LayerCache(
            tuple(Plane(*msgspec.structs.astuple(plane)) for plane in layer.planes),
            layer.group,
            layer.blocks_per_id,
            wire.meanings[layer.meaning],
        )
    return WorkerDescription(
        wire.engine_id,
        Shard(rank, holdings),
        RankCache(wire.num_block_ids, wire.device_id, layers),
        LeaseTableAddress(wire.lease_address, wire.num_lease_buckets),
        wire.agent_metadata,
        PackAddress(wire.pack_table, wire.pack_arena, wire.pack_arena_bytes),
    )


def decode(
    decoder: msgspec.msgpack.Decoder[_Struct], data: bytes, error: type[ReshardError], what: str
) -> _Struct:
    """Decode untrusted data."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
        # The last two escape from msgspec for strings that are not UTF-8 and for deep nesting.
        raise error(
            f"{one_line(what)} of {len(data)} bytes is not understood ({one_line(fault)}): run "
            "the same build of the connector on both engines"
        ) from fault

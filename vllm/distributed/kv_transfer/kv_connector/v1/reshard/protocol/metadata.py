# SPDX-License-Identifier: Apache-2.0
"""What engines say of themselves when they shake hands, and how it is written for the wire.

    worker     WorkerDescription --encode_worker--> bytes, in a WorkerHandshake
    scheduler  WorkerHandshakes of all workers --encode_reply--> one reply, served to any peer
    peer       reply --decode_reply--> WorkerDescriptions

A reply is frames: a greeting, and one for each worker. It is read in phases, each with types of its
own, so that a later phase may change from version to version without making an earlier one
unreadable: who answers (connector and version), then what must be equal (factors), both in the
greeting, then the workers' descriptions, one by one. What a peer writes is bounded and checked
before it is used, and nothing but a `RemoteHandshakeError` comes out of decoding. `bounds` says
what a reply may cost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from ..errors import (
    MEET_UPSTREAMS,
    LocalLayoutError,
    RemoteHandshakeError,
    RemoteIncompatibleError,
    RemoteRefusedError,
    ReshardError,
)
from ..memory.cache import LayerCache, Plane, RankCache
from ..plan.mesh import MeshRank
from ..plan.shards import ALL_TOKENS, Holding, Layer, Shard, TokenShare, UnitInterval
from .bounds import (
    MAX_AGENT_METADATA_BYTES,
    MAX_GREETING_BYTES,
    MAX_RANKS,
    MAX_REPLY_BYTES,
    MAX_STAGE_RANKS,
    ReplyBounds,
)
from .compatibility import RELEASE_FACTOR, check_compatibility, known_factors, remedy
from .leases import LeaseTableAddress
from .quoting import one_line, quote
from .versions import CONNECTOR_NAME, SPOKEN

OUR_VERB = str(SPOKEN).encode()
"""What a request to a side channel begins with: the versions that it may be answered in."""

OUR_REQUEST = (
    OUR_VERB
    + f" reads from this engine, which runs upstream's NixlConnector: {MEET_UPSTREAMS}".encode()
)
"""What a request begins with in full. Upstream's listener logs what it does not know, whatever it
is; the words behind the verb are for whoever reads that log."""

# Bounds of what a peer may say. All are far above what exists, and together they keep every address
# that is computed from a description within 64 bits.
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
_Words: TypeAlias = Annotated[str, Meta(max_length=1 << 16)]

_MAX_LAYERS = 1 << 12

_Struct = TypeVar("_Struct")


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """What one worker says of itself.

    Attributes:
        engine_id: The engine that it belongs to; another one after a restart.
        shard: Its place, and the layers and heads that it holds.
        cache: Where their bytes lie; the same layers.
        lease_table: Where it says which requests it holds.
        agent_metadata: What NIXL needs to connect to it.
    """

    engine_id: str
    shard: Shard
    cache: RankCache
    lease_table: LeaseTableAddress
    agent_metadata: bytes


@dataclass(frozen=True)
class WorkerHandshake:
    """What a worker hands to its engine's scheduler, in another process, for any peer.

    Attributes:
        factors: What must be equal at both engines, by name.
        body: The worker's description, encoded.
    """

    factors: dict[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Reply:
    """What an engine has answered.

    Attributes:
        version: Of the protocol, which both engines speak.
        release: Of vLLM, which the engine runs; None where it does not say.
        workers: What each worker says, in the order of ranks; at least one.
    """

    version: int
    release: str | None
    workers: tuple[WorkerDescription, ...]


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

    What its bytes mean is one of the worker's `meanings`: layers differ little in that.
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


class _WireWorker(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`WorkerDescription`."""

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


class _WireShare(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`TokenShare`."""

    index: _Rank
    num_shares: Annotated[int, Meta(ge=1, le=MAX_STAGE_RANKS)]
    run_tokens: _Tokens


class _WireSharingWorker(_WireWorker, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The same, with the tokens that it holds of each layer; none where it holds all of all.

    Then it is left out, and a build reads what is said that knows of no shares. It refuses others.
    """

    shares: list[_WireShare] = []


class _Greeting(msgspec.Struct, frozen=True):
    """The first phase: who answers. All versions of this connector write these fields.

    Attributes:
        connector: Name of the connector.
        version: Its version.
        refusal: Why there is no more than this.
        compatibility_hash: What upstream's NixlConnector begins its own handshake with.
    """

    connector: _Words = ""
    version: int = 0
    refusal: _Words = ""
    compatibility_hash: _Words | None = None


class _Terms(msgspec.Struct, frozen=True):
    """The second phase, which this connector can read in the versions that it speaks."""

    connector: str
    version: int
    factors: Annotated[dict[_Words, _Words], Meta(max_length=1 << 8)]


class _UpstreamReply(msgspec.Struct, frozen=True):
    """What upstream's NixlConnector takes for an answer."""

    compatibility_hash: str
    agent_metadata_bytes: bytes


_ENCODER = msgspec.msgpack.Encoder()
_WORKER_DECODER = msgspec.msgpack.Decoder(_WireSharingWorker)
_GREETING_DECODER = msgspec.msgpack.Decoder(_Greeting)
_TERMS_DECODER = msgspec.msgpack.Decoder(_Terms)


def encode_worker(description: WorkerDescription) -> bytes:
    """Write a worker's description for the wire.

    Raises:
        LocalLayoutError: Its shard and its cache do not agree, or a peer would refuse it.
    """
    shard, cache = description.shard, description.cache
    if shard.holdings.keys() != cache.layers.keys():
        differing = shard.holdings.keys() ^ cache.layers.keys()
        raise LocalLayoutError(
            f"rank {shard.rank} does not hold the same layers as its cache; they differ in "
            f"{', '.join(sorted(map(str, differing)))}: register the KV cache of every layer"
        )
    meanings: list[dict[str, str]] = []
    for each in cache.layers.values():
        if each.meaning not in meanings:
            meanings.append(dict(each.meaning))
    said = (
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
    )
    shares = [holding.tokens for holding in shard.holdings.values()]
    if all(share.is_all for share in shares):
        data = _ENCODER.encode(_WireWorker(*said))
    else:
        wire_shares = [_WireShare(*dataclasses.astuple(share)) for share in shares]
        data = _ENCODER.encode(_WireSharingWorker(*said, wire_shares))
    # One set of rules for both directions: what we say, we would accept.
    _read_worker(data, LocalLayoutError, "this worker's description")
    return data


def decode_worker(data: bytes, max_layers: int = _MAX_LAYERS) -> WorkerDescription:
    """Read a worker's description from the wire.

    Args:
        data: The description.
        max_layers: Layers that it may have.

    Raises:
        RemoteHandshakeError: It is malformed, out of bounds, or contradicts itself.
    """
    return _read_worker(data, RemoteHandshakeError, "a worker's description", max_layers)


def encode_replies(
    handshakes: Mapping[tuple[int, int], WorkerHandshake],
) -> dict[int, list[bytes]]:
    """Write the reply of an engine to any peer: in each version that it speaks, as `encode_reply`.

    Args:
        handshakes: What each worker says, by pipeline and tensor-parallel rank.
    """
    versions = range(SPOKEN.oldest, SPOKEN.newest + 1)
    return {version: encode_reply(handshakes, version) for version in versions}


def encode_reply(
    handshakes: Mapping[tuple[int, int], WorkerHandshake], version: int = SPOKEN.newest
) -> list[bytes]:
    """Write the reply of an engine in one version.

    Args:
        handshakes: What each worker says, by pipeline and tensor-parallel rank.
        version: The version.

    Returns:
        Its frames.

    Raises:
        LocalLayoutError: There are no workers, or they disagree about their engine, their ranks or
            a factor, or the reply is too large.
    """
    if not handshakes:
        raise LocalLayoutError(
            "no worker has handshake metadata: register KV caches before the handshake is served"
        )
    ordered = [(MeshRank(*rank), handshakes[rank]) for rank in sorted(handshakes)]
    first_rank, first = ordered[0]
    engine_id = decode_worker(first.body).engine_id
    for rank, handshake in ordered:
        for name in sorted(first.factors.keys() | handshake.factors.keys()):
            one, other = first.factors.get(name), handshake.factors.get(name)
            if one != other:
                raise LocalLayoutError(
                    f"{quote(name)} is {quote(one)} on rank {quote(str(first_rank))} but "
                    f"{quote(other)} on rank "
                    f"{quote(str(rank))}: start all workers of an engine alike "
                    f"({one_line(remedy(name))})"
                )
        said = decode_worker(handshake.body)
        if said.shard.rank != rank or said.engine_id != engine_id:
            raise LocalLayoutError(
                f"the worker of rank {quote(str(rank))} of engine {quote(engine_id)} says that it "
                "is rank "
                f"{said.shard.rank} of engine {quote(said.engine_id)}: start all workers of an "
                "engine with one configuration"
            )
    factors = known_factors(first.factors, version)
    greeting = _ENCODER.encode(_Terms(CONNECTOR_NAME, version, factors))
    if len(greeting) > MAX_GREETING_BYTES:
        raise LocalLayoutError(
            f"what must be equal at both engines takes {len(greeting)} bytes but peers accept "
            f"{MAX_GREETING_BYTES}: give shorter --hf-overrides"
        )
    frames = [greeting, *(handshake.body for _, handshake in ordered)]
    num_bytes = sum(map(len, frames))
    if num_bytes > MAX_REPLY_BYTES or len(ordered) > MAX_RANKS:
        raise LocalLayoutError(
            f"the handshake of {len(ordered)} workers takes {num_bytes} bytes but peers accept "
            f"{MAX_REPLY_BYTES} of {MAX_RANKS} workers: use fewer workers in one engine"
        )
    return frames


def encode_refusal(reason: str) -> bytes:
    """Write an answer that says no, for a peer that runs any version of this connector."""
    return _ENCODER.encode(_Greeting(CONNECTOR_NAME, SPOKEN.newest, reason))


def encode_refusal_for_upstream() -> bytes:
    """Write an answer that upstream's NixlConnector reads, and refuses with our reason.

    What stands in place of its hash can equal none, and its error message quotes it. Where its
    check is turned off, it fails on the empty metadata instead.
    """
    return _ENCODER.encode(
        _UpstreamReply(
            f"{SPOKEN}: this engine does not run upstream's "
            f"NixlConnector, and the one that asks does: {MEET_UPSTREAMS}",
            b"",
        )
    )


def decode_reply(
    frames: Sequence[bytes],
    local_factors: Mapping[str, str] | None,
    bounds: ReplyBounds | None = None,
) -> Reply:
    """Read the reply of an engine.

    Args:
        frames: The reply, at least one.
        local_factors: What must be equal at both engines, as it is here; None to take any.
        bounds: What it may hold, where it may come from anybody; None to take whatever an engine of
            any model could say.

    Raises:
        RemoteIncompatibleError: The peer runs another connector or version, or factors differ.
        RemoteRefusedError: The peer declined.
        RemoteHandshakeError: The reply is malformed, out of bounds, or contradicts itself.
    """
    greeting, *bodies = frames
    if len(greeting) > MAX_GREETING_BYTES:
        raise RemoteHandshakeError(
            f"the answer begins with {len(greeting)} bytes, which are more than "
            f"{MAX_GREETING_BYTES}: check that the port is an engine's VLLM_NIXL_SIDE_CHANNEL_PORT"
        )
    _check_greeting(_decode(_GREETING_DECODER, greeting, RemoteHandshakeError, "the answer"))
    terms = _decode(_TERMS_DECODER, greeting, RemoteHandshakeError, "the answer")
    if local_factors is not None:
        check_compatibility(known_factors(local_factors, terms.version), terms.factors)
    if not 0 < len(bodies) <= MAX_RANKS:
        raise RemoteHandshakeError(
            f"the answer describes {len(bodies)} ranks, but an engine has 1 to {MAX_RANKS}: run "
            "the same build of the connector on both engines"
        )
    workers = (
        sorted(map(decode_worker, bodies), key=lambda worker: worker.shard.rank)
        if bounds is None
        else _decode_within(bounds, bodies)
    )
    ranks = [worker.shard.rank for worker in workers]
    for rank, following in pairwise(ranks):
        if rank == following:
            raise RemoteHandshakeError(
                f"the answer describes rank {rank} twice: run the same build on both engines"
            )
    engine_ids = sorted({worker.engine_id for worker in workers})
    if len(engine_ids) > 1:
        named = " and ".join(engine_ids[:2])
        raise RemoteHandshakeError(
            f"the answer describes workers of several engines, {quote(named)}: "
            "give every engine a side channel of its own"
        )
    return Reply(terms.version, terms.factors.get(RELEASE_FACTOR), tuple(workers))


def _decode_within(bounds: ReplyBounds, bodies: Sequence[bytes]) -> list[WorkerDescription]:
    """Decode workers, each only after those before it were found within bounds."""
    bounds.check_sizes(map(len, bodies))
    # The last one says how large the mesh is.
    last = decode_worker(bodies[-1], bounds.max_layers)
    left = bounds.begin(last.shard.rank, len(bodies))
    workers = []
    for body in bodies:
        worker = decode_worker(body, bounds.max_layers)
        left.check(worker.shard)
        workers.append(worker)
    return workers


def _check_greeting(greeting: _Greeting) -> None:
    """Refuse an answer of another connector, in a version that is not ours, or that says no."""
    if greeting.connector != CONNECTOR_NAME:
        if greeting.compatibility_hash is not None:
            raise RemoteIncompatibleError(
                "the peer runs upstream's NixlConnector, but this engine runs "
                f"{SPOKEN}: {MEET_UPSTREAMS}"
            )
        raise RemoteIncompatibleError(
            f"the peer runs connector {quote(greeting.connector)}, but this engine runs "
            f"{SPOKEN}: configure the same connector on both engines"
        )
    if greeting.version not in SPOKEN:
        raise RemoteIncompatibleError(
            f"the peer speaks {CONNECTOR_NAME}/{greeting.version}, but this engine speaks "
            f"{SPOKEN}: install builds that have a version of it in common"
        )
    if greeting.refusal:
        raise RemoteRefusedError(f"the peer refuses: {quote(greeting.refusal)}")


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
    """Decode a description and check what types cannot say."""
    wire = _decode(_WORKER_DECODER, data, error, what)
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
    for number, layer in enumerate(wire.layers):
        share = ALL_TOKENS
        if wire.shares:
            share = _read_share(rank, layer, wire.shares[number], error)
        if layer.layer in layers:
            name = quote(str(layer.layer))
            raise error(f"rank {rank} describes layer {name} twice: describe every layer once")
        num_held = layer.stop - layer.start
        if not 0 < num_held <= layer.num_units - layer.start or (layer.may_repeat and num_held > 1):
            raise error(
                f"rank {rank} holds heads [{layer.start}, {layer.stop}) of {layer.num_units} of "
                f"layer {quote(str(layer.layer))}, which it cannot: run the same build on both "
                "engines"
            )
        if layer.meaning >= len(wire.meanings):
            raise error(
                f"rank {rank} says that layer {quote(str(layer.layer))} means what is not among "
                f"the {len(wire.meanings)} meanings that it names: run the same build on both "
                "engines"
            )
        for plane in layer.planes:
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
        holdings[layer.layer] = Holding(
            UnitInterval(layer.start, layer.stop), layer.num_units, layer.may_repeat, share
        )
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
    )


def _read_share(
    rank: MeshRank, layer: _WireLayer, wire: _WireShare, error: type[ReshardError]
) -> TokenShare:
    """Check the share of a layer's tokens that a rank says it holds."""
    name = quote(str(layer.layer))
    if wire.index >= wire.num_shares:
        raise error(
            f"rank {rank} holds share {wire.index} of {wire.num_shares} of the tokens of layer "
            f"{name}, which is none: run the same build on both engines"
        )
    share = TokenShare(wire.index, wire.num_shares, wire.run_tokens)
    if share.is_all:
        return share
    for plane in layer.planes:
        if plane.per_sequence or plane.block_tokens % share.run_tokens:
            kept = "state" if plane.per_sequence else f"blocks of {plane.block_tokens} tokens"
            raise error(
                f"rank {rank} holds tokens of layer {name} in runs of {share.run_tokens}, which do "
                f"not fit its {kept}: set --cp-kv-cache-interleave-size to a divisor of the "
                "attention kernel's blocks"
            )
    return share


def _decode(
    decoder: msgspec.msgpack.Decoder[_Struct], data: bytes, error: type[ReshardError], what: str
) -> _Struct:
    """Decode what may be anything."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
        # The last two escape from msgspec for strings that are not UTF-8 and for deep nesting.
        raise error(
            f"{one_line(what)} of {len(data)} bytes is not understood ({one_line(fault)}): run "
            "the same build of the connector on both engines"
        ) from fault

# SPDX-License-Identifier: Apache-2.0
"""An engine's reply to another engine's handshake, and its form on the wire.

    worker     WorkerDescription --encode_worker--> bytes, in a WorkerHandshake
    scheduler  WorkerHandshakes of all workers --encode_reply--> one reply, served to any peer
    peer       reply --decode_reply--> WorkerDescriptions

A reply consists of frames: a greeting, and one for each worker. It is read in phases, each with its
own types, so that a later phase may change between versions while earlier ones stay readable: the
connector and its version, then what must be equal at both engines (factors), both in the greeting,
then the workers' descriptions, one by one (`description`). `bounds` limits what a reply may cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from ..errors import (
    MEET_UPSTREAMS,
    LocalLayoutError,
    RemoteHandshakeError,
    RemoteIncompatibleError,
    RemoteRefusedError,
    one_line,
    quote,
)
from ..plan.shards import MeshRank
from .bounds import MAX_GREETING_BYTES, MAX_RANKS, MAX_REPLY_BYTES, ReplyBounds
from .compatibility import (
    CONNECTOR_NAME,
    RELEASE_FACTOR,
    SPOKEN,
    WEIGHT_FACTORS,
    check_compatibility,
    has_both_weights,
    known_factors,
    remedy,
)
from .description import WorkerDescription, decode, decode_worker, encode_worker

OUR_VERB = str(SPOKEN).encode()
"""First word of a request to a side channel: the versions in which it may be answered."""

OUR_REQUEST = (
    OUR_VERB
    + f" reads from this engine, which runs upstream's NixlConnector: {MEET_UPSTREAMS}".encode()
)
"""Beginning of a request. Upstream's listener logs any request that it does not understand; the
words after the verb are for readers of that log."""

_Words: TypeAlias = Annotated[str, Meta(max_length=1 << 16)]


@dataclass(frozen=True)
class WorkerHandshake:
    """A worker's handshake for any peer, which its engine's scheduler serves in another process.

    Attributes:
        factors: Values that must be equal at both engines, by name.
        body: The worker's description, encoded.
    """

    factors: dict[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Reply:
    """An engine's decoded reply.

    Attributes:
        version: Version of the protocol that both engines speak.
        release: Release of vLLM that the engine runs; None if the reply does not say.
        compares_weights: Whether both engines told their weights, so that they were compared.
        workers: Descriptions of the workers, in the order of ranks; at least one.
    """

    version: int
    release: str | None
    compares_weights: bool
    workers: tuple[WorkerDescription, ...]


class _Greeting(msgspec.Struct, frozen=True):
    """The first phase. All versions of this connector write these fields.

    Attributes:
        connector: Name of the connector that answers.
        version: Its version of the protocol.
        refusal: Why the reply ends here; empty if it does not.
        compatibility_hash: First field of the handshake of upstream's NixlConnector; None in ours.
    """

    connector: _Words = ""
    version: int = 0
    refusal: _Words = ""
    compatibility_hash: _Words | None = None


class _Terms(msgspec.Struct, frozen=True):
    """The second phase, which is readable in the versions that this connector speaks."""

    connector: str
    version: int
    factors: Annotated[dict[_Words, _Words], Meta(max_length=1 << 8)]


class _UpstreamReply(msgspec.Struct, frozen=True):
    """A reply in the form that upstream's NixlConnector reads."""

    compatibility_hash: str
    agent_metadata_bytes: bytes


_ENCODER = msgspec.msgpack.Encoder()
_GREETING_DECODER = msgspec.msgpack.Decoder(_Greeting)
_TERMS_DECODER = msgspec.msgpack.Decoder(_Terms)


def encode_replies(
    handshakes: Mapping[tuple[int, int], WorkerHandshake],
) -> dict[int, list[bytes]]:
    """Return an engine's reply in each version that it speaks, as `encode_reply` writes it.

    Args:
        handshakes: The workers' handshakes, by pipeline and tensor-parallel rank.
    """
    versions = range(SPOKEN.oldest, SPOKEN.newest + 1)
    return {version: encode_reply(handshakes, version) for version in versions}


def encode_reply(
    handshakes: Mapping[tuple[int, int], WorkerHandshake], version: int = SPOKEN.newest
) -> list[bytes]:
    """Write an engine's reply in one version.

    Args:
        handshakes: The workers' handshakes, by pipeline and tensor-parallel rank.
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
    bodies = []
    engine_id = decode_worker(first.body).engine_id
    for rank, handshake in ordered:
        for name in sorted(first.factors.keys() | handshake.factors.keys()):
            one, other = first.factors.get(name), handshake.factors.get(name)
            # A node may lack the files. What is not told by all is not told.
            if one != other and not (name in WEIGHT_FACTORS and None in (one, other)):
                raise LocalLayoutError(
                    f"{quote(name)} is {quote(one)} on rank {quote(str(first_rank))} but "
                    f"{quote(other)} on rank "
                    f"{quote(str(rank))}: start all workers of an engine alike "
                    f"({one_line(remedy(name))})"
                )
        said = decode_worker(handshake.body)
        bodies.append(encode_worker(said, version) if version < SPOKEN.newest else handshake.body)
        if said.shard.rank != rank or said.engine_id != engine_id:
            raise LocalLayoutError(
                f"the worker of rank {quote(str(rank))} of engine {quote(engine_id)} says that it "
                "is rank "
                f"{said.shard.rank} of engine {quote(said.engine_id)}: start all workers of an "
                "engine with one configuration"
            )
    factors = {
        name: value
        for name, value in known_factors(first.factors, version).items()
        if all(name in handshake.factors for _, handshake in ordered)
    }
    greeting = _ENCODER.encode(_Terms(CONNECTOR_NAME, version, factors))
    if len(greeting) > MAX_GREETING_BYTES:
        raise LocalLayoutError(
            f"what must be equal at both engines takes {len(greeting)} bytes but peers accept "
            f"{MAX_GREETING_BYTES}: give shorter --hf-overrides"
        )
    frames = [greeting, *bodies]
    num_bytes = sum(map(len, frames))
    if num_bytes > MAX_REPLY_BYTES or len(ordered) > MAX_RANKS:
        raise LocalLayoutError(
            f"the handshake of {len(ordered)} workers takes {num_bytes} bytes but peers accept "
            f"{MAX_REPLY_BYTES} of {MAX_RANKS} workers: use fewer workers in one engine"
        )
    return frames


def factors_digest(reply: Sequence[bytes]) -> str:
    """Return a digest of what an engine's reply says must be equal: all factors but its release.

    Engines with equal digests are a pair, unless layers differ; others may be one, where weights
    are not told by both or not compared.
    """
    factors = _TERMS_DECODER.decode(reply[0]).factors
    told = sorted((name, value) for name, value in factors.items() if name != RELEASE_FACTOR)
    return sha256(msgspec.json.encode(told)).hexdigest()[:16]


def encode_refusal(reason: str) -> bytes:
    """Write a refusal, which any version of this connector can read."""
    return _ENCODER.encode(_Greeting(CONNECTOR_NAME, SPOKEN.newest, reason))


def encode_refusal_for_upstream() -> bytes:
    """Write a reply that upstream's NixlConnector can read, and refuses with our reason.

    The text in place of its hash equals no hash, and its error message quotes it. If its check is
    turned off, it fails on the empty metadata instead.
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
    bounds: ReplyBounds,
) -> Reply:
    """Read an engine's reply.

    Args:
        frames: The reply's frames, at least one.
        local_factors: This engine's values that must be equal at both; None to accept any.
        bounds: Limits of the reply, which is untrusted.

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
    _check_greeting(decode(_GREETING_DECODER, greeting, RemoteHandshakeError, "the answer"))
    terms = decode(_TERMS_DECODER, greeting, RemoteHandshakeError, "the answer")
    compares_weights = False
    if local_factors is not None:
        required = known_factors(local_factors, terms.version)
        check_compatibility(required, terms.factors)
        compares_weights = has_both_weights(required, terms.factors)
    if not 0 < len(bodies) <= MAX_RANKS:
        raise RemoteHandshakeError(
            f"the answer describes {len(bodies)} ranks, but an engine has 1 to {MAX_RANKS}: run "
            "the same build of the connector on both engines"
        )
    workers = _decode_within(bounds, bodies)
    engine_ids = sorted({worker.engine_id for worker in workers})
    if len(engine_ids) > 1:
        named = " and ".join(engine_ids[:2])
        raise RemoteHandshakeError(
            f"the answer describes workers of several engines, {quote(named)}: "
            "give every engine a side channel of its own"
        )
    release = terms.factors.get(RELEASE_FACTOR)
    return Reply(terms.version, release, compares_weights, tuple(workers))


def _decode_within(bounds: ReplyBounds, bodies: Sequence[bytes]) -> list[WorkerDescription]:
    """Decode workers, each only after all before it proved to be in order and within bounds."""
    bounds.check_sizes(map(len, bodies))
    # The last worker gives the size of the mesh.
    last = decode_worker(bodies[-1], bounds.max_layers)
    left = bounds.begin(last.shard.rank, len(bodies))
    workers = []
    for body in bodies:
        worker = decode_worker(body, bounds.max_layers)
        left.check(worker.shard)
        workers.append(worker)
    return workers


def _check_greeting(greeting: _Greeting) -> None:
    """Raise for a greeting of another connector, in an unknown version, or with a refusal."""
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

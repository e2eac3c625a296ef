# SPDX-License-Identifier: Apache-2.0
"""What workers are asked to read, and what they tell the workers of another engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from ..errors import RemoteLayoutError
from .ledgers import RequestId

if TYPE_CHECKING:
    from .binding import Binding

EngineId: TypeAlias = str

BlockIds: TypeAlias = Sequence[Sequence[int]]
"""A request's block ids, one sequence for each KV-cache group."""


@dataclass(frozen=True, slots=True)
class RemoteEngineAddress:
    """Where an engine's side channel listens.

    Attributes:
        engine_id: Who should answer; a restarted engine has another id.
        host: Host name or address.
        port: TCP port.
    """

    engine_id: EngineId
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Receive:
    """A request whose blocks are to be read from another engine.

    Attributes:
        source: The engine that holds them.
        remote_request_id: What the request is called there.
        local_block_ids: The blocks to fill: the last ones of the request's. Without any, there is
            nothing to read, and the source is only told so.
        remote_block_ids: The blocks there: the last ones of the request's, too.
        local_tokens: Tokens of the request up to the end of the last local block to fill, which the
            last block need not hold in full.
        remote_tokens: The same there.
        binding: What the source should offer under that name; None where there is nothing to read.
        fault: Why the request cannot be read at all; None where nothing is known against it.
    """

    source: RemoteEngineAddress
    remote_request_id: RequestId
    local_block_ids: BlockIds
    remote_block_ids: BlockIds
    local_tokens: int
    remote_tokens: int
    binding: Binding | None = None
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class Heartbeats:
    """Requests whose leases at another engine are to be renewed.

    Attributes:
        source: The engine that holds the requests' blocks.
        request_ids: What the requests are called there.
    """

    source: RemoteEngineAddress
    request_ids: frozenset[RequestId]


class Done(msgspec.Struct, frozen=True, tag="done", array_like=True):
    """A reader is through with a request's blocks.

    Attributes:
        request_id: The request, as its holder calls it.
        notifier: Names the reader.
        num_notifiers: How many readers this holder must hear from.
    """

    request_id: str
    notifier: str
    num_notifiers: int


class Renew(msgspec.Struct, frozen=True, tag="renew", array_like=True):
    """A reader still wants the blocks of some requests.

    Attributes:
        request_ids: The requests, as their holder calls them.
    """

    request_ids: list[str]


Notification: TypeAlias = Done | Renew

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Notification] = msgspec.msgpack.Decoder(Notification)


def encode_notification(notification: Notification) -> bytes:
    """Write a notification for the wire."""
    return _ENCODER.encode(notification)


def decode_notification(data: bytes) -> Notification:
    """Read a notification from the wire.

    Raises:
        RemoteLayoutError: It is not one of ours.
    """
    try:
        notification = _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        # The last two escape from msgspec for strings that are not UTF-8 and for deep nesting.
        raise RemoteLayoutError(
            f"a notification of {len(data)} bytes is not understood ({error}): run the same "
            "version of the connector on both engines"
        ) from error
    return notification


def renewals(request_ids: Iterable[RequestId]) -> bytes:
    """The heartbeat for some requests, as bytes."""
    return encode_notification(Renew(sorted(request_ids)))

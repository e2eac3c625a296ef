# SPDX-License-Identifier: Apache-2.0
"""What workers are told by their scheduler, and what they tell the workers of another engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from ..errors import RemoteLayoutError
from .board import BoardUpdate
from .fingerprint import OfferFingerprint, OfferSecret
from .ids import BlockIds, EngineId, RequestId
from .quoting import one_line

_RequestId: TypeAlias = Annotated[str, Meta(max_length=1 << 10)]
"""As long as an id may be in a request's parameters."""

_Entry = TypeVar("_Entry")


@dataclass(frozen=True, slots=True)
class RemoteEngineAddress:
    """Where an engine's side channel listens.

    Attributes:
        engine_id: Which should answer; a restarted engine has another id.
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
        fingerprint: What the source should offer under that name; None where nothing is to be read
            and this engine does not know the tokens.
        secret: What gives the source's offer up in its place; None where it is not needed, or not
            known, so that the source cannot be told.
        fault: Why the request cannot be read at all; None where nothing is known against it.
        trace_headers: What its client's trace is known by; None where it has none.
        is_early: Its source may not have offered it yet: what it is called there, the blocks, and
            their part of the fingerprint are still to be found out. Its name is the shared one.
        attempt: Which attempt of its source's has computed it, where that was found out.
    """

    source: RemoteEngineAddress
    remote_request_id: RequestId
    local_block_ids: BlockIds
    remote_block_ids: BlockIds
    local_tokens: int
    remote_tokens: int
    fingerprint: OfferFingerprint | None = None
    fault: str | None = None
    secret: OfferSecret | None = None
    trace_headers: Mapping[str, str] | None = None
    is_early: bool = False
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class RemoteRequest:
    """A request as the engine knows it that holds its blocks.

    Attributes:
        source: That engine.
        request_id: What the request is called there.
    """

    source: RemoteEngineAddress
    request_id: RequestId


class Announcement(msgspec.Struct, frozen=True, array_like=True, tag="offer"):
    """A request that is offered, as workers hear of it before the step that says so.

    Attributes:
        number: Its offer's, among all of this engine's.
        request_id: The request.
        fingerprint: What is offered.
    """

    number: int
    request_id: RequestId
    fingerprint: OfferFingerprint


class DoneEntry(msgspec.Struct, frozen=True, array_like=True):
    """A request whose blocks a reader is through with.

    Attributes:
        request_id: The request, as its producer calls it.
        num_notifiers: How many readers this producer must hear from.
        num_tokens: With `content` and `blocks`, what the reader took the producer to offer,
            computed from the reader's own prompt and from what it was told.
        content: See `OfferFingerprint`.
        blocks: See `OfferFingerprint`.
    """

    request_id: _RequestId
    num_notifiers: Annotated[int, Meta(ge=1, lt=1 << 31)]
    num_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)]
    content: int
    blocks: int

    @classmethod
    def of(
        cls, request_id: RequestId, num_notifiers: int, fingerprint: OfferFingerprint
    ) -> DoneEntry:
        """What one of `num_notifiers` readers sends its producer."""
        return cls(
            request_id,
            num_notifiers,
            fingerprint.num_tokens,
            fingerprint.content,
            fingerprint.blocks,
        )

    @property
    def proof(self) -> OfferFingerprint:
        """What the producer must have offered."""
        return OfferFingerprint(self.num_tokens, self.content, self.blocks)


class Done(msgspec.Struct, frozen=True, tag="done", array_like=True):
    """A reader is through with the blocks of some requests.

    Attributes:
        notifier: Names the reader.
        releases: The requests.
    """

    notifier: Annotated[str, Meta(max_length=1 << 11)]
    releases: list[DoneEntry]


class GaveUpEntry(msgspec.Struct, frozen=True, array_like=True):
    """A request whose blocks a reader does not want, and has not read.

    Attributes:
        request_id: The request, as its producer calls it.
        num_notifiers: How many readers this producer must hear from.
        proof: The secret that the producer's offer went with.
    """

    request_id: _RequestId
    num_notifiers: Annotated[int, Meta(ge=1, lt=1 << 31)]
    proof: OfferSecret


class GaveUp(msgspec.Struct, frozen=True, tag="gave up", array_like=True):
    """A reader gives up the blocks of some requests, of which it knows no tokens.

    Attributes:
        notifier: Names the reader.
        releases: The requests.
    """

    notifier: Annotated[str, Meta(max_length=1 << 11)]
    releases: list[GaveUpEntry]


class Renew(msgspec.Struct, frozen=True, tag="renew", array_like=True):
    """A reader still wants the blocks of some requests.

    Attributes:
        request_ids: The requests, as their producer calls them.
    """

    request_ids: list[_RequestId]


Notification: TypeAlias = Done | GaveUp | Renew

MAX_NOTIFICATION_BYTES = 8 << 10
"""More goes into several notifications.

NIXL names no limit, and UCX cuts what does not fit a packet. But the receiver's progress thread
copies a notification in one piece, so that many short ones are better than one of a megabyte.
"""

_NUMBERS_BYTES = 1 + 3 + 2 * 5 + 2 * 9
"""The most that a release takes beside the bytes of its request's id: heads and numbers."""

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Notification] = msgspec.msgpack.Decoder(Notification)
_ANNOUNCEMENT_DECODER: msgspec.msgpack.Decoder[Announcement | BoardUpdate] = (
    msgspec.msgpack.Decoder(Announcement | BoardUpdate)
)


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
            f"a notification of {len(data)} bytes is not understood ({one_line(error)}): run the "
            "same version of the connector on both engines"
        ) from error
    return notification


def encode_announcement(announcement: Announcement | BoardUpdate) -> bytes:
    """Write an announcement, for workers of the same engine."""
    return _ENCODER.encode(announcement)


def decode_announcement(data: bytes) -> Announcement | BoardUpdate:
    """Read what this engine's own scheduler has written."""
    return _ANNOUNCEMENT_DECODER.decode(data)


def encode_done(notifier: str, entries: Iterable[DoneEntry]) -> list[bytes]:
    """What a reader tells one producer, in as few notifications as fit `MAX_NOTIFICATION_BYTES`."""
    return _encode_all(partial(Done, notifier), entries, lambda entry: entry.request_id)


def encode_gave_up(notifier: str, entries: Iterable[GaveUpEntry]) -> list[bytes]:
    """The same for what it gives up."""
    return _encode_all(partial(GaveUp, notifier), entries, lambda entry: entry.request_id)


def encode_renewals(request_ids: Iterable[RequestId]) -> list[bytes]:
    """The renewal of some requests' leases, in as few notifications as fit."""
    return _encode_all(Renew, sorted(request_ids), lambda request_id: request_id)


def _encode_all(
    make: Callable[[list[_Entry]], Notification],
    entries: Iterable[_Entry],
    id_of: Callable[[_Entry], RequestId],
) -> list[bytes]:
    """Write entries in as few notifications as fit `MAX_NOTIFICATION_BYTES`.

    Args:
        make: Makes a notification of some entries.
        entries: All of them.
        id_of: The request's id in an entry.
    """
    room_bytes = MAX_NOTIFICATION_BYTES - len(_ENCODER.encode(make([]))) - 4
    return [encode_notification(make(part)) for part in _cut(entries, room_bytes, id_of)]


def _cut(
    entries: Iterable[_Entry], room_bytes: int, id_of: Callable[[_Entry], RequestId]
) -> Iterator[list[_Entry]]:
    """Cut a list where it does not fit a message any more; an entry alone goes in any case.

    Args:
        entries: What to send.
        room_bytes: Room for them in a message.
        id_of: The request's id in an entry, all that has no bound of a few bytes.
    """
    part: list[_Entry] = []
    part_bytes = 0
    for entry in entries:
        entry_bytes = len(id_of(entry).encode()) + _NUMBERS_BYTES
        if part and part_bytes + entry_bytes > room_bytes:
            yield part
            part, part_bytes = [], 0
        part.append(entry)
        part_bytes += entry_bytes
    if part:
        yield part
